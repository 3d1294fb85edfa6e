"""Each verdict on an update, one by one, and what it leaves behind; no broker and no session."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregator.home import AggregatorHome
from aggregator.methods.method import Method, Refused
from aggregator.methods.scatter import (
    ScatterBinding,
    ScatterMethod,
    ScatterTable,
    initial_items,
)
from aggregator.rounds.ingest import Settled
from aggregator.rounds.machine import RoundClosed, RoundOpened
from aggregator.serve.assembly import World, assemble
from aggregator.store.rows import LastParticipation, RoundRow
from aggregator.task.file import read_task
from device_sdk.artifact import Artifact
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.receipts import UpdateIdentity, Verdict, update_digest, write_update
from tests.fakes.homes import WIDTH, make_home
from tests.fakes.parts import enrol
from tests.fakes.scatter_updates import ONE_WIDTH, one_user

ANNA, BERT, CLEO, LATER, STRANGER = (bytes([place]) * 16 for place in range(5))
FLEET = (ANNA, BERT, CLEO)
ANSWERS_AT_ONCE = 64
TOO_LARGE = 2.5


class DefectiveMethod(ScatterMethod):
    """Its check lets large values through but no low ones; its absorb does not take the large."""

    def require(self, update: Update) -> None:
        if update.tensors["pulls"].min() < 0:
            raise Refused("too-low", "a value below 0")
        super().require(update)

    def _absorb(self, updates: Sequence[Update]) -> None:
        for update in updates:
            if np.abs(update.tensors["pulls"]).max() > TOO_LARGE:
                raise MemoryError("no room for large values")
            super()._absorb([update])


class DefectiveBinding(ScatterBinding):
    """Builds that method."""

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> Method:
        return DefectiveMethod(initial_items(items, WIDTH, 0.1, rng), self.settings)


def body(value: float = 1.0, columns: int = 3) -> bytes:
    tensors = one_user(WIDTH, range(2), np.full(2, value), 1.0, range(columns))
    return encode_scatter_update(Update(1, tensors), WIDTH, "float32")


class Desk:
    """An aggregator with three devices in its first round, and one that joined afterwards.

    ``now_seconds``: of both its clocks, the calendar's and the other.
    """

    def __init__(self, home: AggregatorHome, *, opens: bool = True) -> None:
        store = home.open_store()
        self.now_seconds = float(store.facts.generation)
        world = World(self.now, self.now, np.random.default_rng(1))
        task = read_task(home.task_file)
        task = replace(
            task,
            binding=DefectiveBinding(
                "scatter", ScatterTable(columns=WIDTH, spread=0.1, least_squares=ONE_WIDTH)
            ),
        )
        self.parts = assemble(home, store, task, world)
        self.ingest = self.parts.first.ingest
        if opens:
            self.open()

    def now(self) -> float:
        return self.now_seconds

    @property
    def row(self) -> RoundRow:
        assert self.parts.first.rounds.current is not None
        return self.parts.first.rounds.current

    def open(self) -> None:
        assert isinstance(self.parts.first.rounds.tick(), RoundOpened)
        self.ingest.round_opened()

    def next_round(self) -> None:
        """This round's time runs out, and the next one opens."""
        self.now_seconds = self.row.deadline_unix_seconds
        assert isinstance(self.parts.first.rounds.tick(), RoundClosed)
        self.open()

    def identity(
        self,
        device: bytes,
        number: int | None = None,
        task: str = "default",
        generation: int | None = None,
    ) -> UpdateIdentity:
        row = self.row
        return UpdateIdentity(
            device,
            task,
            row.generation if generation is None else generation,
            row.round if number is None else number,
        )

    def offer(self, identity: UpdateIdentity, sent: bytes) -> tuple[str, str] | None:
        settled = self.parts.inbox.offer(identity.device_id, write_update(identity, sent))
        return None if settled is None else told(settled, identity, sent)

    def count(self, device: bytes, sent: bytes) -> None:
        """One update alone, offered and committed."""
        identity = self.identity(device)
        assert self.offer(identity, sent) is None
        (settled,) = self.ingest.commit()
        assert told(settled, identity, sent) == ("counted", "")

    def refused(self, reason: str) -> int:
        return self.parts.refusals.counts[reason]


def told(settled: Settled, identity: UpdateIdentity, sent: bytes) -> tuple[str, str]:
    """Verdict and reason, of a receipt that is for this update and goes to who sent it."""
    assert settled.device_id == identity.device_id
    assert settled.receipt.digest == update_digest(identity, hashlib.sha256(sent).digest())
    return settled.receipt.verdict.value, settled.receipt.reason


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> AggregatorHome:
    lines = "quorum = 2\ndeadline_seconds = 100.0\nresume_grace_seconds = 0.0"
    home = make_home(tmp_path_factory.mktemp("ingest"), "mqtt://127.0.0.1:1", lines)
    enrol(home, FLEET)
    enrol(home, [LATER], first_round=8)
    return home


