"""A method's model as named arrays: what a task begins with, and what it goes back to."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.keys.folder import initialise
from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.method import Binding, Method, ModelMismatch, read_binding
from aggregator.methods.scatter import ScatterMethod, ScatterSettings
from aggregator.rounds.aggregation import Aggregation, VersionKeeper
from aggregator.store import TaskStore
from aggregator.store.rows import VersionRow
from aggregator.tables import TomlTable
from aggregator.task.file import ModelsSettings
from aggregator.task.warm_start import WarmStart
from device_sdk.artifact import Artifact, load_artifact, safetensors
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.scatter.contract import LossName
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.catalogue import Catalogue
from tests.fakes.handmade import linear_artifact

NOW = 1_700_000_000.0


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    linear_artifact(tmp_path / "linear")
    return load_artifact(tmp_path / "linear")


@pytest.fixture
def store(tmp_path: Path) -> TaskStore:
    home = AggregatorHome(tmp_path / "home")
    initialise(home, int(time.time()), os.urandom)
    return home.open_store().first


def publishable(broadcast: Broadcast) -> None:
    """Nothing is published here."""


def aggregation(
    store: TaskStore,
    binding: Binding[Any],
    artifact: Artifact | None,
    warm: str | None = None,
    items: int = 0,
) -> Aggregation:
    parts = () if artifact is None else (artifact,)
    start = None if warm is None else WarmStart.read(warm, Path("/"))
    keeper = VersionKeeper(store, ModelsSettings(), None, start, parts, lambda: NOW)
    made = Aggregation(binding, store, items, 100, publishable, parts, keeper)
    made.resume(None)
    return made


def fedavg(**training: object) -> Binding[Any]:
    table = {"optimizer": {"name": "adam"}, "training": training}
    return read_binding("fedavg", TomlTable(table, "fedavg"))


def scatter() -> Binding[Any]:
    return read_binding("scatter", TomlTable({"columns": 4}, "scatter"))


def file_of(tmp_path: Path, arrays: Mapping[str, np.ndarray], **notes: str) -> str:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors.encode(arrays, notes))
    return str(path)


def test_the_first_version_is_kept_and_a_home_of_before_is_taken_over(
    store: TaskStore, artifact: Artifact
) -> None:
    aggregation(store, fedavg(), artifact)
    (row,) = store.versions.all()
    assert (row.version, row.round, row.closed_unix_seconds, row.kept) == (0, 0, NOW, True)
    assert row.artifact == artifact.manifest.id
    found = store.versions.model(0)
    assert set(found) == {"linear.weight", "linear.bias", "mean"}
    for name, array in found.items():
        np.testing.assert_array_equal(array, artifact.initial[name])
    store.database.execute("DELETE FROM versions")
    aggregation(store, fedavg(), artifact)
    assert [row.version for row in store.versions.all()] == [0]


def test_a_round_that_changes_nothing_leaves_the_version_as_it_is_known(
    store: TaskStore, artifact: Artifact
) -> None:
    made = aggregation(store, fedavg(), artifact)
    store.versions.pin(0, pinned=True)
    store.versions.note_metrics(0, {"loss": 0.5})
    made.open_round(1)
    summary = made.close_round()
    with store.database.transaction():
        made.commit_version(summary)
    (row,) = store.versions.all()
    assert row.pinned and row.metrics == {"loss": 0.5} and row.devices == 0


def test_a_task_begins_with_a_file_or_another_tasks_version(
    store: TaskStore, artifact: Artifact, tmp_path: Path
) -> None:
    arrays = {n: np.ones_like(a) for n, a in artifact.initial.items()}
    air = store.fleet.task(store.fleet.tasks.add("air", "air.toml", ""))
    other = VersionRow(7, 7, 0.0, 3, "", "", 0, {}, False, True, 0)
    air.versions.add(other, {name: array + 1 for name, array in arrays.items()})
    for warm, added in ((file_of(tmp_path, arrays), 1.0), ("task:air@7", 2.0)):
        for table in ("checkpoints", "versions WHERE task = 1"):
            store.database.execute(f"DELETE FROM {table}")
        made = aggregation(store, fedavg(), artifact, warm)
        assert made.version == 0
        (row,) = store.versions.all()
        assert row.origin == warm
        for array in store.versions.model(0).values():
            np.testing.assert_array_equal(array, np.full_like(array, added))
    # Only the first version: the file may be gone afterwards.
    again = aggregation(store, fedavg(), artifact, "/gone.safetensors")
    np.testing.assert_array_equal(again.state()["model"], made.state()["model"])


@pytest.mark.parametrize(
    ("warm", "message"),
    [
        ("/gone.safetensors", "cannot be read: No such file"),
        ("task:air@latest", "has no task 'air'"),
        ("task:here@latest", "task here: the task has no version yet"),
    ],
)
def test_what_is_not_there_is_said(
    store: TaskStore, artifact: Artifact, warm: str, message: str
) -> None:
    store.fleet.tasks.change(store.number, name="here")
    with pytest.raises(AggregatorError, match=message):
        aggregation(store, fedavg(), artifact, warm)
    assert store.checkpoints.get("version") is None and store.versions.all() == []


def test_all_that_does_not_fit_is_listed(
    store: TaskStore, artifact: Artifact, tmp_path: Path
) -> None:
    wrong = {
        "linear.weight": np.zeros((2, 2), np.float32),
        "bias.old": np.zeros(3, np.float32),
        "head": np.zeros(3, np.float32),
    }
    with pytest.raises(AggregatorError) as refused:
        aggregation(store, fedavg(), artifact, file_of(tmp_path, wrong))
    said = str(refused.value)
    assert "task.warm_start" in said and "does not fit" in said
    for part in ("'linear.bias' [", "is missing", "'bias.old' is unknown", "'head' is unknown"):
        assert part in said
    assert "'linear.weight' is float32 [2, 2], expected float32 [" in said
    damaged = tmp_path / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises(AggregatorError, match="no model that can be read"):
        aggregation(store, fedavg(), artifact, str(damaged))


def test_a_bad_source_is_refused_by_the_task_file() -> None:
    for said in ("task:clicks", "task:@best", "task:Clicks@best", "task:clicks@-1", "task:a@b@1"):
        with pytest.raises(ValueError, match="expected task:NAME@best"):
            WarmStart.read(said, Path("/"))
    assert WarmStart.read("a.safetensors", Path("/home")).file == Path("/home/a.safetensors")
    # A task file names a version with its task; on the command line it may stand alone.
    for said in ("best", "12", "air@best"):
        assert WarmStart.read(said, Path("/home")).file == Path("/home") / said
        assert WarmStart.read(said, Path("/home"), own=True).file is None


def test_item_vectors_go_to_their_ids(store: TaskStore, tmp_path: Path) -> None:
    catalogue = Catalogue(("a", "b", "c", "d"), ("", "", "", ""))
    with store.database.transaction():
        store.facts.catalogue = encode(catalogue)
    drawn = aggregation(store, scatter(), None, items=4).state()["items"]
    store.database.execute("DELETE FROM checkpoints")
    store.database.execute("DELETE FROM versions")
    given = np.arange(12, dtype=np.float32).reshape(3, 4)
    warm = file_of(tmp_path, {"items": given}, items=json.dumps(["d", "x", "a"]))
    items = aggregation(store, scatter(), None, warm, items=4).state()["items"]
    require_but_for_a_turn(items, np.stack([given[2], drawn[1], drawn[2], given[0]]))
    store.database.execute("DELETE FROM checkpoints")
    for ids, message in (
        (["x", "y", "z"], "none of its items is in the task's catalogue"),
        (["a"], "1 ids are given for 3 vectors"),
    ):
        warm = file_of(tmp_path, {"items": given}, items=json.dumps(ids))
        with pytest.raises(AggregatorError, match=message):
            aggregation(store, scatter(), None, warm, items=4)
    for ids_text in ("{", "[1]", '"a"', "[" * 100_000):
        warm = file_of(tmp_path, {"items": given}, items=ids_text)
        with pytest.raises(AggregatorError, match="no JSON list of items' ids"):
            aggregation(store, scatter(), None, warm, items=4)


def require_but_for_a_turn(items: np.ndarray, expected: np.ndarray) -> None:
    """Least squares keeps items in their principal axes, which changes no product of two."""
    np.testing.assert_allclose(items @ items.T, expected @ expected.T, rtol=1e-5, atol=1e-5)


def moved(method: Method, number: int, update: Update) -> None:
    method.open_round(number)
    method.check(update)
    method.absorb(update)
    method.close_round()


def test_a_method_goes_back_and_its_optimizer_begins_anew() -> None:
    rng = np.random.default_rng(0)
    parameters = {"0.w": rng.standard_normal((3, 2)).astype(np.float32)}
    counts = {"0.batches": np.zeros((), np.int64)}
    training = FedAvgTraining(personal="head")
    parameters["head.w"] = np.ones(2, np.float32)
    one = FedAvgMethod(parameters, counts, FedAvgSettings(training=training))
    assert set(one.model) == {"0.w"}  # personal layers never come here
    step = {"w.0.w": np.full((3, 2), 0.1, np.float32)}
    told = {"loss": 1.0, "samples": 3}
    moved(one, 1, Update(1, step, told, "ab" * 16))
    first = one.model
    moved(one, 2, Update(2, step, told, "ab" * 16))
    assert np.abs(one.model["0.w"] - first["0.w"]).max() > 0.05
    one.adopt(first)
    assert one.version == 3
    np.testing.assert_array_equal(one.model["0.w"], first["0.w"])
    # What devices keep to themselves may be in a file, and is not taken; what is of no model is.
    one.adopt({**first, "head.w": np.zeros(2, np.float32), "0.batches": np.zeros((), np.int64)})
    before = one.state()
    for odd in ({}, {"0.w": first["0.w"].T}, {**first, "1.w": first["0.w"]}):
        with pytest.raises(ModelMismatch):
            one.adopt(odd)
    with pytest.raises(ModelMismatch, match=r"'0\.w' holds numbers that are not finite"):
        one.adopt({"0.w": np.full((3, 2), np.nan, np.float32)})
    for name, array in one.state().items():
        np.testing.assert_array_equal(array, before[name])
    assert one.version == 4


@pytest.mark.parametrize("loss", ["least-squares", "bpr"])
def test_an_older_matrix_leaves_the_items_that_came_since_as_they_are(loss: LossName) -> None:
    items = np.arange(12, dtype=np.float32).reshape(4, 3)
    method = ScatterMethod(items, ScatterSettings(loss=loss))
    method.grow(np.full((1, 3), 7, np.float32))
    method.adopt({"items": items + 1})
    last = method.items[4]
    assert np.linalg.norm(last) == pytest.approx(7 * 3**0.5)
    require_but_for_a_turn(method.items[:4], items + 1)
    if loss == "bpr":
        np.testing.assert_array_equal(method.items, np.concatenate([items + 1, [[7, 7, 7]]]))
    for odd, message in (
        (np.zeros((9, 3), np.float32), "9 vectors, the catalogue has 5 items"),
        # Of least squares the width is the version's own.
        (np.zeros((4, 2), np.float32), r"expected float32 \[4, 3\]")
        if loss == "bpr"
        else (np.zeros((4, 0), np.float32), "0 columns; expected 1"),
        (np.zeros(3, np.float32), "expected float32"),
    ):
        with pytest.raises(ModelMismatch, match=message):
            method.adopt({"items": odd})
    assert method.version == 2


def test_a_method_whose_devices_keep_their_models_says_so(artifact: Artifact) -> None:
    table = TomlTable({"training": {"classes": 3}}, "teacher_logits")
    method = read_binding("teacher_logits", table).build(0, np.random.default_rng(0), ())
    assert method.model_arrays is None
    with pytest.raises(ModelMismatch, match="each device has its own"):
        method.adopt({})


def test_attentions_model_is_the_global_one_by_name(artifact: Artifact) -> None:
    binding = read_binding("attention", TomlTable({}, "attention"))
    method = binding.build(0, np.random.default_rng(0), (artifact,))
    model = method.model_arrays
    assert model is not None and set(model) == {"linear.weight", "linear.bias"}
    for name, array in model.items():
        np.testing.assert_array_equal(array, artifact.initial[name])
    method.adopt({name: array + 1 for name, array in model.items()})
    assert method.version == 1
    np.testing.assert_array_equal(
        (method.model_arrays or {})["linear.bias"], artifact.initial["linear.bias"] + 1
    )
