"""The oracle of the long runs would notice: each kind of broken promise, made by hand."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aggregator.store.checkpoints import MethodCheckpoint
from tests.attacks.stage import Stage
from tests.faults.fleet_home import FleetHome
from tests.faults.oracle import Mismatch, judge


@pytest.fixture
def fleet() -> Iterator[FleetHome]:
    """Three devices after a few rounds."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield _played(Path(folder))


def _played(folder: Path, versions: int = 3) -> FleetHome:
    stage = Stage(folder)
    stage.run_until(lambda: stage.parts.first.aggregation.version == versions)
    stage.run(1.0)
    stage.close()
    judged = judge(stage.fleet)
    assert judged.receipted == {"counted": 3 * versions}
    assert judged.lost == judged.twice == judged.waiting == 0
    return stage.fleet


def _change_items(fleet: FleetHome, row: int, column: int, by: float) -> None:
    store = fleet.open_store()
    found = store.first.checkpoints.get("version")
    assert found is not None
    state = {name: array.copy() for name, array in found.state.items()}
    state["items"][row, column] += by
    with store.database.transaction():
        store.first.checkpoints.put(
            MethodCheckpoint("version", found.round, 0, found.version, state)
        )
    store.database.close()


def _run(path: Path, sql: str) -> None:
    database = sqlite3.connect(path)
    database.execute(sql)
    database.commit()
    database.close()


def test_rounds_that_devices_have_forgotten_are_judged_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("device_sdk.home.round_store._KEPT_ROUNDS", 2)
    fleet = _played(tmp_path, versions=5)
    _run(fleet.aggregator.database, "DELETE FROM verdicts WHERE round = 1")
    with pytest.raises(Mismatch, match="'counted' '' about round 1; the log of verdicts says noth"):
        judge(fleet)


def test_a_lost_update(fleet: FleetHome) -> None:
    _change_items(fleet, 2, 1, -1.0)
    with pytest.raises(Mismatch, match="1 lost, 0 counted twice"):
        judge(fleet)


def test_an_update_counted_twice(fleet: FleetHome) -> None:
    _change_items(fleet, 2, 3, 1.0)
    with pytest.raises(Mismatch, match="0 lost, 1 counted twice"):
        judge(fleet)


def test_other_contents(fleet: FleetHome) -> None:
    _change_items(fleet, 1, 0, 5.0)
    with pytest.raises(Mismatch, match="check sums"):
        judge(fleet)


def test_other_bits(fleet: FleetHome) -> None:
    _change_items(fleet, 1, -1, 1e-6)
    with pytest.raises(Mismatch, match="bits"):
        judge(fleet)


def test_a_receipt_for_nothing(fleet: FleetHome) -> None:
    _run(fleet.aggregator.database, "DELETE FROM verdicts WHERE round = 2")
    with pytest.raises(Mismatch, match="'counted' '' about round 2; the log of verdicts says noth"):
        judge(fleet)


@pytest.mark.parametrize("wrong", ["late", "refused", "forgotten", "conflict"])
def test_a_counted_update_of_which_its_device_was_told_something_else(
    fleet: FleetHome, wrong: str
) -> None:
    _run(
        fleet.devices[1] / "device.sqlite",
        f"UPDATE participation SET verdict = '{wrong}' WHERE round = 2",
    )
    with pytest.raises(Mismatch, match=f"device 1 was told '{wrong}' .* says 'counted'"):
        judge(fleet)


@pytest.mark.parametrize(("verdict", "reason"), [("counted", ""), ("refused", "bad-rows")])
def test_a_refused_update_of_which_its_device_was_told_something_else(
    fleet: FleetHome, verdict: str, reason: str
) -> None:
    told = f"UPDATE participation SET verdict = '{verdict}', reason = '{reason}' WHERE round = 2"
    _run(fleet.devices[1] / "device.sqlite", told)
    _run(fleet.aggregator.database, "UPDATE verdicts SET reason = 'bad-values' WHERE round = 2")
    with pytest.raises(Mismatch, match=r"round 2; .* says 'refused' 'bad-values'"):
        judge(fleet)