@pytest.fixture
def desk(template: AggregatorHome, tmp_path: Path) -> Iterator[Desk]:
    home = AggregatorHome(tmp_path / "home")
    shutil.copytree(template.folder, home.folder)
    made = Desk(home)
    yield made
    made.parts.store.database.close()


def test_what_is_staged_together_is_counted_in_the_order_it_came(desk: Desk) -> None:
    sent = {CLEO: body(0.5), ANNA: body(1.0, 5), BERT: body(2.0)}
    assert desk.ingest.commit() == []
    for place, (device, each) in enumerate(sent.items()):
        desk.now_seconds += 10.0
        assert desk.offer(desk.identity(device), each) is None
        assert len(desk.ingest) == place + 1
    opened, desk.now_seconds = desk.row.opened_unix_seconds, desk.now_seconds + 0.75
    settled = desk.ingest.commit()
    for each, (device, content) in zip(settled, sent.items(), strict=True):
        assert told(each, desk.identity(device), content) == ("counted", "")
    assert len(desk.ingest) == 0 and desk.ingest.commit() == []
    assert desk.ingest.counted == desk.parts.first.aggregation.participants == 3
    assert desk.ingest.widths == {3: 2, 5: 1}
    log = list(desk.parts.store.first.log.after(0))
    assert [(each.seq, each.device_id, each.body) for each in log] == [
        (seq, device, content) for seq, (device, content) in enumerate(sent.items(), 1)
    ]
    assert [each.round for each in log] == [1, 1, 1]
    assert [each.arrived_seconds for each in log] == [10.0, 20.0, 30.0]
    # A round ends when everybody came, and each is waited for no longer.
    assert desk.parts.first.rounds.outstanding == 0 and desk.parts.first.rounds.arrived == 3
    # Who was counted, when and how wide, is written down with the next group, or at the end.
    ended_at = int(opened + 30.75)
    with desk.parts.store.database.transaction():
        desk.ingest.save_seen()
    assert desk.parts.store.first.participations.all() == {
        device: LastParticipation(ended_at, width)
        for device, width in ((CLEO, 3), (ANNA, 5), (BERT, 3))
    }


def test_who_was_counted_is_written_down_once(desk: Desk) -> None:
    desk.count(ANNA, body())
    desk.now_seconds += 1.0
    desk.count(BERT, body())  # with it, ANNA's
    with desk.parts.store.database.transaction():
        desk.parts.store.first.participations.note({ANNA: LastParticipation(7, 7)})
        desk.ingest.save_seen()
    assert desk.parts.store.first.participations.all()[ANNA] == LastParticipation(7, 7)


def test_with_nothing_staged_nothing_is_written(desk: Desk) -> None:
    desk.count(ANNA, body())
    assert desk.ingest.commit() == []
    assert desk.parts.store.first.participations.all() == {}


def test_a_calendar_that_was_set_back_makes_no_arrival_before_the_opening(desk: Desk) -> None:
    desk.now_seconds -= 5.0
    desk.count(ANNA, body())
    assert list(desk.parts.store.first.log.came(desk.row.generation, 1)) == [(ANNA, 0.0)]


def test_the_same_update_again_is_answered_once_before_and_each_time_after(desk: Desk) -> None:
    identity = desk.identity(ANNA)
    assert desk.offer(identity, body()) is None
    assert desk.offer(identity, body()) is None, "its receipt is about to be sent"
    assert desk.offer(identity, body(2.0)) is None, "the store has neither of the two yet"
    assert desk.refused("conflict") == 0
    counted, other = desk.ingest.commit()
    assert told(counted, identity, body()) == ("counted", "")
    assert told(other, identity, body(2.0)) == ("conflict", "")
    for _ in range(2):
        assert desk.offer(identity, body()) == ("counted", "")
    assert desk.offer(identity, body(2.0)) == ("conflict", "")
    assert desk.refused("conflict") == 2
    assert desk.ingest.commit() == [] and desk.parts.first.aggregation.participants == 1


def test_no_conflict_is_told_of_an_update_that_is_never_committed(desk: Desk) -> None:
    identity = desk.identity(ANNA)
    assert desk.offer(identity, body()) is None and desk.offer(identity, body(2.0)) is None
    desk.ingest.abandon()
    assert desk.offer(identity, body(2.0)) is None
    (settled,) = desk.ingest.commit()
    assert told(settled, identity, body(2.0)) == ("counted", "")
    assert desk.refused("conflict") == 0


