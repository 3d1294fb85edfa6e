"""Schedules of several tasks, made up: who is trained when one training is done at a time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from device_sdk.rounds.turns import Ready, Turns


@dataclass(frozen=True)
class Rounds:
    """A task's rounds: one every ``period`` from ``offset`` on, to be trained within ``window``."""

    period: float
    offset: float
    window: float
    seconds: float


@st.composite
def a_task(draw: st.DrawFn) -> Rounds:
    """Any whose training ends in time, were it alone."""
    period = draw(st.sampled_from([60.0, 97.0, 100.0, 300.0, 1000.0]))
    window = period * draw(st.floats(0.1, 1.0))
    seconds = window * draw(st.floats(0.01, 0.75))
    return Rounds(period, period * draw(st.floats(0, 1)), window, seconds)


def simulate(tasks: dict[str, Rounds], until: float) -> tuple[Counter[str], dict[str, int]]:
    """How often each was trained, and its longest row of rounds without a training."""
    turns, now = Turns(), 0.0
    coming = {name: each.offset for name, each in tasks.items()}
    in_hand: dict[str, float] = {}  # deadlines
    trained: Counter[str] = Counter()
    row, longest = Counter[str](), dict.fromkeys(tasks, 0)

    def lost(name: str) -> None:
        row[name] += 1
        longest[name] = max(longest[name], row[name])

    def arrive() -> None:
        """What opened until now; a round that was over meanwhile is only heard of."""
        for name, each in tasks.items():
            while coming[name] <= now:
                deadline = coming[name] + each.window
                coming[name] += each.period
                if deadline <= now:
                    turns.missed(name, deadline)
                    lost(name)
                else:
                    if name in in_hand:
                        turns.lose(name)
                        lost(name)
                    in_hand[name] = deadline
        for name in [name for name, deadline in in_hand.items() if deadline <= now]:
            del in_hand[name]
            turns.lose(name)
            lost(name)

    while now < until:
        arrive()
        ready = [
            Ready(name, at, tasks[name].seconds, at - tasks[name].window)
            for name, at in in_hand.items()
        ]
        turn = turns.pick(ready, now, tasks)
        if turn.task is None:
            later = [
                at for at in (turn.at_seconds, *coming.values(), *in_hand.values()) if at > now
            ]
            now = min(later)
            continue
        deadline = in_hand.pop(turn.task)
        if turn.gives_up:
            lost(turn.task)
            continue
        turns.began(turn.task, now)
        now += tasks[turn.task].seconds
        turns.ended(turn.task, now)
        if now <= deadline:
            trained[turn.task] += 1
            row[turn.task] = 0
        else:
            lost(turn.task)
    return trained, longest


@settings(max_examples=150, deadline=None)
@given(st.lists(a_task(), min_size=1, max_size=4))
def test_nobody_is_left_out_for_ever(tasks: list[Rounds]) -> None:
    named = {f"t{place}": each for place, each in enumerate(tasks)}
    longest_period = max(each.period for each in tasks)
    trained, longest = simulate(named, 400 * longest_period)
    for name, each in named.items():
        rounds = 400 * longest_period / each.period
        assert trained[name] > 0
        assert longest[name] < rounds / 4, (named, trained, longest)


@settings(max_examples=100, deadline=None)
@given(a_task())
def test_one_task_alone_never_waits(task: Rounds) -> None:
    trained, longest = simulate({"t": task}, 100 * task.period)
    assert longest["t"] == 0 and trained["t"] >= 98


@settings(max_examples=100, deadline=None)
@given(st.lists(a_task(), min_size=2, max_size=4), st.floats(0.0, 0.04))
def test_tasks_that_need_little_of_the_time_lose_little(tasks: list[Rounds], load: float) -> None:
    """Where any training is short beside every window, deadlines first leaves none out."""
    shortest = min(each.window for each in tasks)
    named = {
        f"t{place}": Rounds(each.period, each.offset, each.window, load * shortest)
        for place, each in enumerate(tasks)
    }
    _, longest = simulate(named, 50 * max(each.period for each in tasks))
    assert set(longest.values()) == {0}


def test_the_earliest_deadline_goes_first_among_those_that_still_fit() -> None:
    hopeless, soon, later = Ready("a", 5, 10), Ready("b", 30, 10), Ready("c", 40, 10)
    names = ("a", "b", "c")
    assert Turns().pick([later, hopeless, soon], 0, names).task == "b"
    assert Turns().pick([hopeless], 0, names).task == "a", "it may be quicker than it was"
    assert Turns().pick([], 0, names).at_seconds == math.inf


def test_who_lost_a_round_is_waited_for_and_then_given_way_to() -> None:
    turns, names = Turns(), ("long", "short")
    turns.began("long", 0)
    assert not turns.missed("long", 5), "for its own training"
    assert turns.missed("short", 5)
    turns.ended("long", 40)
    assert not turns.missed("short", 41), "the device was idle then"
    long = Ready("long", 195, 40)
    assert turns.pick([long], 100, names).at_seconds == 145
    assert turns.pick([long, Ready("short", 125, 1)], 105, names).task == "short"
    assert turns.pick([long], 145, names).task == "long"
    turns.began("long", 145)
    turns.missed("short", 150)
    assert turns.pick([Ready("long", 295, 40)], 245, names).gives_up.startswith("gave way")
    # A task that this device takes no part in any more is waited for by nobody.
    assert turns.pick([Ready("long", 395, 40)], 300, ("long",)).task == "long"
