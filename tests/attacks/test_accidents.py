"""What goes wrong by itself: copies, backups, lost receipts, full disks, wrong clocks."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from aggregator.errors import AggregatorError
from aggregator.methods.method import Method
from aggregator.store import SQLiteDatabase
from device_sdk.artifact import Artifact
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.publish.receipts import (
    RecordType,
    UpdateIdentity,
    with_report,
    write_update,
)
from device_sdk.wire.publish.topics import DownTopic, PresenceTopic
from device_sdk.world import Pace
from tests.attacks.conftest import MakeStage
from tests.attacks.simulated_broker import AGGREGATOR, Parcel
from tests.attacks.simulated_device import SimulatedDevice
from tests.attacks.stage import Stage
from tests.faults.known import KnownBinding, KnownSums, known_body

_BRISK = Pace(answer_seconds=5.0, fetch_seconds=5.0, reopen_seconds=2.0, most_seconds=60.0)


def _is_receipt(stage: Stage, place: int) -> Callable[[Parcel], bool]:
    topic = stage.topics.write(DownTopic(stage.devices[place].grant.handle))
    return lambda parcel: parcel.topic == topic and parcel.payload[1] == RecordType.RECEIPT


def _next_round(stage: Stage) -> int:
    return stage.parts.store.first.rounds.latest()[0].round + 1


def _other_body(place: int, generation: int, number: int) -> bytes:
    return known_body(place, generation, number + 1000)


def test_a_receipt_lost_and_the_round_closed_is_still_counted(make_stage: MakeStage) -> None:
    stage = make_stage(pace=_BRISK)
    stage.drop = _is_receipt(stage, 0)
    stage.next_version()
    stage.next_version()
    assert stage.verdict(0, 1) is None
    stage.drop = lambda parcel: False
    stage.run_until(lambda: stage.verdict(0, 1) == "counted")


def test_a_broker_that_drops_only_receipts(make_stage: MakeStage) -> None:
    stage = make_stage(pace=_BRISK)
    stage.drop = lambda parcel: "/down/" in parcel.topic and parcel.payload[1] == RecordType.RECEIPT
    stage.await_version(8)
    sent = [len(stage.sent_up(place, RecordType.CONTRIBUTION)) for place in range(3)]
    stage.run(2000.0)
    # Rounds go on without quorum, and no device adds to eight updates without a receipt.
    assert _next_round(stage) > 20 and stage.version == 8
    assert [device.home.rounds.outbox_size()[0] for device in stage.devices] == [8, 8, 8]
    assert all("wait for receipts" in device.participant.problem for device in stage.devices)
    # It may make devices try again, not make them hammer: the mean wait is half of the longest.
    more = [len(stage.sent_up(place, RecordType.CONTRIBUTION)) - sent[place] for place in range(3)]
    assert max(more) < 1.2 * 8 * (10 + 2000.0 / (_BRISK.most_seconds / 2))
    stage.drop = lambda parcel: False
    stage.run_until(lambda: all(d.home.rounds.outbox_size()[0] <= 1 for d in stage.devices))
    told = [(place, number) for place in range(3) for number in range(1, 9)]
    stage.run_until(lambda: all(stage.verdict(*each) is not None for each in told))
    assert all(stage.verdict(*each) == "counted" for each in told)
    stage.next_version()


def test_two_bodies_for_one_round_are_a_conflict(stage: Stage) -> None:
    device = stage.devices[0]
    row = stage.parts.store.first.rounds.latest()[0]
    stage.run_until(lambda: stage.verdict(0, row.round) == "counted")
    identity = UpdateIdentity(device.grant.device_id, "default", row.generation, row.round)
    payload = write_update(identity, _other_body(0, row.generation, row.round))
    counted = stage.parts.first.ingest.counted
    sealed = device.participant.sessions.seal(RecordType.UPDATE, payload)
    stage.broker.publish(stage.up_topic(0), sealed)
    stage.settle()
    assert stage.refusals("conflict") == 1
    assert stage.parts.first.ingest.counted == counted


def test_two_bodies_that_come_together_are_a_conflict(stage: Stage) -> None:
    device = stage.devices[0]
    stage.drop = lambda parcel: (
        parcel.topic == stage.up_topic(0) and parcel.payload[1] == RecordType.CONTRIBUTION
    )
    sent = len(stage.sent_up(0, RecordType.CONTRIBUTION))
    stage.run_until(lambda: len(stage.sent_up(0, RecordType.CONTRIBUTION)) > sent)
    stage.drop = lambda parcel: False
    row, counted = stage.parts.store.first.rounds.latest()[0], stage.parts.first.ingest.counted
    identity = UpdateIdentity(device.grant.device_id, "default", row.generation, row.round)
    for body in (known_body, _other_body):  # one group, which is committed at once
        (waiting,) = device.home.rounds.outbox()
        assert waiting.report is not None
        content = with_report(waiting.report, body(0, row.generation, row.round))
        payload = write_update(identity, content)
        sealed = device.participant.sessions.seal(RecordType.CONTRIBUTION, payload)
        stage.broker.publish(stage.up_topic(0), sealed)
    stage.settle()
    assert (stage.refusals("conflict"), stage.parts.first.ingest.counted) == (1, counted + 1)
    assert stage.verdict(0, row.round) == "counted"


def test_an_unselected_device_is_refused(make_stage: MakeStage) -> None:
    lines = (
        "quorum = 1\nwait_for_devices = 3\nshare = 0.3\ndeadline_seconds = 120\npause_seconds = 5"
    )
    stage = make_stage(round_lines=lines)
    others = {stage.up_topic(place) for place in (1, 2)}

    def only_others_are_selected() -> bool:
        first, *rest = (
            stage.parts.first.rounds.is_selected(device.grant.device_id) for device in stage.devices
        )
        return any(rest) and not first

    # What is sent in such a round is lost: it lasts as long as one waits for them. In those before
    # it they are heard, for who was silent twice is not waited for.
    stage.drop = lambda parcel: (
        parcel.topic in others
        and parcel.payload[1] == RecordType.CONTRIBUTION
        and only_others_are_selected()
    )
    stage.run_until(only_others_are_selected, seconds=7200.0)
    row, device = stage.parts.first.rounds.current, stage.devices[0]
    identity = UpdateIdentity(device.grant.device_id, "default", row.generation, row.round)
    payload = write_update(identity, known_body(0, row.generation, row.round))
    counted = stage.parts.first.ingest.counted
    device.set_connected(True)
    stage.run_until(lambda: device.participant.sessions.is_open)
    assert stage.parts.first.rounds.current == row
    sealed = device.participant.sessions.seal(RecordType.UPDATE, payload)
    stage.broker.publish(stage.up_topic(0), sealed)
    stage.settle()
    assert stage.refusals("not-selected") == 1
    assert stage.parts.first.ingest.counted == counted


def test_a_cloned_device_home_is_counted_once_a_round(make_stage: MakeStage) -> None:
    stage = make_stage(judged=False)
    stage.next_version()
    original = stage.devices[0]
    original.kill()
    clone_folder = original.folder.with_name("clone")
    shutil.copytree(original.folder, clone_folder)
    original.start()
    clone = SimulatedDevice(clone_folder, 0, stage.broker, stage.clock, _BRISK, _other_body)
    clone.name = "device-3"
    clone.set_connected(True)
    stage.devices.append(clone)
    for _ in range(4):
        stage.next_version()
    stage.run(120.0)
    # Each of the two trained each round, or came too late, or had no session just then: they take
    # each other's.
    rounds = range(2, stage.version + 1)
    told = [(original.part(number), clone.part(number)) for number in rounds]
    assert min(original.participant.sessions.opened, clone.participant.sessions.opened) >= 1
    verdicts = [
        sorted(part.verdict.value for part in pair if part is not None and part.verdict is not None)
        for pair in told
    ]
    assert all(each.count("counted") <= 1 for each in verdicts)
    assert any("conflict" in each for each in verdicts), verdicts
    assert stage.refusals("conflict") >= 1
    stage.kill_aggregator()
    database = sqlite3.connect(stage.fleet.aggregator.database)
    total, different = database.execute(
        "SELECT count(*), count(DISTINCT device_id || round) FROM audit"
    ).fetchone()
    database.close()
    assert total == different


def test_a_restored_device_home_counts_nothing_twice(make_stage: MakeStage) -> None:
    # One update is on its way for long, so that the round is still open when the home comes back:
    # its counter of requests came back too, and it asks some times in vain before it is heard.
    lines = "quorum = 3\ndeadline_seconds = 600\npause_seconds = 5"
    stage = make_stage(judged=False, round_lines=lines)
    stage.next_version()
    device = stage.devices[0]
    device.kill()
    backup = device.folder.with_name("backup")
    shutil.copytree(device.folder, backup)
    device.start()
    stage.drop = lambda parcel: (
        parcel.topic == stage.up_topic(1) and parcel.payload[1] == RecordType.CONTRIBUTION
    )
    stage.run_until(lambda: stage.verdict(0, 2) == "counted")
    device.kill()
    shutil.rmtree(device.folder)
    shutil.copytree(backup, device.folder)
    device.body = _other_body  # its local state is another one, and so is what it sends
    device.start()
    stage.run_until(lambda: stage.verdict(0, 2) is not None)
    assert stage.verdict(0, 2) == "conflict"
    stage.drop = lambda parcel: False
    for _ in range(3):
        stage.next_version()
    items = stage.parts.first.aggregation.state()["items"]
    # One of this device for each round, whether or not that had its quorum before it was back.
    closed = sum(row.closed_unix_seconds is not None for row in stage.store.first.rounds.latest(50))
    assert items[:, 1].sum() == closed


def _restore_a_backup(stage: Stage) -> None:
    """The aggregator, not running, has its home of version 1, and had reached version 4."""
    home = stage.fleet.aggregator.folder
    backup = home.with_name("aggregator-backup")
    stage.next_version()
    stage.kill_aggregator()
    shutil.copytree(home, backup)
    stage.start_aggregator()
    for _ in range(3):
        stage.next_version()
    stage.kill_aggregator()
    shutil.rmtree(home)
    shutil.copytree(backup, home)


def test_an_aggregator_restored_from_a_backup_begins_a_new_generation(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(judged=False)
    generation = stage.store.facts.generation
    _restore_a_backup(stage)
    # The lives that the home does not know of started by a clock that is ahead of this command's.
    assert stage.command("restored") == 0
    stage.start_as_told()
    assert stage.parts.fence.passed
    assert stage.store.facts.generation > generation
    assert stage.version <= 2
    stage.next_version()
    stage.next_version()
    for place in range(3):
        latest = stage.devices[place].home.rounds.last(trained=True)
        assert latest is not None and latest.generation == stage.store.facts.generation
        assert latest.verdict is not None and latest.verdict.value == "counted"


def test_an_aggregator_restored_without_saying_so_ends_before_it_is_heard(
    make_stage: MakeStage,
) -> None:
    stage = make_stage(judged=False)
    stage.hand = "tessera-aggregator restored"
    _restore_a_backup(stage)
    said = len(stage.broker.seen)
    stage.start_aggregator()
    with pytest.raises(AggregatorError, match=r"was restored from a backup.* restored --home"):
        stage.run(100.0)
    down = [topic for topic, _ in stage.broker.seen[said:] if "/all/" in topic]
    assert down == []


def test_an_aggregator_restored_without_saying_so_is_noticed_by_devices(
    make_stage: MakeStage,
) -> None:
    stage = make_stage(judged=False)
    stage.hand = "run tessera-aggregator restored"
    _restore_a_backup(stage)
    jobs = [device.jobs for device in stage.devices]
    # A broker that shows the aggregator no presence of its lives keeps it from noticing itself.
    presence = stage.topics.write(PresenceTopic())
    stage.drop = lambda parcel: parcel.to == AGGREGATOR and parcel.topic == presence
    stage.start_aggregator()
    stage.run(100.0)
    # Lower numbers of the same generation: no device takes part, rather than train on the past.
    assert [device.jobs for device in stage.devices] == jobs
    assert stage.devices[0].participant.refusals.counts()["stale-manifest"] >= 1


def test_a_failed_quorum_goes_on_with_the_same_version(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.devices[2].kill()
    stage.run(1.0)
    stage.run_until(lambda: _next_round(stage) >= 4)
    rows = sorted(stage.parts.store.first.rounds.latest(10), key=lambda row: row.round)
    assert [row.version for row in rows[:2]] == [0, 0]
    assert rows[0].next_version is None
    assert stage.verdict(0, 1) == stage.verdict(1, 1) == "counted"
    # Round 2 began with the two of round 1 and got two more: a quorum of three.
    assert rows[1].next_version == 1 and rows[1].participants == 4


class _Brittle(KnownSums):
    """Takes an update in its check, and fails to absorb it."""

    def _absorb(self, updates: Sequence[Update]) -> None:
        """Fails for the device at place 1 in round 2."""
        for update in updates:
            if update.round_id == 2 and update.tensors["factor"][0, 2]:
                raise ArithmeticError("as the test wants")
            super()._absorb([update])


class _BrittleBinding(KnownBinding):
    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> Method:
        """See :class:`~aggregator.methods.method.Binding`."""
        return _Brittle(np.zeros((items, self.settings.columns), np.float32), self.settings)


def test_absorb_failing_after_the_commit_quarantines_and_holds(make_stage: MakeStage) -> None:
    stage = make_stage(
        judged=False,
        binding=_BrittleBinding(),
        round_lines="quorum = 2\nwait_for_devices = 3\ndeadline_seconds = 60\npause_seconds = 5",
    )
    stage.run_until(lambda: stage.verdict(1, 2) is not None)
    part = stage.devices[1].part(2)
    assert part is not None and (stage.verdict(1, 2), part.reason) == ("refused", "quarantined")
    stage.run(300.0)
    held = stage.parts.store.first.rounds.latest()[0]
    assert held.round == 2 and held.held is not None and "quarantine" in held.held
    # A restart remembers it, and the operator lets it go.
    stage.restart_aggregator()
    stage.run(100.0)
    assert stage.parts.store.first.rounds.latest()[0].held is not None
    assert stage.command("release") == 0
    stage.await_version(2)
    items = stage.parts.first.aggregation.state()["items"]
    assert [items[2, 1 + place] for place in range(3)] == [1, 0, 1]


def test_a_quarantined_update_stays_refused_when_it_comes_again(make_stage: MakeStage) -> None:
    stage = make_stage(
        judged=False,
        binding=_BrittleBinding(),
        pace=_BRISK,
        round_lines="quorum = 2\nwait_for_devices = 3\ndeadline_seconds = 60\npause_seconds = 5",
    )
    stage.run_until(lambda: stage.verdict(1, 1) == "counted")
    stage.drop = _is_receipt(stage, 1)
    stage.run_until(lambda: stage.parts.store.first.rounds.latest()[0].held is not None)
    stage.restart_aggregator()
    stage.run(30.0)
    assert stage.verdict(1, 2) is None
    stage.drop = lambda parcel: False
    stage.run_until(lambda: stage.verdict(1, 2) is not None)
    part = stage.devices[1].part(2)
    assert part is not None and (stage.verdict(1, 2), part.reason) == ("refused", "quarantined")
    stage.hand = "see tessera-aggregator release"


class _Killed(BaseException):
    pass


class _DyingDatabase(SQLiteDatabase):
    """Ends the process at the n-th commit, before or after it."""

    left, when = 0, ""

    def transaction(self, *, shared=False):  # type: ignore[no-untyped-def]
        """See :class:`SQLiteDatabase`."""
        outer = super().transaction(shared=shared)

        class _Transaction:
            def __enter__(self) -> None:
                outer.__enter__()

            def __exit__(inner, *error: object) -> bool | None:
                if error[0] is None and _DyingDatabase.left == 1 and self.when == "before":
                    _DyingDatabase.left = 0
                    killed = _Killed()
                    outer.__exit__(_Killed, killed, None)
                    raise killed
                result = outer.__exit__(*error)
                if error[0] is None and _DyingDatabase.left:
                    _DyingDatabase.left -= 1
                    if not _DyingDatabase.left:
                        raise _Killed
                return result

        return _Transaction()


@pytest.mark.parametrize("when", ["before", "after"])
def test_death_before_and_after_every_commit_of_three_rounds(
    make_stage: MakeStage, when: str
) -> None:
    stage = make_stage(database=_DyingDatabase, pace=_BRISK)
    _DyingDatabase.when = when
    deaths = 0
    for commits in range(1, 50):
        _DyingDatabase.left = 1 + commits % 5
        try:
            stage.run(8.0)
        except _Killed:
            deaths += 1
            stage.restart_aggregator()
    _DyingDatabase.left = 0
    assert deaths >= 10
    stage.next_version()
    # Whatever was opened was also published: no round went by because nobody had heard of it.
    closed = stage.parts.store.first.rounds.latest(50)[1:]
    assert len(closed) > 3 and all(row.next_version is not None for row in closed)


def test_a_full_disk_ends_the_aggregator_and_loses_nothing(make_stage: MakeStage) -> None:
    stage = make_stage(pace=_BRISK)
    stage.next_version()
    pages = next(stage.store.database.rows("PRAGMA page_count"))[0]
    next(stage.store.database.rows(f"PRAGMA max_page_count = {pages}"))
    with pytest.raises(sqlite3.OperationalError, match="full"):
        for _ in range(200):
            stage.run(5.0)
    stage.kill_aggregator()
    stage.start_aggregator()  # there is room again
    stage.next_version()


@pytest.mark.parametrize("years", [-56, 10])
def test_a_device_s_calendar_clock_is_not_asked(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    stage = make_stage()
    wrong = 0.0 if years < 0 else time.time() + years * 365.25 * 86_400
    monkeypatch.setattr(time, "time", lambda: wrong)
    monkeypatch.setattr(time, "time_ns", lambda: int(wrong * 1e9))
    stage.next_version()
    stage.next_version()
    assert [stage.verdict(place, 2) for place in range(3)] == ["counted"] * 3


@pytest.mark.parametrize("jump_seconds", [3600.0, 86_400.0, -30.0])
def test_the_aggregator_s_clock_jumping_across_a_deadline(
    make_stage: MakeStage, jump_seconds: float
) -> None:
    stage = make_stage(pace=_BRISK)
    stage.drop = lambda parcel: (
        parcel.topic == stage.up_topic(2) and parcel.payload[1] == RecordType.CONTRIBUTION
    )
    number = 1
    stage.run_until(lambda: stage.verdict(0, number) == "counted")
    stage.offset_seconds += jump_seconds
    stage.run(10.0)
    stage.drop = lambda parcel: False
    # A jump ends no round: what was counted stays counted, and what is to come is counted too.
    stage.next_version()
    stage.next_version()
    stage.run_until(lambda: stage.verdict(2, number) is not None)
    assert stage.verdict(2, number) == "counted"
    assert stage.verdict(0, number) == "counted"


def test_a_device_whose_disk_is_full_for_a_while(make_stage: MakeStage) -> None:
    stage = make_stage(pace=_BRISK)
    stage.next_version()
    device = stage.devices[0]
    (pages,) = device.home.database.row("PRAGMA page_count") or (0,)
    device.home.database.row(f"PRAGMA max_page_count = {pages}")
    failures = 0
    big = known_body(0, 0, 1) + bytes(60_000)
    device.body = lambda place, generation, number: big
    for _ in range(20):
        try:
            stage.run(5.0)
        except sqlite3.OperationalError:
            failures += 1
    assert failures
    device.body = known_body
    device.home.database.row("PRAGMA max_page_count = 1073741823")
    stage.next_version()
    number = _next_round(stage) - 1
    stage.run_until(lambda: stage.verdict(0, number) is not None or _next_round(stage) > number + 2)
    assert any(stage.verdict(0, n) == "counted" for n in range(2, _next_round(stage)))