def test_an_update_that_does_not_pass_the_method_s_check_is_refused(desk: Desk) -> None:
    sent = body(-1.0)
    assert desk.offer(desk.identity(ANNA), sent) is None
    (settled,) = desk.ingest.commit()
    assert told(settled, desk.identity(ANNA), sent) == ("refused", "too-low")
    assert desk.refused("too-low") == 1
    assert list(desk.parts.store.first.log.after(0)) == []


def test_an_update_that_cannot_be_absorbed_is_refused_alone_and_holds_the_round(
    desk: Desk,
) -> None:
    large = body(2 * TOO_LARGE)
    for device, sent in ((BERT, body()), (ANNA, large), (CLEO, body(0.5))):
        assert desk.offer(desk.identity(device), sent) is None
    answers = desk.ingest.commit()
    assert [each.receipt.verdict for each in answers] == [
        Verdict.COUNTED,
        Verdict.REFUSED,
        Verdict.COUNTED,
    ]
    assert told(answers[1], desk.identity(ANNA), large) == ("refused", "quarantined")
    assert desk.refused("quarantined") == 1
    assert desk.offer(desk.identity(ANNA), large) == ("refused", "quarantined")
    assert desk.row.held is not None
    assert desk.ingest.counted == desk.parts.first.aggregation.participants == 2


def test_who_was_not_asked_is_refused(desk: Desk) -> None:
    assert desk.offer(desk.identity(LATER), body()) == ("refused", "joined-later")
    assert desk.offer(desk.identity(STRANGER), body()) == ("refused", "not-selected")
    assert desk.offer(desk.identity(ANNA, task="other"), body()) == ("refused", "wrong-task")
    counts = [desk.refused(each) for each in ("joined-later", "not-selected", "wrong-task")]
    assert counts == [1, 1, 1]
    assert len(desk.ingest) == 0


def test_of_other_rounds_the_closed_are_late_and_the_others_unknown(desk: Desk) -> None:
    desk.count(ANNA, body())
    desk.count(BERT, body())
    generation = desk.row.generation
    desk.next_round()
    assert desk.row.round == 2
    late = desk.identity(CLEO, 1)
    desk.now_seconds = desk.row.opened_unix_seconds + 5.0
    assert desk.offer(late, body()) == ("late", "")
    assert desk.refused("late") == 1
    assert desk.offer(desk.identity(ANNA, 1), body()) == ("counted", "")
    assert desk.offer(desk.identity(ANNA, 1), body(2.0)) == ("conflict", "")
    unknown = ("refused", "unknown-round")
    assert desk.offer(desk.identity(CLEO, 3), body()) == unknown
    assert desk.offer(desk.identity(CLEO, 1, generation=generation + 1), body()) == unknown
    assert desk.offer(desk.identity(CLEO, 2, generation=generation + 1), body()) == unknown
    # Of a generation before the backup, and of a number that no round ever had.
    forgotten = ("forgotten", "")
    for number in (0, 1, 2, 3):
        before = desk.identity(CLEO, number, generation=generation - 1)
        assert desk.offer(before, body()) == forgotten
    assert desk.offer(desk.identity(CLEO, 0), body()) == forgotten
    assert desk.refused("late") == 1 and desk.refused("unknown-round") == 3
    assert len(desk.ingest) == 0


def test_a_late_update_s_time_is_noted_where_the_deadline_had_let_it_in(desk: Desk) -> None:
    opened = desk.row.opened_unix_seconds
    desk.next_round()
    length = desk.row.deadline_unix_seconds - desk.row.opened_unix_seconds
    habits = desk.parts.first.rounds._attendance.habits
    desk.now_seconds = opened + length
    assert desk.offer(desk.identity(CLEO, 1), body()) == ("late", "")
    assert desk.offer(desk.identity(LATER, 1), body()) == ("late", "")  # who was not waited for
    desk.now_seconds += 0.1
    assert desk.offer(desk.identity(BERT, 1), body()) == ("late", "")  # no wait had been of use
    assert habits.of(CLEO).seconds == length
    assert habits.of(LATER).seconds is habits.of(BERT).seconds is None


def test_between_rounds_nothing_is_open(desk: Desk) -> None:
    desk.now_seconds = desk.row.deadline_unix_seconds
    identity = desk.identity(ANNA)
    following = replace(identity, round=2)
    assert isinstance(desk.parts.first.rounds.tick(), RoundClosed)
    assert desk.offer(identity, body()) == ("late", "")
    assert desk.offer(following, body()) == ("refused", "unknown-round")
    assert desk.ingest.commit() == []


