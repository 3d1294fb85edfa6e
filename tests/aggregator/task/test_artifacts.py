"""What of a task's artifacts goes to devices: rungs of a ladder, as parts and by themselves."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import export
from aggregator.errors import AggregatorError
from aggregator.task.artifacts import ArtifactContent, read_artifacts
from aggregator.task.file import read_task
from device_sdk import Trainer
from device_sdk.artifact.load import rung_folders
from device_sdk.wire.publish.content import unpack_artifact
from tests.fakes.personal_ladders import TRAINING, WIDTH, Net, samples, write_ladder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ladder of ranks, with what has to be held; and one of adapters on a frozen backbone."""
    folder = tmp_path_factory.mktemp("ladders")
    torch.manual_seed(1)
    net = Net(hidden=800)
    write_ladder("prototypes", folder / "ranks", net, ranks=(1 / 8, 1))
    write_ladder("prototypes", folder / "adapters", adapted, widths=(1, 4))
    return folder


def adapted(rank: int) -> nn.Module:
    torch.manual_seed(1)
    return export.lora(Net(hidden=800), rank, trained=("head",))


@pytest.fixture
def ladders(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "task"))


def read(folder: Path, artifact: str, method: str = "prototypes") -> tuple[ArtifactContent, ...]:
    text = f'[task]\nmethod = "{method}"\nartifact = "{artifact}"\n[{method}.training]\n'
    (folder / "task.toml").write_text(text + TRAINING.get(method, ""))
    return read_artifacts(read_task(folder / "task.toml"))


def as_on_a_device(given: ArtifactContent, home: Path) -> Trainer:
    folder = home / given.artifact_id.hex()
    folder.mkdir(parents=True)
    for name, data in unpack_artifact(given.content, given.artifact_id).items():
        (folder / name).write_bytes(data)
    if given.shared is not None:
        (home / given.artifact.manifest.shared_file).write_bytes(given.shared)
    return Trainer(folder, providers="cpu")


@pytest.mark.parametrize("kind", ["ranks", "adapters"])
def test_a_rung_by_itself_begins_as_its_part_of_the_full_model(
    kind: str, ladders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whose last bits are another machine's business: the id of what goes out is not.
    monkeypatch.setattr(np.linalg, "svd", pytest.fail)
    rungs, found = rung_folders(ladders / kind), read(ladders, kind)
    x = samples(0)["x"]
    for folder, given in zip(rungs, found, strict=True):
        own, part = as_on_a_device(given, tmp_path / "home"), Trainer(folder, providers="cpu")
        assert own.artifact == given.artifact.manifest and own.artifact.submodel is None
        for name, value in {**part.parameters, **part.buffers}.items():
            np.testing.assert_array_equal({**own.parameters, **own.buffers}[name], value)
        expected = part.predict({"x": x})["embedding"]
        np.testing.assert_array_equal(own.predict({"x": x})["embedding"], expected)
        assert expected.shape == (len(x), WIDTH) and own.artifact.frozen == part.artifact.frozen
    # Different parts, and the ids that devices know them by say so.
    assert len({each.artifact_id for each in found}) == 2
    assert {each.shared_id for each in found} == {found[0].shared_id}
    assert (found[0].shared is None) == (kind == "ranks")


@pytest.mark.parametrize("method", ["prototypes", "fedavg"])
def test_a_rung_is_a_part_where_others_are_there_and_the_model_is_one(
    method: str, ladders: Path
) -> None:
    several, alone = read(ladders, "ranks", method), read(ladders, "ranks/1of8", method)
    parts = [each.artifact.manifest.submodel is not None for each in (*several, *alone)]
    assert parts == [method == "fedavg"] * 2 + [False]


@pytest.mark.parametrize("method", ["prototypes", "fedavg"])
@pytest.mark.parametrize("artifact", ["ranks", "ranks/full"])
def test_first_values_that_are_missing_or_another_model_s_are_named(
    artifact: str, method: str, ladders: Path
) -> None:
    first = ladders / "ranks/full.safetensors"
    first.write_bytes((ladders / "adapters/full.safetensors").read_bytes())
    with pytest.raises(AggregatorError, match=r"is not of the model that .* is a part of"):
        read(ladders, artifact, method)
    first.unlink()
    with pytest.raises(AggregatorError, match=r"full\.safetensors.* keep the .*folder as export"):
        read(ladders, artifact, method)


@pytest.mark.parametrize("again", ["ranks", "ranks/1of8", "copied"])
def test_an_artifact_that_is_listed_twice_is_named(again: str, ladders: Path) -> None:
    """Devices know artifacts by their bytes, and take no task with one of them twice."""
    shutil.copytree(ladders / "ranks", ladders / "copied")
    text = f'[task]\nmethod = "prototypes"\nartifacts = ["ranks", "{again}"]\n'
    training = f"[prototypes.training]\n{TRAINING['prototypes']}"
    (ladders / "task.toml").write_text(text + training)
    with pytest.raises(AggregatorError, match=r"ranks/1of8 and .*1of8 are the same"):
        read_artifacts(read_task(ladders / "task.toml"))
