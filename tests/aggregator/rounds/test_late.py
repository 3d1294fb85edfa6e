"""``round.late = "staleness"``: updates of closed rounds count in the open one, once, for less."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from aggregator.errors import TaskError
from aggregator.home import AggregatorHome
from aggregator.methods.method import late_weight, read_binding
from aggregator.rounds.machine import RoundClosed, RoundOpened
from aggregator.store.rows import RoundRow
from aggregator.tables import TomlTable
from aggregator.task.file import read_task
from device_sdk.artifact.submodels import Piece, Submodel
from device_sdk.wire.arrays.exchange import Update, encode_update
from device_sdk.wire.arrays.tensors import Codec
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.receipts import UpdateIdentity, write_update
from tests.fakes.averaging import BROKER, averaging_home
from tests.fakes.handmade import FEATURES, TARGETS
from tests.fakes.homes import make_home
from tests.fakes.parts import enrol, parts_of

ANNA, BERT, CLEO, DORA, EMIL = FLEET = tuple(bytes([place]) * 16 for place in range(5))
LATER = bytes([9]) * 16
STALE = 'late = "staleness"\nmost_stale = 2'
ROUND = "quorum = 2\ndeadline_seconds = 100.0\nresume_grace_seconds = 0.0"
# Every device weighs the same, and none is shortened: what is seen is the weight by age alone.
ALIKE = 'clip_multiple = 0.0\ntraining.weighting = "uniform"'
BOUNDED = 'training.weighting = "uniform"'
LENGTH = 100.0


def body(value: float) -> bytes:
    tensors = {
        "w.linear.weight": np.full((FEATURES, TARGETS), value, np.float32),
        "w.linear.bias": np.full(TARGETS, value, np.float32),
        "b.mean": np.full(FEATURES, value, np.float32),
    }
    return encode_update(Update(1, tensors, {"loss": 0.5}), Codec.FLOAT32)


class Desk:
    """An aggregator with five devices, and one that joined after its first round.

    ``now_seconds``: of both its clocks.
    """

    def __init__(self, home: AggregatorHome) -> None:
        self.home = home
        self.now_seconds = float(time.time())
        self.begin()

    def begin(self) -> None:
        """As a process that starts."""
        self.parts = parts_of(self.home, self.now, self.now)
        self.first = self.parts.first

    def restart(self) -> None:
        self.parts.store.database.close()
        self.begin()

    def now(self) -> float:
        return self.now_seconds

    @property
    def row(self) -> RoundRow:
        assert self.first.rounds.current is not None
        return self.first.rounds.current

    @property
    def state(self) -> Mapping[str, np.ndarray]:
        return self.first.aggregation.state()

    def model(self, version: int | None = None) -> float:
        """A parameter of a version; all of them move alike."""
        found = self.first.aggregation.version if version is None else version
        return float(self.parts.store.first.versions.model(found)["linear.bias"][0])

    def open(self) -> int:
        assert isinstance(self.first.rounds.tick(), RoundOpened)
        self.first.ingest.round_opened()
        return self.row.round

    def close(self) -> RoundClosed:
        """The round's time runs out, if it has not ended before."""
        event = self.first.rounds.tick()
        if event is None:
            self.now_seconds = self.row.deadline_unix_seconds
            event = self.first.rounds.tick()
        assert isinstance(event, RoundClosed)
        return event

    def send(self, device: bytes, value: float, number: int | None = None) -> str:
        """What becomes of an update, of the open round unless ``number`` says another."""
        generation = self.parts.store.first.facts.generation
        of = self.row.round if number is None else number
        payload = write_update(UpdateIdentity(device, "default", generation, of), body(value))
        settled = self.parts.inbox.offer(device, payload)
        answers = [settled] if settled is not None else self.first.ingest.commit()
        (answer,) = answers
        assert answer.device_id == device
        return answer.receipt.reason or answer.receipt.verdict.value

    def round(self, *devices: bytes, value: float = 1.0) -> int:
        """A round that these devices alone come to; its number."""
        number = self.open()
        for each in devices:
            assert self.send(each, value) == "counted"
        self.close()
        return number


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def make_desk(lines: str = STALE, more: str = ALIKE) -> Desk:
        home = averaging_home(tmp_path / "fleet", f"{ROUND}\n{lines}", more)
        enrol(home, FLEET)
        enrol(home, [LATER], first_round=2)
        made.append(Desk(home))
        return made[-1]

    yield make_desk
    for each in made:
        with suppress(Exception):
            each.parts.store.database.close()


def test_an_older_update_moves_the_model_by_its_weight(make: Callable[..., Desk]) -> None:
    desk = make()
    first = desk.round(ANNA, BERT)
    second = desk.round(ANNA, BERT)
    before = desk.model()
    desk.open()
    assert desk.send(ANNA, 1.0) == "counted"
    assert desk.send(CLEO, 1.0, first) == desk.send(DORA, 1.0, second) == "counted"
    assert desk.send(CLEO, 4.0) == "counted"  # and the open round's beside it
    closed = desk.close()
    assert closed.summary.participants == 4
    moved = (1.0 + 1 / math.sqrt(3) + 1 / math.sqrt(2) + 4.0) / 4
    assert desk.model() - before == pytest.approx(moved, rel=1e-5)
    assert [late_weight(age) for age in (None, 0, 3)] == [1.0, 1.0, 0.5]


