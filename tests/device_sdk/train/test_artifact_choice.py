"""Which of a task's artifacts a device takes, and which of them it trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.capability.fit import Fit, Request, WorkDone
from device_sdk.capability.fit import choose as choose_among
from device_sdk.methods.learner import Declined
from device_sdk.rounds.open_round import pick_artifacts
from device_sdk.wire.publish.task_messages import OfferedArtifact
from device_sdk.world import TrainingOptions

SMALL, MIDDLE, LARGE = (
    OfferedArtifact(bytes([number]) * 32, name, size)
    for number, (name, size) in enumerate([("small", 10), ("middle", 100), ("large", 1000)])
)
ALL = (SMALL, MIDDLE, LARGE)


@dataclass
class HandClock:
    seconds: float = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass
class Work:
    """A round of ``steps`` equal steps. What is ``held_up``, by the number of the run from 0, takes
    that many seconds more, before its first step: a session is opened, or another program runs."""

    name: str
    size: float
    step_seconds: float
    clock: HandClock
    held_up: dict[int, float]
    steps: int = 40
    spent: list[float] = field(default_factory=list)

    def run(self, most_seconds: float) -> WorkDone:
        start = self.clock.seconds
        self.clock.seconds += self.held_up.get(len(self.spent), 0.0)
        done = 0
        while done < self.steps and (not done or self.clock.seconds - start < most_seconds):
            self.clock.seconds += self.step_seconds
            done += 1
        self.spent.append(self.clock.seconds - start)
        return WorkDone(self.spent[-1], done, done == self.steps)


def choose(
    *step_seconds: float,
    train: float = 1.0,
    box: float = 5.0,
    slowdown: float = 1.0,
    held_up: dict[int, float] | None = None,
) -> tuple[Fit, list[Work]]:
    """Of works whose size is as their step's seconds, the first run of each cold."""
    clock = HandClock()
    held = {0: 0.01} if held_up is None else held_up
    works = [Work(f"net {n}", each, each, clock, held) for n, each in enumerate(step_seconds)]
    request = Request(train, time_box_seconds=box, slowdown=slowdown)
    return choose_among(works, request, clock), works


def test_the_largest_that_fits_is_chosen() -> None:
    choice, works = choose(0.002, 0.01, 0.03)
    assert choice.place == 1 and choice.p90_seconds == pytest.approx(0.4)
    assert "net 1 takes 400 ms at p90" in choice.reason and "net 2 takes 1.2" in choice.reason
    assert max(works[0].spent[1:]) == pytest.approx(0.08)
    choice, _ = choose(0.002, 0.01, 0.015)
    assert choice.place == 2 and "the largest one" in choice.reason


def test_a_miss_ends_the_search_before_larger_ones() -> None:
    choice, works = choose(0.002, 0.05, 0.06)
    assert choice.place == 0 and not works[2].spent
    assert max(works[1].spent) <= 0.8 + 0.06  # no round of it was finished


@pytest.mark.parametrize(
    ("train", "measured", "place"),
    [(1.0, (0, 1, 8), 8), (0.36, (0, 1, 6, 7), 6), (0.11, (0, 1, 2), 1)],
)
def test_as_few_are_measured_as_a_line_through_them_needs(
    train: float, measured: tuple[int, ...], place: int
) -> None:
    choice, _ = choose(*(0.001 * each for each in range(1, 10)), train=train)
    assert tuple(each.place for each in choice.measured) == measured
    assert choice.place == place


def test_slowness_counts() -> None:
    choice, _ = choose(0.002, 0.01, slowdown=4.0)
    assert choice.place == 0
    assert choice.p90_seconds == pytest.approx(0.32)


def test_a_short_box_judges_larger_ones_by_the_pace_of_their_steps() -> None:
    choice, works = choose(0.05, 0.1, 0.3, train=10.0, box=1.0)
    assert choice.place == 1 and choice.p90_seconds == pytest.approx(4.0, rel=0.05)
    assert len(works[1].spent) == 2 and works[1].spent[1] < 1.0  # of a round of four seconds
    assert sum(works[2].spent) < 3.5


def test_none_fits() -> None:
    choice, works = choose(0.5, 0.6)
    assert choice.place is None and choice.p90_seconds is None
    assert "Even the smallest misses: net 0 did not end in time" in choice.reason
    assert not works[1].spent


@pytest.mark.parametrize("held_up", [{0: 30.0}, {0: 30.0, 1: 2.0}, {0: 30.0, 4: 2.0}, {3: 2.0}])
def test_a_cold_start_or_one_held_up_run_does_not_decide(held_up: dict[int, float]) -> None:
    """A round of 50 ms on a device four times slower with 960 ms: eight such devices opened their
    sessions at once on two cores, which took longer than the round may."""
    choice, _ = choose(0.05 / 40, train=1.2, box=60.0, slowdown=4.0, held_up=held_up)
    assert choice.place == 0 and choice.p90_seconds == pytest.approx(0.2)


