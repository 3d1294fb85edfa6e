"""What of a version can become a file, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from aggregator.errors import AggregatorError
from aggregator.models import model_files
from aggregator.store.rows import VersionRow
from aggregator.task.file import Task, read_task
from device_sdk import Trainer
from device_sdk.artifact import load_artifact, safetensors
from device_sdk.methods.scatter.least_squares import LeastSquares, Likes
from device_sdk.standalone_check import run_standalone
from tests.fakes.handmade import frozen_artifact, linear_artifact

FEW = np.arange(8, dtype=np.float32).reshape(2, 4)


def task(folder: Path, method: str, more: str = "") -> Task:
    linear_artifact(folder / "linear")
    path = folder / "task.toml"
    path.write_text(
        f'[task]\nmethod = "{method}"\nartifacts = ["linear"]\n'
        f'[broker]\nurl = "mqtt://127.0.0.1"\n{more}\n'
    )
    return read_task(path)


def row(artifact: str = "", version: int = 4, items: int = 0) -> VersionRow:
    return VersionRow(version, 9, 0.0, 3, artifact, "", 100, {}, False, True, items)


def test_a_global_model_of_attention_becomes_a_graph(tmp_path: Path) -> None:
    made = task(tmp_path, "attention")
    artifact = load_artifact(tmp_path / "linear")
    # Parameters alone, as attention has them; the buffer is the artifact's own.
    model = {n: a + np.float32(0.5) for n, a in artifact.initial.items() if n.startswith("linear.")}
    (data,) = model_files("onnx", made, row(artifact.manifest.id), model, ()).values()
    samples = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}
    trainer = Trainer(tmp_path / "linear")
    trainer.set_parameters(model)
    found, wanted = run_standalone(data, samples), trainer.predict(samples)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


def test_personal_layers_have_no_file_here_but_what_is_shared_has(tmp_path: Path) -> None:
    made = task(tmp_path, "fedavg", '[fedavg.training]\npersonal = "linear.bias"')
    artifact = load_artifact(tmp_path / "linear")
    method = made.binding.build(0, np.random.default_rng(0), (artifact,))
    assert method.model_arrays is not None and "linear.bias" not in method.model_arrays
    of = row(artifact.manifest.id)
    with pytest.raises(AggregatorError, match=r"linear.bias stay on the devices.*Device.model\(\)"):
        model_files("onnx", made, of, method.model_arrays, ())
    (data,) = model_files("safetensors", made, of, method.model_arrays, ()).values()
    found = safetensors.decode(data)
    assert found.tensors.keys() == method.model_arrays.keys()
    assert found.metadata["artifact"] == artifact.manifest.id


def test_a_version_of_an_artifact_that_is_listed_no_more_is_named(tmp_path: Path) -> None:
    made = task(tmp_path, "fedavg")
    with pytest.raises(AggregatorError, match=r"4 is of the artifact abababab.*safetensors"):
        model_files("onnx", made, row("ab" * 32), {}, ())


def test_a_model_that_does_not_fit_its_artifact_is_refused(tmp_path: Path) -> None:
    made = task(tmp_path, "fedavg")
    artifact = load_artifact(tmp_path / "linear")
    model = {**artifact.initial, "linear.bias": np.zeros(9, np.float32)}
    with pytest.raises(AggregatorError, match=r"version 4 as ONNX: 'linear.bias' is float32 \[9\]"):
        model_files("onnx", made, row(artifact.manifest.id), model, ())


def test_a_version_of_least_squares_is_folded_into_as_it_solves(tmp_path: Path) -> None:
    (tmp_path / "items.tsv").write_text("".join(f"film-{place}\n" for place in range(30)))
    path = tmp_path / "task.toml"
    path.write_text('[task]\ncatalogue = "items.tsv"\n[broker]\nurl = "mqtt://127.0.0.1"\n')
    made = read_task(path)
    method = made.binding.build(30, np.random.default_rng(0))
    assert method.model_arrays is not None
    model, liked = dict(method.model_arrays), np.array([3, 20])
    found = safetensors.decode(model_files("safetensors", made, row(items=30), model, ())[""])
    assert found.tensors["solve"].shape == (2,)

    def folded(model: dict[str, np.ndarray]) -> np.ndarray:
        data = model_files("onnx", made, row(items=30), model, ())[".fold-in"]
        return np.asarray(run_standalone(data, {"liked": liked})["user"])

    problem = LeastSquares.of(method.open_round(1).tensors)
    scores = problem.vectors([Likes.of(liked)]) @ problem.items.T
    np.testing.assert_allclose(folded(model) @ model["items"].T, scores, rtol=2e-3)
    # The version says which loss it is of, whatever the task file says by now.
    of_bpr = folded({"items": model["items"]})
    assert np.abs(of_bpr - folded(model)).max() > 1e-3 * np.abs(of_bpr).max()


def test_item_vectors_leave_with_their_ids_in_every_format(tmp_path: Path) -> None:
    (tmp_path / "items.tsv").write_text("film-a\nfilm-b\n")
    path = tmp_path / "task.toml"
    path.write_text('[task]\ncatalogue = "items.tsv"\n[broker]\nurl = "mqtt://127.0.0.1"\n')
    made, ids = read_task(path), ("film-a", "film-b")
    (data,) = model_files("safetensors", made, row(items=2), {"items": FEW}, ids).values()
    found = safetensors.decode(data)
    np.testing.assert_array_equal(found.tensors["items"], FEW)
    assert json.loads(found.metadata["items"]) == list(ids)
    graphs = model_files("onnx", made, row(items=2), {"items": FEW}, ids)
    assert list(graphs) == ["", ".fold-in"]
    for each in graphs.values():
        notes = {p.key: p.value for p in onnx.load_from_string(each).metadata_props}
        assert json.loads(notes["items"]) == list(ids) and notes["version"] == "4"


def test_a_file_has_what_is_frozen_too(tmp_path: Path) -> None:
    made = task(tmp_path, "fedavg")
    manifest = frozen_artifact(tmp_path / "linear")
    artifact = load_artifact(tmp_path / "linear")
    method = made.binding.build(0, np.random.default_rng(0), (artifact,))
    assert method.model_arrays is not None and "mean" not in method.model_arrays
    of = row(manifest.id)
    (data,) = model_files("safetensors", made, of, method.model_arrays, ()).values()
    found = safetensors.decode(data).tensors
    assert found.keys() == artifact.initial.keys()
    np.testing.assert_array_equal(found["mean"], artifact.initial["mean"])
    assert model_files("onnx", made, of, method.model_arrays, ())[""]
