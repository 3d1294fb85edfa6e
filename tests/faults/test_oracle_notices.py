"""The oracle of the long runs would notice: each kind of broken promise, made by hand."""

from __future__ import annotations

import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from aggregator.home import AggregatorHome
from aggregator.store.versions import MethodCheckpoint
from tests.attacks.stage import Stage
from tests.faults.fleet_home import FleetHome
from tests.faults.oracle import Mismatch, judge


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> FleetHome:
    """Three devices after a few rounds."""
    return _played(tmp_path_factory.mktemp("fleet"))


@pytest.fixture
def fleet(template: FleetHome, tmp_path: Path) -> FleetHome:
    folder = template.aggregator.folder.parent
    shutil.copytree(folder, tmp_path / "fleet")
    return replace(
        template,
        aggregator=AggregatorHome(tmp_path / "fleet" / template.aggregator.folder.name),
        devices=tuple(tmp_path / "fleet" / each.name for each in template.devices),
    )


def _played(folder: Path, versions: int = 3) -> FleetHome:
    stage = Stage(folder)
    stage.run_until(lambda: stage.parts.first.aggregation.version == versions)
    stage.run(1.0)
    stage.close()
    judged = judge(stage.fleet)
    assert judged.receipted == {"counted": 3 * versions}
    assert judged.lost == judged.twice == judged.waiting == 0
    return stage.fleet


def _run(fleet: FleetHome, place: int | None, sql: str) -> None:
    """At a device, or at the aggregator."""
    path = fleet.aggregator.database if place is None else fleet.devices[place] / "device.sqlite"
    database = sqlite3.connect(path)
    database.execute(sql)
    database.commit()
    database.close()


def test_rounds_that_devices_have_forgotten_are_judged_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("device_sdk.home.round_store._KEPT_ROUNDS", 2)
    fleet = _played(tmp_path, versions=5)
    _run(fleet, None, "DELETE FROM verdicts WHERE round = 1")
    with pytest.raises(Mismatch, match="'counted' '' about round 1; the log of verdicts says noth"):
        judge(fleet)


@pytest.mark.parametrize(
    ("row", "column", "by", "said"),
    [
        (2, 1, -1.0, "1 lost, 0 counted twice"),
        (2, 3, 1.0, "0 lost, 1 counted twice"),
        (1, 0, 5.0, "check sums"),
        (1, -1, 1e-6, "bits"),
    ],
)
def test_a_model_that_is_not_the_sum_of_its_updates(
    fleet: FleetHome, row: int, column: int, by: float, said: str
) -> None:
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
    with pytest.raises(Mismatch, match=said):
        judge(fleet)


def _told(verdict: str, number: int = 2) -> str:
    return f"UPDATE participation SET verdict = {verdict} WHERE round = {number}"


GONE = "DELETE FROM verdicts WHERE round = 2"
BROKEN: dict[str, tuple[list[tuple[int | None, str]], str]] = {
    "a receipt for nothing": (
        [(None, GONE)],
        "'counted' '' about round 2; the log of verdicts says noth",
    ),
    **{
        f"a counted update whose device was told {wrong}": (
            [(1, _told(f"'{wrong}'"))],
            f"device 1 was told '{wrong}' .* says 'counted'",
        )
        for wrong in ("late", "refused", "forgotten", "conflict")
    },
    **{
        f"a refused update whose device was told {verdict}": (
            [
                (1, _told(f"'{verdict}', reason = '{reason}'")),
                (None, "UPDATE verdicts SET reason = 'bad-values' WHERE round = 2"),
            ],
            r"round 2; .* says 'refused' 'bad-values'",
        )
        for verdict, reason in (("counted", ""), ("refused", "bad-rows"))
    },
    "a verdict that vanished from a round that is kept": (
        [(1, _told("'late'")), (None, GONE + " AND device_id = x'{1}'")],
        "does not hold what was decided",
    ),
    "a verdict on an update that no device made": (
        [
            (2, "DELETE FROM participation WHERE round = 3"),
            (2, "DELETE FROM forgotten WHERE round = 3"),
        ],
        "without a device's update",
    ),
    "an update that was taken for a report alone": (
        [
            (None, "UPDATE verdicts SET reason = 'noted' WHERE round = 2"),
            *((place, _told("'noted'")) for place in range(3)),
        ],
        "was told 'noted'",
    ),
    # A report alone needs a round that ended without an update.
    **{
        f"a report of {what}": (
            [
                (2, change),
                (2, "DELETE FROM forgotten WHERE round = 3"),
                (
                    None,
                    "UPDATE verdicts SET reason = 'noted' WHERE round = 3 AND device_id = x'{2}'",
                ),
            ],
            said,
        )
        for what, change, said in (
            (
                "a round that it took part in",  # its update is in the sums all the same
                "UPDATE participation SET outcome = 'too-late', verdict = NULL WHERE round = 3",
                "counted twice",
            ),
            (
                "no round",
                "DELETE FROM participation WHERE round = 3",
                "noted without a device's rep",
            ),
        )
    },
    "an outbox that forgot": ([(0, _told("NULL", 1))], "outboxes and verdicts disagree"),
    "a version that fell": (
        [(None, "UPDATE rounds SET next_version = 1 WHERE round = 2")],
        "from version 1 to 1",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_each_broken_promise_is_noticed(fleet: FleetHome, what: str) -> None:
    changes, said = BROKEN[what]
    ids = [each.hex() for each in fleet.device_ids]
    for place, sql in changes:
        _run(fleet, place, sql.format(*ids))
    with pytest.raises(Mismatch, match=said):
        judge(fleet)


def test_a_verdict_that_became_another_after_it_was_deleted(fleet: FleetHome) -> None:
    _run(fleet, None, "UPDATE rounds SET forgotten = 1 WHERE round = 2")
    _run(fleet, None, GONE)
    judge(fleet)
    _run(fleet, 1, _told("'forgotten'"))
    judge(fleet)
    _run(fleet, 1, _told("'late'"))
    with pytest.raises(Mismatch, match=r"device 1 was told 'late' .* says 'counted'"):
        judge(fleet)


def test_slots_that_say_something_else_than_the_verdicts(fleet: FleetHome) -> None:
    clustered = replace(fleet, clustered=True)
    with pytest.raises(Mismatch, match=r"numbers of updates, by round: \{1: \(0, 3\)"):
        judge(clustered)
    for number in range(1, 4):
        _run(
            fleet,
            None,
            f"INSERT INTO audit_shares (round, slot, epoch, commits, counted) VALUES "
            f"({number}, 0, 1, 1, 1), ({number}, 1, 1, 1, 2)",
        )
    judge(clustered)