@pytest.mark.parametrize("slow_runs", [range(1, 4), range(9, 13), range(18, 22)])
def test_a_slow_spell_does_not_decide_while_there_is_time(slow_runs: range) -> None:
    """Another program runs for as long as one of the works is measured, whichever it is."""
    clock, number = HandClock(), [0]

    class Shared(Work):
        def run(self, most_seconds: float) -> WorkDone:
            self.held_up = {len(self.spent): 2.0} if number[0] in slow_runs else {}
            number[0] += 1
            return super().run(most_seconds)

    works = [Shared(f"net {n}", n + 1, 0.001 * (n + 1), clock, {}) for n in range(3)]
    fit = choose_among(works, Request(1.0, time_box_seconds=60.0), clock)
    assert fit.place == 2, fit.reason


@pytest.mark.parametrize("fails", [1, 2])
def test_one_that_cannot_run_here_leaves_the_smaller_ones(fails: int) -> None:
    clock = HandClock()

    class Limited(Work):
        def run(self, most_seconds: float) -> WorkDone:
            if self.size > fails:
                self.spent.append(0.0)
                raise MemoryError("no room")
            return super().run(most_seconds)

    works = [Limited(f"net {n}", n + 1, 0.001 * (n + 1), clock, {}) for n in range(3)]
    fit = choose_among(works, Request(1.0, time_box_seconds=60.0), clock)
    assert fit.place == fails - 1
    assert f"net {fails} does not run here (MemoryError: no room)" in fit.reason
    assert len(works[fails].spent) == 1, "what takes all memory is not tried again"
    with pytest.raises(MemoryError):
        choose_among(works[2:], Request(1.0), clock)


@given(
    steps=st.lists(st.floats(1e-4, 0.5), min_size=1, max_size=5),
    box=st.floats(1e-6, 10.0),
    grain=st.sampled_from([0.0, 1e-3, 1 / 64, 1.0, math.inf]),
    jumps=st.lists(st.floats(-1e4, 1e4), max_size=3),
)
def test_a_choice_ends_whatever_the_clock_says(
    steps: list[float], box: float, grain: float, jumps: list[float]
) -> None:
    """Of a coarse clock, one that stands still, one that is set: what fits by it is chosen."""

    @dataclass
    class Odd(HandClock):
        told: int = 0

        def now(self) -> float:
            self.told += 1
            assert self.told < 200_000, "it does not end"
            moved = sum(jumps[: self.told // 20])
            if math.isinf(grain):
                return moved
            return moved + (self.seconds // grain * grain if grain else self.seconds)

    clock = Odd()

    class Timed(Work):
        def run(self, most_seconds: float) -> WorkDone:
            start, done = self.clock.now(), 0
            while done < self.steps and (not done or self.clock.now() - start < most_seconds):
                self.clock.seconds += self.step_seconds
                done += 1
            return WorkDone(self.clock.now() - start, done, done == self.steps)

    works = [Timed(f"net {n}", each, each, clock, {}, steps=4) for n, each in enumerate(steps)]
    fit = choose_among(works, Request(1.0, time_box_seconds=box), clock)
    assert (fit.place is None) == (fit.p90_seconds is None)
    assert fit.p90_seconds is None or fit.p90_seconds <= 0.8 * (1 + 1e-9)


def test_a_device_takes_what_its_byte_cap_allows() -> None:
    assert pick_artifacts(ALL, TrainingOptions(most_artifact_bytes=2000)) == ALL
    assert pick_artifacts(ALL, TrainingOptions(most_artifact_bytes=1000)) == (SMALL, MIDDLE)
    assert pick_artifacts(ALL, TrainingOptions(most_artifact_bytes=10)) == (SMALL,)
    with pytest.raises(Declined, match="smallest artifact has 10 bytes, this device takes 9"):
        pick_artifacts(ALL, TrainingOptions(most_artifact_bytes=9))
    paired = OfferedArtifact(bytes(32), "net", 10, LARGE)
    with pytest.raises(Declined, match="1010 bytes"):
        pick_artifacts([paired], TrainingOptions(most_artifact_bytes=1000))


def test_a_device_takes_the_one_it_is_told_to() -> None:
    told = TrainingOptions(artifact="large", most_artifact_bytes=1)
    assert pick_artifacts(ALL, told) == (LARGE,)
    by_id = TrainingOptions(artifact=MIDDLE.artifact_id.hex()[:8])
    assert pick_artifacts(ALL, by_id) == (MIDDLE,)
    for name in ("huge", "0101"):
        with pytest.raises(Declined, match=r"offers 0 artifacts named .* small, middle, large"):
            pick_artifacts(ALL, TrainingOptions(artifact=name))
    with pytest.raises(Declined, match="2 artifacts named"):
        pick_artifacts((SMALL, SMALL), TrainingOptions(artifact="small"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"artifact": ""}, "artifact is ''"),
        ({"most_artifact_bytes": 0}, "most_artifact_bytes is 0"),
        ({"most_attachment_bytes": 0}, "most_attachment_bytes is 0"),
        ({"placement": "cloud"}, "placement is 'cloud'"),
    ],
)
def test_bad_options_name_themselves(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingOptions(**changed)  # type: ignore[arg-type]
