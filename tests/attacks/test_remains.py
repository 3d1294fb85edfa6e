"""What the aggregator deleted is in no byte of its files: pages, free pages, write-ahead log."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

import numpy as np
import pytest

from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from tests.attacks.conftest import MakeStage
from tests.attacks.stage import Stage
from tests.fakes.scatter_updates import users
from tests.faults.known import ITEMS, WIDTH, known_body

_DEVICES = 6
_LINES = (
    f"quorum = {_DEVICES}\nwait_for_devices = {_DEVICES}\ndeadline_seconds = 60\npause_seconds = 5"
)


def _stage(
    make_stage: MakeStage, body: Callable[[int, int, int], bytes] = known_body, items: int = ITEMS
) -> Stage:
    stage = make_stage(judged=False, devices=_DEVICES, round_lines=_LINES, body=body, items=items)
    # The oracle's copies of updates and verdicts are no part of the product.
    for trigger in ("copy_update", "copy_verdict", "change_verdict"):
        stage.store.database.execute(f"DROP TRIGGER {trigger}")
    return stage


def _bytes(stage: Stage) -> bytes:
    """All that is on the disk of the database, as a thief would read it."""
    path = stage.fleet.aggregator.database
    return b"".join(each.read_bytes() for each in sorted(path.parent.glob(f"{path.name}*")))


def _long_body(place: int, generation: int, number: int) -> bytes:
    """Of several pages, and without a byte that repeats itself."""
    rng = np.random.default_rng([place, number])
    pulls, factor = rng.standard_normal((300, WIDTH)), rng.standard_normal((WIDTH, WIDTH))
    tensors = users(range(300), pulls, factor)
    return encode_scatter_update(Update(number, tensors), WIDTH, "float32")


@pytest.mark.parametrize(
    ("body", "items"), [(known_body, ITEMS), (_long_body, 300)], ids=["short", "many pages"]
)
def test_no_body_is_left_once_its_version_is_made(
    make_stage: MakeStage, body: Callable[[int, int, int], bytes], items: int
) -> None:
    stage = _stage(make_stage, body, items)
    stage.run_until(
        lambda: stage.parts.first.ingest.counted == _DEVICES - 1 or _version(stage) == 1
    )
    generation = stage.parts.first.rounds.generation
    stage.run_until(lambda: _version(stage) == 3)
    held = _bytes(stage)
    for number in (1, 2, 3):
        for place in range(_DEVICES):
            whole = body(place, generation, number)
            assert whole not in held
            # Nor any page of it.
            assert not any(whole[at : at + 100] in held for at in range(2000, len(whole), 2000))


def _version(stage: Stage) -> int:
    return stage.version


def test_a_reader_delays_it_until_it_has_ended(make_stage: MakeStage) -> None:
    stage = _stage(make_stage)
    reader = sqlite3.connect(stage.fleet.aggregator.database)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM rounds").fetchone()
    generation = stage.parts.first.rounds.generation
    stage.run_until(lambda: _version(stage) == 1)
    assert known_body(0, generation, 1) in _bytes(stage)
    reader.close()
    stage.run(15.0)
    assert known_body(0, generation, 1) not in _bytes(stage)


def test_no_group_key_is_left_once_it_was_replaced(make_stage: MakeStage) -> None:
    stage = _stage(make_stage)
    old = stage.store.secrets.group_keys()[0].key
    stage.run_until(lambda: _version(stage) == 1)
    assert old in _bytes(stage)
    stage.command("rotate", "group")
    stage.run_until(lambda: old not in {each.key for each in stage.store.secrets.group_keys()})
    stage.run(1.0)
    assert old not in _bytes(stage)


@pytest.mark.parametrize("served", [True, False])
def test_no_admission_key_is_left_of_a_revoked_device(make_stage: MakeStage, served: bool) -> None:
    stage = _stage(make_stage)
    stage.run_until(lambda: _version(stage) == 1)
    grant = stage.devices[0].grant
    if not served:
        stage.kill_aggregator()
    stage.command("revoke", grant.device_id.hex())
    if served:
        stage.run(1.0)
    assert grant.admission_key not in _bytes(stage)
    assert grant.device_id in _bytes(stage)
    stage.hand = f"no round opens before {_DEVICES} devices are enrolled"


def test_this_does_not_hang_on_how_sqlite_was_built(make_stage: MakeStage) -> None:
    stage = _stage(make_stage)
    assert stage.store.database.row("PRAGMA secure_delete") == (1,)
