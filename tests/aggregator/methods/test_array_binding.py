"""Methods on arrays behind the store: who sent what survives a crash, bit for bit."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from aggregator.errors import AggregatorError, TaskError
from aggregator.home import AggregatorHome
from aggregator.keys.folder import initialise
from aggregator.methods.method import Binding, read_binding
from aggregator.methods.robust import unpack_updates
from aggregator.rounds.aggregation import Aggregation
from aggregator.rounds.late import Sent
from aggregator.store import TaskStore
from aggregator.store.rows import LoggedUpdate, RoundRow
from aggregator.tables import TomlTable
from device_sdk.artifact import Artifact, load_artifact
from device_sdk.artifact.flat_layout import layout_of
from device_sdk.methods.state import part
from device_sdk.wire.arrays.exchange import Broadcast, Update, encode_update
from device_sdk.wire.arrays.tensors import Codec
from device_sdk.wire.codec.errors import WireError
from tests.fakes.handmade import linear_artifact

SENDERS = [bytes([number]) * 16 for number in range(5)]
ROW = RoundRow(1, 1, 0, time.time(), time.time() + 60, bytes(32), 2**64 - 1, 5, 0)


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    linear_artifact(tmp_path / "linear")
    return load_artifact(tmp_path / "linear")


@pytest.fixture
def store(tmp_path: Path) -> TaskStore:
    home = AggregatorHome(tmp_path / "home")
    initialise(home, int(time.time()), os.urandom)
    return home.open_store().first


def any_is_publishable(broadcast: Broadcast) -> None:
    """Nothing is published here."""


def attention() -> Binding:
    return read_binding("attention", TomlTable({"training": {"warm_up_rounds": 1}}, "attention"))


def body(artifact: Artifact, place: int) -> bytes:
    size = layout_of(artifact.manifest).size
    vector = np.random.default_rng(place).standard_normal(size).astype(np.float32)
    metadata = {"samples": 10 + place, "mixture": False, "loss": 0.5}
    return encode_update(Update(1, {"vector": vector}, metadata), Codec.FLOAT16)


def test_the_log_is_replayed_with_its_senders(store: TaskStore, artifact: Artifact) -> None:
    aggregation = Aggregation(attention(), store, 0, 2, any_is_publishable, [artifact])
    aggregation.resume(None)
    aggregation.open_round(1)
    with store.database.transaction():
        store.rounds.add(ROW)
    for place, device_id in enumerate(SENDERS):
        logged = LoggedUpdate(aggregation.next_seq(), 1, device_id, 0.0, body(artifact, place))
        (update,) = aggregation.read_each(ROW, [Sent(logged.body, device_id, ROW.round)])
        assert isinstance(update, Update) and update.sender == device_id.hex()
        with store.database.transaction():
            store.log.append([logged], [])
        assert not aggregation.absorb(ROW, [(logged, update)])
    # Checkpoints lie after the second and the fourth; the fifth comes out of the log.
    again = Aggregation(attention(), store, 0, 2, any_is_publishable, [artifact])
    again.resume(ROW)
    assert again.participants == aggregation.participants == len(SENDERS)
    before, after = aggregation.state(), again.state()
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    held = unpack_updates(part("held.", before))
    assert {update.sender for update in held} == {device_id.hex() for device_id in SENDERS}


def test_the_log_says_once_whose_claims_count_for_less(
    store: TaskStore, artifact: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    aggregation = Aggregation(attention(), store, 0, 100, any_is_publishable, [artifact])
    aggregation.resume(None)
    for number in (1, 2, 3):
        aggregation.open_round(number)
        for place, device_id in enumerate(SENDERS):
            claimed = 3200 if place == 4 else 10 + place
            size = layout_of(artifact.manifest).size
            vector = np.random.default_rng(place).standard_normal(size).astype(np.float32)
            metadata = {"samples": claimed, "mixture": False, "loss": 0.5}
            update = Update(number, {"vector": vector}, metadata, device_id.hex())
            logged = LoggedUpdate(aggregation.next_seq(), number, device_id, 0.0, b"")
            aggregation.absorb(ROW, [(logged, update)])
        summary = aggregation.close_round()
        assert summary.metrics["fewer_samples"] >= 1
        with store.database.transaction():
            aggregation.commit_version(summary)
    (said,) = [each.message for each in caplog.records if "fewer samples count" in each.message]
    assert f"{SENDERS[4].hex()} (samples 3,200 as " in said


def test_a_body_that_is_no_update_is_refused(artifact: Artifact) -> None:
    binding = attention()
    whole = body(artifact, 1)
    assert binding.decode(whole, 4, 0, "ab" * 16).round_id == 4
    for bad in (b"", whole[:-1], whole + b"\x00", b"\x09" + whole[1:]):
        with pytest.raises(WireError):
            binding.decode(bad, 4, 0)
    assert binding.width_of(binding.decode(whole, 4, 0)) == 0


@pytest.mark.parametrize(("named", "told"), [({}, 0.125), ({"learning_rate": 0.5}, 0.5)])
def test_attention_s_devices_are_told_the_artifact_s_rate_unless_the_task_names_one(
    tmp_path: Path, named: dict[str, object], told: float
) -> None:
    linear_artifact(tmp_path / "linear")  # its own rate is 0.125
    table = TomlTable({"training": {**named}, "rate_decay": 0.5}, "attention")
    method = read_binding("attention", table).build(
        0, np.random.default_rng(0), [load_artifact(tmp_path / "linear")]
    )
    rates = [method.open_round(number).settings["learning_rate"] for number in (1, 2)]
    assert rates == [told, told / 2]


def test_artifacts_that_do_not_suit_the_method_are_named(
    store: TaskStore, artifact: Artifact
) -> None:
    mutual = read_binding("mutual", TomlTable({"training": {"classes": 3}}, "mutual"))
    with pytest.raises(AggregatorError, match=r"artifacts do not suit mutual: .*public samples"):
        Aggregation(mutual, store, 0, 100, any_is_publishable, [artifact]).resume(None)


@pytest.mark.parametrize(
    ("method", "values", "message"),
    [
        ("teacher_logits", {}, r"teacher_logits.training.classes is missing"),
        ("teacher_logits", {"training": {"classes": 1}}, r"teacher_logits.training.classes is 1"),
        (
            "mutual",
            {"training": {"classes": 3, "project": 1}},
            r"training.project is 1; expected true",
        ),
        ("mutual", {"training": {"classes": 3}, "most_public": "x"}, r"mutual.most_public is 'x'"),
        ("attention", {"clusters": {"hysteresis": "x"}}, r"attention.clusters.hysteresis is 'x'"),
        ("attention", {"cluster": {}}, r"attention.cluster is unknown here; known are"),
        (
            "fedavg",
            {"training": {"personal": 3}},
            r"training.personal is 3; expected a text",
        ),
    ],
)
def test_settings_are_read_by_name(method: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        read_binding(method, TomlTable(values, method))