def test_answers_that_change_nothing_are_charged_and_new_updates_are_not(desk: Desk) -> None:
    for _ in range(ANSWERS_AT_ONCE):
        assert desk.offer(desk.identity(BERT), body()) is None
    assert desk.refused("too-many-repeats") == 0
    repeats = desk.parts.inbox._repeats
    for device, offers in ((ANNA, b""), (CLEO, write_update(desk.identity(CLEO, 9), body()))):
        for place in range(ANSWERS_AT_ONCE):
            assert not repeats.exhausted(device), place
            if offers:
                assert desk.parts.inbox.offer(device, offers) is not None
            else:
                with pytest.raises(WireError) as caught:
                    desk.parts.inbox.offer(device, offers)
                assert caught.value.reason == "truncated"
        assert repeats.exhausted(device)
    assert not repeats.exhausted(BERT)
    assert desk.refused("too-many-repeats") == 2
    desk.now_seconds += 1.0
    assert not repeats.exhausted(ANNA)
    assert repeats.answered(ANNA) and repeats.exhausted(ANNA)
    assert repeats.answered(ANNA), "beyond its limit too"
    desk.now_seconds += 1.0
    assert not repeats.exhausted(ANNA), "and nothing more was taken"


def test_each_refusal_names_the_device_in_the_log(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    refused = {
        "wrong-task": lambda: desk.offer(desk.identity(ANNA, task="other"), body()),
        "unknown-round": lambda: desk.offer(desk.identity(ANNA, 9), body()),
        "conflict": lambda: (
            desk.offer(desk.identity(ANNA), body()),
            desk.offer(desk.identity(ANNA), body(2.0)),
            desk.ingest.commit(),
        ),
        "too-low": lambda: (desk.offer(desk.identity(BERT), body(-1.0)), desk.ingest.commit()),
        "quarantined": lambda: (
            desk.offer(desk.identity(CLEO), body(2 * TOO_LARGE)),
            desk.ingest.commit(),
        ),
        "too-many-repeats": lambda: [
            desk.offer(desk.identity(BERT), body(-1.0)) for _ in range(ANSWERS_AT_ONCE)
        ],
    }
    senders = {"too-low": BERT, "quarantined": CLEO, "too-many-repeats": BERT}
    for reason, act in refused.items():
        caplog.clear()
        act()
        (said,) = [each for each in caplog.messages if "logged once" in each]
        assert said.startswith(f"refused from {senders.get(reason, ANNA).hex()}: ")
        assert desk.refused(reason) >= 1


def test_a_late_device_is_named_in_the_log(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.next_round()
    assert desk.offer(desk.identity(BERT, 1), body()) == ("late", "")
    assert f"refused from {BERT.hex()}: late (logged once)" in caplog.messages


def test_one_that_is_waited_for_no_longer_is_still_counted_if_it_was_selected(desk: Desk) -> None:
    desk.parts.first.rounds.revoked(ANNA)
    desk.count(ANNA, body())


def test_a_device_that_the_draw_left_out_is_told_so_from_its_first_round_on(
    template: AggregatorHome, tmp_path: Path
) -> None:
    home = AggregatorHome(tmp_path / "home")
    shutil.copytree(template.folder, home.folder)
    task = home.task_file.read_text()
    home.task_file.write_text(task.replace("[round]\n", "[round]\nshare = 1e-12\n"))
    desk = Desk(home)
    assert desk.offer(desk.identity(ANNA), body()) == ("refused", "not-selected")
    assert desk.offer(desk.identity(LATER), body()) == ("refused", "joined-later")
    desk.parts.store.database.close()


def test_a_round_that_is_full_closes_at_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's first round is held: who comes when its memory is full would lose it."""
    monkeypatch.setattr("aggregator.methods.robust.MOST_HELD_BYTES", 100)
    rounds = desk.parts.first.rounds
    desk.count(ANNA, body())
    assert rounds.tick() is None
    desk.count(BERT, body())
    closed = rounds.tick()
    assert isinstance(closed, RoundClosed)
    assert closed.summary.participants == 2 and closed.silent == {CLEO}
    desk.open()
    desk.count(CLEO, body())


def test_a_full_round_without_quorum_waits_for_its_end(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aggregator.methods.robust.MOST_HELD_BYTES", 10)
    desk.count(ANNA, body())
    assert desk.parts.first.rounds.tick() is None
    identity = desk.identity(BERT)
    assert desk.offer(identity, body()) is None
    (settled,) = desk.ingest.commit()
    assert told(settled, identity, body()) == ("refused", "round-full")
    desk.now_seconds = desk.row.deadline_unix_seconds
    closed = desk.parts.first.rounds.tick()
    assert isinstance(closed, RoundClosed) and closed.next_version is None
