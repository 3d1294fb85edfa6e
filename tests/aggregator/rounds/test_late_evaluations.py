"""What devices that come late found out (``round.late = "staleness"``): in a figure once, of the
version that it is of, or in none.

Each device says of each version what tells in any figure who is in it, and how often: its samples
are a power of four of its own, and its mean error is the version's number and one.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from aggregator.home import AggregatorHome
from aggregator.rounds.machine import RoundClosed
from aggregator.serve.assembly import World, assemble
from aggregator.store import Store
from aggregator.store.rows import RoundRow
from aggregator.task.file import read_task
from device_sdk.evaluation.report import Evaluation, EvaluationReport, write_evaluations
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.receipts import (
    RecordType,
    UpdateIdentity,
    with_report,
    write_update,
)
from device_sdk.wire.publish.report import Details, Report, ReportedOutcome
from tests.fakes.averaging import averaged, averaging_home
from tests.fakes.crashes import Crash, CrashingDatabase
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import command
from tests.fakes.parts import enrol

FLEET = tuple(bytes([place]) * 16 for place in range(4))
QUICK, *SLOW = FLEET
LENGTH = 100.0
ROUND = f"""
quorum = 1
wanted = 1
over_select = 100.0
deadline_seconds = {LENGTH}
resume_grace_seconds = 0.0
late = "staleness"
"""
BASE = 4
BODY = averaged(np.random.default_rng(0))


class Desk:
    """An aggregator with four devices, and the clock of both."""

    def __init__(
        self, folder: Path, lines: str = "", evaluation: str = "least_devices = 2"
    ) -> None:
        more = f'[evaluation]\nmetrics = ["mae"]\nsample_cap = 0.0\n{evaluation}\n'
        self.home: AggregatorHome = averaging_home(folder / "fleet", f"{ROUND}\n{lines}", more)
        linear_artifact(folder / "fleet" / "linear", "mae", "rmse")
        enrol(self.home, FLEET)
        store = self.home.open_store()
        with store.database.transaction():
            store.devices.note_seen(dict.fromkeys(FLEET, 1))
        store.database.close()
        self.now = float(int(time.time()) + 10)
        self.begin()

    def begin(self) -> None:
        """As a process that starts."""
        self.database = CrashingDatabase(self.home.database)
        self.database.left = 0
        world = World(lambda: self.now, lambda: self.now, np.random.default_rng(1))
        self.parts = assemble(
            self.home, Store(self.database), read_task(self.home.task_file), world
        )
        self.first, self.store = self.parts.first, self.parts.store.first

    def restart(self) -> None:
        self.parts.store.database.close()
        self.begin()

    @property
    def row(self) -> RoundRow:
        row = self.first.rounds.current
        assert row is not None
        return row

    def tick(self) -> None:
        """All that there is to do now."""
        while (event := self.first.rounds.tick()) is not None:
            if isinstance(event, RoundClosed):
                with self.parts.store.database.transaction():
                    self.first.ingest.save_seen()
                self.first.upkeep.between_rounds()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tick()

    def send(self, device: bytes, row: RoundRow, trained: bool = True) -> str:
        """What becomes of what a device sends of a round, once it is committed."""
        found = self.offer(device, row, trained)
        if found:
            return found
        answers = {each.device_id: each.receipt for each in self.first.ingest.commit()}
        return answers[device].reason or answers[device].verdict.value

    def offer(self, device: bytes, row: RoundRow, trained: bool = True) -> str:
        """What becomes of it at once; empty where it is staged."""
        samples = BASE ** FLEET.index(device)
        mae = np.array([samples, samples * (row.version + 1.0)])
        said = write_evaluations(EvaluationReport((Evaluation("global", "mae", mae),)))
        ended = (ReportedOutcome.TRAINED, "") if trained else (ReportedOutcome.DECLINED, "not-now")
        content = with_report(
            encode(Report(*ended, Details("1", "1", "linux", "linear"), said)),
            BODY if trained else b"",
        )
        identity = UpdateIdentity(device, "default", row.generation, row.round)
        settled = self.parts.inbox.offer(
            device, write_update(identity, content), RecordType.CONTRIBUTION
        )
        return "" if settled is None else settled.receipt.reason or settled.receipt.verdict.value

    def round(self, *late: tuple[bytes, RoundRow]) -> RoundRow:
        """A round that the quick device closes if no other does; these come of earlier rounds."""
        self.tick()
        row = self.row
        for device, of in late:
            assert self.send(device, of) == "counted"
        if self.first.aggregation.participants < 1:
            assert self.send(QUICK, row) == "counted"
        self.wait(1)
        return row

    @property
    def figures(self) -> dict[int, tuple[int, ...]]:
        """By version, who is in its figures; each is of that version alone."""
        found = {}
        for each in self.store.evaluations.latest(1000):
            (figure,) = each.figures
            assert figure.value == pytest.approx(each.version + 1)
            found[each.version] = members(figure.samples)
            assert figure.devices == len(found[each.version])
        return found


def members(samples: float) -> tuple[int, ...]:
    """The places of those whose samples these are, each as often as it is in them."""
    left, found = round(samples), []
    for place in range(len(FLEET)):
        left, times = divmod(left, BASE)
        found += [place] * times
    assert left == 0
    return tuple(found)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def make_desk(lines: str = "", evaluation: str = "least_devices = 2") -> Desk:
        made.append(Desk(tmp_path, lines, evaluation))
        return made[-1]

    yield make_desk
    for each in made:
        with suppress(Exception):
            each.parts.store.database.close()


def test_a_version_that_three_of_four_evaluate_late_has_the_figure_of_all_four(
    make: Callable[..., Desk],
) -> None:
    desk = make("", "least_devices = 4")
    first = desk.round()
    assert desk.row.round == 2 and desk.figures == {}
    for device in SLOW:
        desk.round((device, first))
    desk.wait(1)
    assert desk.figures == {0: (0, 1, 2, 3)}
    assert desk.store.versions.all()[-1].metrics["mae"] == pytest.approx(1.0)


def test_a_figure_is_made_once_and_what_comes_then_is_dropped_and_said(
    make: Callable[..., Desk], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    desk = make()
    first = desk.round()
    desk.round((SLOW[0], first))
    assert desk.figures == {}
    desk.wait(LENGTH)  # the deadline of its round: nobody is waited for beyond it
    assert desk.figures[0] == (0, 1)
    # The update counts, for its version is not too old; what its device found out does not.
    assert desk.send(SLOW[1], first) == "counted"
    desk.wait(LENGTH)
    assert desk.figures[0] == (0, 1)
    assert desk.parts.refusals.counts == {"evaluation-late": 1}
    assert "came when the figures of that one were made" in caplog.text
    with desk.parts.store.database.transaction():
        desk.parts.refusals.save(desk.parts.store.refusals)
    capsys.readouterr()
    assert command(desk.home, "status") == 0
    assert "evaluation-late" in capsys.readouterr().out


def test_who_sends_no_update_is_heard_late_all_the_same(make: Callable[..., Desk]) -> None:
    desk = make()
    first = desk.round()
    assert desk.send(SLOW[0], first, trained=False) == "noted"
    assert desk.send(SLOW[0], first, trained=False) == "noted"
    desk.round()
    desk.wait(LENGTH)
    assert desk.figures[0] == (0, 1)


def test_what_is_beyond_most_stale_is_waited_for_no_longer(make: Callable[..., Desk]) -> None:
    desk = make("most_stale = 2", "least_devices = 1")
    rounds = [desk.round() for _ in range(2)]
    assert desk.figures == {}
    rounds.append(desk.round())
    assert desk.figures == {0: (0,)}
    assert desk.send(SLOW[0], rounds[0]) == "late"
    desk.round()
    assert desk.figures == {0: (0,), 1: (0,)}


def test_who_was_heard_of_a_later_round_is_waited_for_no_longer(make: Callable[..., Desk]) -> None:
    desk = make("", "least_devices = 1")
    desk.round()
    second = desk.round()
    for device in SLOW:
        desk.round((device, second))
    desk.wait(1)
    assert desk.figures[0] == (0,) and desk.figures[1] == (0, 1, 2, 3)


def test_what_is_told_while_no_round_is_open_is_in_the_figures(
    make: Callable[..., Desk],
) -> None:
    """Its update has no verdict then, and comes again; meanwhile the device tells of later rounds
    that it could not begin with, so nobody waits for it."""
    desk = make("pause_seconds = 9.0", "least_devices = 1")
    first = desk.round()
    desk.wait(9)
    second = desk.round()
    assert desk.first.rounds.current is None
    assert desk.offer(SLOW[0], first) == "" and not desk.first.ingest.commit()
    for device in SLOW:
        assert desk.send(device, second, trained=False) == "noted"
    desk.first.ingest.commit()
    desk.wait(2)
    assert desk.figures[0] == (0, 1)
    desk.wait(9)
    assert desk.send(SLOW[0], first) == "counted"
    desk.wait(2)
    # It is in them, and none of what it said came too late.
    assert desk.figures[0] == (0, 1) and not desk.parts.refusals.counts


def test_who_has_two_updates_is_in_the_figures_of_both(make: Callable[..., Desk]) -> None:
    """The second is part of the next round, and the device is heard of a later one before that."""
    desk = make("", "least_devices = 1")
    first = desk.round()
    second = desk.round()
    assert desk.offer(SLOW[0], first) == ""
    with pytest.raises(WireError, match="another update"):
        desk.offer(SLOW[0], second)
    assert desk.offer(SLOW[0], desk.row) == ""
    desk.first.ingest.commit()
    for device in SLOW[1:]:
        assert desk.send(device, desk.row, trained=False) == "noted"
    desk.wait(2)
    assert desk.figures == {0: (0, 1), 1: (0, 1)}
    assert desk.send(SLOW[0], second) == "counted"


def test_models_stay_until_their_figures_are_known(make: Callable[..., Desk]) -> None:
    desk = make("", "least_devices = 1\n[models]\nkeep_last = 1\nkeep_best = 1")
    for _ in range(4):
        desk.round()
    assert [row.version for row in desk.store.versions.kept()] == [4, 3, 2, 1, 0]
    desk.wait(LENGTH)
    desk.round()
    # Of mean errors the least is the best: the first version's, which a later one did not take.
    assert [row.version for row in desk.store.versions.kept()] == [5, 4, 0]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", range(1, 6))
def test_rounds_stop_once_though_more_is_said_of_later_versions(
    make: Callable[..., Desk], when: str, at: int
) -> None:
    """The error grows with each version: version 0 stays the best."""
    desk = make("", "least_devices = 1\nearly_stopping = 2")
    rounds = [desk.round() for _ in range(6)]
    assert desk.figures == {} and not desk.first.rounds.stopped
    desk.database.left, desk.database.when = at, when
    for _ in range(2):  # the first may die
        try:
            desk.wait(LENGTH)
            desk.round()
            break
        except (Crash, AssertionError):
            desk.restart()
    desk.tick()
    assert desk.first.rounds.rests and desk.store.facts.stopped_at == 0
    # Two rounds after it have figures: it was decided with the second of them.
    assert sorted(desk.figures) == [0, 1, 2]
    newest, origin = desk.first.aggregation.version, desk.store.versions.all()[0].origin
    assert origin == "version 0"
    for device, row in zip(SLOW, rounds[3:], strict=True):
        with suppress(WireError):
            desk.send(device, row)
    for _ in range(3):
        desk.wait(LENGTH)
        desk.restart()
        desk.tick()
    assert desk.first.rounds.rests and desk.store.facts.stopped_at == 0
    assert sorted(desk.figures) == [0, 1, 2]
    assert desk.first.aggregation.version == newest


def test_a_stop_that_the_store_did_not_take_is_none(make: Callable[..., Desk]) -> None:
    desk = make("", "least_devices = 1\nearly_stopping = 2")
    for _ in range(6):
        desk.round()
    desk.database.left, desk.database.when = 1, "before"
    with pytest.raises(Crash):
        desk.wait(LENGTH)
    # The process lives on, and nothing of it was written.
    assert desk.figures == {} and not desk.first.rounds.stopped
    desk.wait(1)
    assert sorted(desk.figures) == [0, 1, 2] and desk.first.rounds.stopped


def test_the_last_round_s_version_has_figures_while_the_task_rests(
    make: Callable[..., Desk],
) -> None:
    desk = make("most_rounds = 2", "least_devices = 3")
    first = desk.round()
    desk.round((SLOW[0], first))
    assert desk.first.rounds.rests and desk.figures == {}
    # No round is open that its update counts in; what it found out is heard.
    assert desk.send(SLOW[1], first) == "late"
    with desk.parts.store.database.transaction():
        desk.first.ingest.save_seen()
    desk.wait(LENGTH)
    assert desk.figures == {0: (0, 1, 2)}


class History(RuleBasedStateMachine):
    """Devices that send what they found out in any order, again and again, to an aggregator that
    dies; and who said what of which version."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.desk = Desk(Path(self.folder.name), "most_stale = 3", "least_devices = 1")
        self.rounds: dict[int, RoundRow] = {}
        self.said: set[tuple[int, int]] = set()
        self.seen: dict[int, tuple[int, ...]] = {}
        self.desk.tick()

    def teardown(self) -> None:
        # Nothing waits for ever, and what was not noticed before is by now.
        for _ in range(3):
            self.desk.wait(LENGTH)
        if self.desk.first.rounds.current is not None:
            newest = self.desk.row.version
            assert self.desk.store.facts.evaluated_from == newest
        self.once_of_its_version_or_never()
        self.desk.parts.store.database.close()
        self.folder.cleanup()

    @rule(
        place=st.integers(0, 3),
        ago=st.integers(0, 6),
        trained=st.booleans(),
        waits=st.booleans(),
    )
    def sends(self, place: int, ago: int, trained: bool, waits: bool) -> None:
        self.note_round()
        row = self.rounds.get(max(self.rounds) - ago)
        if row is None:
            return
        self.said.add((place, row.version))
        with suppress(WireError):
            self.desk.offer(FLEET[place], row, trained)
        if not waits:
            self.desk.first.ingest.commit()
            self.desk.tick()

    @rule(seconds=st.sampled_from([0.0, 2.0, 30.0, 101.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.desk.wait(seconds)

    @rule(
        at=st.integers(1, 4),
        when=st.sampled_from(["before", "after"]),
        seconds=st.sampled_from([0.0, 2.0, 101.0]),
    )
    def dies(self, at: int, when: str, seconds: float) -> None:
        """At one of the next commits to the store, or without one."""
        self.desk.database.left, self.desk.database.when = at, when
        with suppress(Crash):
            self.desk.first.ingest.commit()
            self.desk.wait(seconds)
        self.desk.restart()
        self.desk.tick()

    def note_round(self) -> None:
        row = self.desk.first.rounds.current
        if row is not None:
            self.rounds[row.round] = row

    @invariant()
    def once_of_its_version_or_never(self) -> None:
        self.note_round()
        found = self.desk.figures
        for version, places in found.items():
            assert len(set(places)) == len(places)
            assert {(place, version) for place in places} <= self.said
        # What was made stays as it is, and nothing is made of a version before it any more.
        assert {version: found[version] for version in self.seen} == self.seen
        assert all(version > max(self.seen, default=-1) for version in found.keys() - self.seen)
        self.seen = found
        first = self.desk.store.facts.evaluated_from
        rows = self.desk.store.database.rows("SELECT version FROM device_evaluations")
        assert first is not None and min((row[0] for row in rows), default=math.inf) >= first


def test_whatever_order_each_is_in_its_versions_figure_once_or_in_none() -> None:
    run_state_machine_as_test(
        History, settings=settings(max_examples=25, stateful_step_count=30, deadline=None)
    )