def test_a_verdict_that_became_another_after_it_was_deleted(fleet: FleetHome) -> None:
    database = fleet.aggregator.database
    _run(database, "UPDATE rounds SET forgotten = 1 WHERE round = 2")
    _run(database, "DELETE FROM verdicts WHERE round = 2")
    judge(fleet)
    device = fleet.devices[1] / "device.sqlite"
    _run(device, "UPDATE participation SET verdict = 'forgotten' WHERE round = 2")
    judge(fleet)
    _run(device, "UPDATE participation SET verdict = 'late' WHERE round = 2")
    with pytest.raises(Mismatch, match=r"device 1 was told 'late' .* says 'counted'"):
        judge(fleet)


def test_a_verdict_that_vanished_from_a_round_that_is_kept(fleet: FleetHome) -> None:
    _run(
        fleet.devices[1] / "device.sqlite",
        "UPDATE participation SET verdict = 'late' WHERE round = 2",
    )
    device_id = fleet.device_ids[1].hex()
    _run(
        fleet.aggregator.database,
        f"DELETE FROM verdicts WHERE round = 2 AND device_id = x'{device_id}'",
    )
    with pytest.raises(Mismatch, match="does not hold what was decided"):
        judge(fleet)


def test_a_verdict_on_an_update_that_no_device_made(fleet: FleetHome) -> None:
    _run(fleet.devices[2] / "device.sqlite", "DELETE FROM participation WHERE round = 3")
    _run(fleet.devices[2] / "device.sqlite", "DELETE FROM forgotten WHERE round = 3")
    with pytest.raises(Mismatch, match="without a device's update"):
        judge(fleet)


def test_an_update_that_was_taken_for_a_report_alone(fleet: FleetHome) -> None:
    _run(fleet.aggregator.database, "UPDATE verdicts SET reason = 'noted' WHERE round = 2")
    told = "UPDATE participation SET verdict = 'noted' WHERE round = 2"
    for device in fleet.devices:
        _run(device / "device.sqlite", told)
    with pytest.raises(Mismatch, match="was told 'noted'"):
        judge(fleet)


@pytest.mark.parametrize("end", ["SET outcome = 'too-late', verdict = NULL", None])
def test_a_report_alone_needs_a_round_that_ended_without_an_update(
    fleet: FleetHome, end: str | None
) -> None:
    device, of = fleet.devices[2] / "device.sqlite", "WHERE round = 3"
    _run(device, f"UPDATE participation {end} {of}" if end else f"DELETE FROM participation {of}")
    _run(device, f"DELETE FROM forgotten {of}")
    device_id = fleet.device_ids[2].hex()
    noted = f"UPDATE verdicts SET reason = 'noted' {of} AND device_id = x'{device_id}'"
    _run(fleet.aggregator.database, noted)
    # Its update is in the sums all the same.
    with pytest.raises(Mismatch, match="counted twice" if end else "noted without a device's rep"):
        judge(fleet)


def test_an_outbox_that_forgot(fleet: FleetHome) -> None:
    _run(
        fleet.devices[0] / "device.sqlite",
        "UPDATE participation SET verdict = NULL WHERE round = 1",
    )
    with pytest.raises(Mismatch, match="outboxes and verdicts disagree"):
        judge(fleet)


def test_a_version_that_fell(fleet: FleetHome) -> None:
    _run(fleet.aggregator.database, "UPDATE rounds SET next_version = 1 WHERE round = 2")
    with pytest.raises(Mismatch, match="from version 1 to 1"):
        judge(fleet)


def test_slots_that_say_something_else_than_the_verdicts(fleet: FleetHome) -> None:
    clustered = replace(fleet, clustered=True)
    with pytest.raises(Mismatch, match=r"numbers of updates, by round: \{1: \(0, 3\)"):
        judge(clustered)
    for number in range(1, 4):
        _run(
            fleet.aggregator.database,
            f"INSERT INTO audit_shares (round, slot, epoch, commits, counted) VALUES "
            f"({number}, 0, 1, 1, 1), ({number}, 1, 1, 1, 2)",
        )
    judge(clustered)