def test_it_is_refused_as_ever_where_nothing_is_said(make: Callable[..., Desk]) -> None:
    desk = make("")
    first = desk.round(ANNA, BERT)
    desk.open()
    assert desk.send(CLEO, 1.0, first) == "late"


def test_it_counts_once_whatever_is_sent_again_and_in_whichever_round(
    make: Callable[..., Desk],
) -> None:
    desk = make()
    first = desk.round(ANNA, BERT)
    desk.open()
    for _ in range(3):
        assert desk.send(CLEO, 1.0, first) == "counted"
    assert desk.send(CLEO, 2.0, first) == "conflict"
    assert desk.send(ANNA, 2.0, first) == "conflict"
    assert desk.first.aggregation.participants == 1 and desk.first.ingest.counted == 3
    (logged,) = desk.parts.store.first.log.after(0)
    assert (logged.round, logged.device_id) == (first, CLEO)
    desk.send(ANNA, 1.0)
    assert desk.close().summary.participants == 2
    desk.open()
    assert desk.send(CLEO, 1.0, first) == "counted"  # its receipt again, and nothing else
    assert desk.first.aggregation.participants == 0


def test_beyond_most_stale_it_is_too_late(make: Callable[..., Desk]) -> None:
    desk = make()
    numbers = [desk.round(ANNA, BERT) for _ in range(3)]
    desk.open()
    assert desk.send(CLEO, 1.0, numbers[0]) == "late"
    assert desk.send(CLEO, 1.0, numbers[1]) == "counted"
    assert desk.send(CLEO, 1.0, numbers[0]) == "late"
    assert desk.parts.refusals.counts["late"] == 2


def test_a_liar_s_old_rounds_change_nothing_more_than_a_voice_each(
    make: Callable[..., Desk],
) -> None:
    desk = make(more=BOUNDED)
    numbers = [desk.round(ANNA, BERT, DORA, value=0.1) for _ in range(4)]
    desk.open()
    before = desk.model()
    for number in numbers * 5:
        # Bounded as ever, and by what is usual in the fleet, before the weight of its age; one in
        # each round, and of those beyond most_stale none.
        if number == numbers[3]:
            with pytest.raises(WireError, match="one-at-a-time"):
                desk.send(EMIL, 1e6, number)
        else:
            assert desk.send(EMIL, 1e6, number) == ("counted" if number == numbers[2] else "late")
    for each in (ANNA, BERT, DORA):
        assert desk.send(each, 0.1) == "counted"
    closed = desk.close()
    assert closed.summary.participants == 4 and closed.summary.metrics["clipped"] == 1
    most = (3 * 0.1 + 3 * 0.1 / math.sqrt(3)) / 4
    assert 0 < desk.model() - before <= most * 1.001
    desk.open()
    desk.restart()
    assert desk.send(EMIL, 1e6, numbers[2]) == "counted"  # the receipt of before
    assert desk.send(EMIL, 1e6, numbers[3]) == "counted"
    assert desk.first.aggregation.participants == 1
    desk.restart()
    with pytest.raises(WireError, match="one-at-a-time"):
        desk.send(EMIL, 1e6, numbers[3] + 1)


def test_only_whom_its_own_round_had_asked_is_heard(make: Callable[..., Desk]) -> None:
    desk = make()
    first = desk.round(ANNA, BERT)
    second = desk.round(ANNA, BERT)
    desk.open()
    assert desk.send(LATER, 1.0, first) == "late"
    assert desk.send(LATER, 1.0, second) == "counted"


def test_of_a_round_without_quorum_it_is_of_the_same_version(make: Callable[..., Desk]) -> None:
    desk = make()
    first = desk.round(ANNA, value=1.0)
    before = desk.model()
    desk.open()
    assert desk.send(CLEO, 2.0, first) == "counted"
    assert desk.close().next_version == 1
    assert desk.model() - before == pytest.approx(1.5, rel=1e-5)


@pytest.mark.parametrize("known", [False, True])
def test_a_restart_finds_the_same_ages(make: Callable[..., Desk], known: bool) -> None:
    """Of updates that are held until the round closes, and of such as were added at once."""
    desk = make(more=BOUNDED)
    everybody = FLEET[:4] if known else (ANNA, BERT)
    first = desk.round(*everybody)
    second = desk.round(*everybody)
    desk.open()
    assert desk.send(EMIL, 1.0, first) == desk.send(LATER, 2.0, second) == "counted"
    assert desk.send(ANNA, 1.0) == "counted"
    assert desk.first.aggregation._method.adds_up is known
    before = desk.state
    desk.restart()
    assert before.keys() == desk.state.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(desk.state[name], array, err_msg=name)
    assert desk.send(EMIL, 1.0, first) == "counted"
    assert desk.first.aggregation.participants == 3
    # A round without quorum leaves what was late to the next, at the same age.
    assert desk.close().summary.participants == 3


def test_what_is_carried_over_keeps_its_age(make: Callable[..., Desk]) -> None:
    desk = make()
    first = desk.round(ANNA, BERT)
    desk.open()
    before = desk.model()
    assert desk.send(CLEO, 1.0, first) == "counted"
    assert desk.close().next_version is None
    desk.open()
    desk.restart()
    assert desk.send(ANNA, 1.0) == "counted"
    assert desk.close().next_version == 2
    assert desk.model() - before == pytest.approx((1 + 1 / math.sqrt(2)) / 2, rel=1e-5)


def test_nothing_counts_across_another_model(make: Callable[..., Desk]) -> None:
    desk = make()
    first = desk.round(ANNA, BERT)
    with desk.parts.store.database.transaction():
        desk.parts.store.first.versions.ask_for(0)
    desk.first.aggregation.go_back(first)
    desk.open()
    assert desk.row.version == 2
    assert desk.send(CLEO, 1.0, first) == "late"
    assert desk.send(ANNA, 1.0) == desk.send(BERT, 1.0) == "counted"
    desk.close()
    desk.open()
    assert desk.send(CLEO, 1.0, first) == "late"
    assert desk.send(CLEO, 1.0, first + 1) == "counted"


def test_between_rounds_nothing_is_said_and_at_the_end_it_is_too_late(
    make: Callable[..., Desk],
) -> None:
    desk = make(f"{STALE}\nmost_rounds = 2")
    first = desk.round(ANNA, BERT)
    generation = desk.parts.store.first.facts.generation
    early = write_update(UpdateIdentity(CLEO, "default", generation, first), body(1.0))
    for _ in range(3):  # a device sends it again until it has a receipt
        assert desk.parts.inbox.offer(CLEO, early) is None and desk.first.ingest.commit() == []
    assert not desk.parts.refusals.counts, "nothing was refused"
    desk.open()
    assert desk.send(CLEO, 1.0, first) == "counted"
    desk.close()
    desk.open()
    assert desk.row.threshold == 0
    assert desk.send(CLEO, 1.0, first) == "counted" and desk.send(DORA, 1.0, first) == "late"


def test_a_round_closes_at_so_many_of_whatever_age(make: Callable[..., Desk]) -> None:
    desk = make(f"{STALE}\nwanted = 3\nover_select = 100.0")
    first = desk.round(ANNA, BERT)
    desk.open()
    assert desk.send(CLEO, 1.0, first) == desk.send(DORA, 1.0, first) == "counted"
    assert desk.first.rounds.tick() is None
    assert desk.send(ANNA, 1.0) == "counted"
    assert isinstance(desk.first.rounds.tick(), RoundClosed)


def test_who_is_late_is_still_awaited_in_the_open_round(make: Callable[..., Desk]) -> None:
    desk = make()
    first = desk.round(ANNA, BERT)
    desk.open()
    assert desk.send(CLEO, 1.0, first) == "counted"
    assert desk.first.rounds.outstanding == len(FLEET) + 1 and desk.first.rounds.awaits(CLEO)
    assert desk.first.rounds.arrived == 0


def test_a_held_task_gives_no_verdict(make: Callable[..., Desk]) -> None:
    desk = make()
    first = desk.round(ANNA, BERT)
    desk.open()
    desk.first.rounds.failed = True
    with pytest.raises(WireError, match="held"):
        desk.send(CLEO, 1.0, first)


def test_devices_are_told_of_the_time_in_which_it_may_count(make: Callable[..., Desk]) -> None:
    desk = make()
    told = desk.parts.first.publisher._useful_until
    desk.open()
    assert told(desk.row) == desk.row.opened_unix_seconds + 3 * LENGTH
    assert read_task(desk.home.task_file).round.useful_seconds == 3 * LENGTH


def test_what_is_not_sound_is_refused_with_the_task(tmp_path: Path) -> None:
    def reason(home: AggregatorHome) -> str:
        with pytest.raises(TaskError, match="late is 'staleness', and ") as raised:
            read_task(home.task_file)
        return str(raised.value)

    def averaging(name: str, lines: str) -> AggregatorHome:
        return averaging_home(tmp_path / name, f"{ROUND}\n{STALE}", lines)

    assert "robust is 'median'" in reason(averaging("median", 'robust = "median"'))
    assert "slices is 'rolling'" in reason(averaging("rolling", 'slices = "rolling"'))
    scatter = make_home(tmp_path, BROKER, f"{ROUND}\n{STALE}")
    assert "updates of scatter are no changes of one model" in reason(scatter)


def test_slices_that_stay_are_sound_and_bases_that_turn_are_not() -> None:
    binding = read_binding("fedavg", TomlTable({}, "fedavg"))

    def rung(*roles: str) -> Submodel:
        return Submodel(1, 2, "0" * 64, {f"w.{role}": Piece("w", role) for role in roles})

    assert binding.why_no_staleness([rung("slice")]) == binding.why_no_staleness() == ""
    assert "low rank" in binding.why_no_staleness([rung("left", "scale", "right")])
