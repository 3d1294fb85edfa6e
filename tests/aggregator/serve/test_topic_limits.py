from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aggregator.serve.broker_links import (
    DEVICE_LIMIT,
    ENROLMENT_LIMIT,
    NEWCOMER_LIMIT,
    OTHER_LIMIT,
    Limit,
    TopicLimits,
    enrolment_limits,
)

OWNERS = {b"up/a": b"anna", b"up/b": b"bert"}


class Clock:
    def __init__(self) -> None:
        self.now_seconds = 100.0

    def __call__(self) -> float:
        return self.now_seconds


def limits(clock: Clock) -> TopicLimits:
    return TopicLimits(OWNERS.get, Limit(8, 4), Limit(3, 2), clock)


def test_one_topics_flood_takes_nothing_from_another() -> None:
    clock = Clock()
    made = limits(clock)
    assert sum(made.admits(b"up/a") for _ in range(10_000)) == 8
    assert sum(made.admits(b"up/%d" % number) for number in range(10_000)) == 3  # all made up
    assert all(made.admits(b"up/b") for _ in range(8))
    assert made.take_refused() == {b"anna": 9_992, b"": 9_997}
    assert made.take_refused() == {}
    clock.now_seconds += 1
    assert sum(made.admits(b"up/a") for _ in range(100)) == 4


def test_a_topic_of_nobody_s_has_a_small_part_of_what_there_is_for_all() -> None:
    clock = Clock()
    made = TopicLimits(OWNERS.get, Limit(8, 4), Limit(4096, 2048), clock)
    assert sum(made.admits(b"up/loud") for _ in range(10_000)) == OTHER_LIMIT.burst
    for begin in range(0, 40_000, 4000):
        assert all(made.admits(b"up/%d" % number) for number in range(begin, begin + 4000))
        clock.now_seconds += 10.0
    assert sum(made.admits(b"up/loud") for _ in range(10_000)) == OTHER_LIMIT.burst
    assert len(made._each_other) < 10_000, "those that were quiet are forgotten"


def test_a_fleet_that_enrols_at_once_has_all_that_there_is_for_enrolments() -> None:
    clock = Clock()
    made = enrolment_limits(clock)
    assert sum(made.admits(b"enrol/request") for _ in range(10_000)) == ENROLMENT_LIMIT.burst
    clock.now_seconds += 1.0
    assert sum(made.admits(b"enrol/request") for _ in range(1000)) == ENROLMENT_LIMIT.per_second


def test_a_flood_of_made_up_topics_costs_those_who_are_not_known_and_nobody_else() -> None:
    clock, rng = Clock(), np.random.default_rng(1)
    made = TopicLimits(OWNERS.get, DEVICE_LIMIT, NEWCOMER_LIMIT, clock)
    flood, strangers, known = 20_000, 0, 0
    for number in range(80_000):  # four seconds, of which the first uses up the burst
        clock.now_seconds += rng.exponential(1 / flood)
        made.admits(b"up/made up %d" % number)
        if number >= flood and number % 100 == 0:
            clock.now_seconds += rng.exponential(1 / flood)
            strangers += made.admits(b"up/honest %d" % number)
            known += number % 1000 == 0 and made.admits(b"up/b")
    assert 0.07 <= strangers / 600 <= 0.14
    assert known == 60


def test_a_flood_asks_once_a_token_who_a_topic_belongs_to() -> None:
    clock, asked = Clock(), list[bytes]()

    def owner_of(topic: bytes) -> bytes | None:
        asked.append(topic)
        return OWNERS.get(topic)

    made = TopicLimits(owner_of, Limit(8, 4), Limit(3, 2), clock)
    for _ in range(10_000):
        made.admits(b"up/a")
    assert len(asked) == 8 + 1
    for _ in range(3):
        clock.now_seconds += 0.25  # one token's time
        assert made.admits(b"up/a") and not made.admits(b"up/a")
        asked.clear()
        assert not any(made.admits(b"up/a") for _ in range(100)) and asked == []
        assert made.admits(b"up/b")


def test_when_we_are_behind_a_topic_that_has_messages_waiting_stands_back() -> None:
    behind: set[bytes] = set()
    made = TopicLimits(OWNERS.get, Limit(8, 4), Limit(3, 2), Clock(), behind.__contains__)
    assert made.admits(b"up/a")
    behind.add(b"up/a")
    assert not made.admits(b"up/a") and made.admits(b"up/b")
    assert made.take_refused() == {b"anna": 1}


@given(
    st.lists(
        st.tuples(st.sampled_from([*OWNERS, b"up/c", b"up/d"]), st.floats(0, 0.5)), max_size=80
    )
)
def test_no_more_than_the_burst_and_the_rate_are_ever_admitted(
    steps: list[tuple[bytes, float]],
) -> None:
    clock = Clock()
    made = limits(clock)
    began, admitted, asked = clock(), Counter[bytes](), Counter[bytes]()
    for topic, pause_seconds in steps:
        clock.now_seconds += pause_seconds
        owner = OWNERS.get(topic, b"")
        asked[owner] += 1
        admitted[owner] += made.admits(topic)
        burst, rate = (8, 4) if owner else (3, 2)
        assert admitted[owner] <= burst + rate * (clock() - began) + 1e-6
        assert admitted[owner] >= min(asked[owner], burst)
    assert made.take_refused() == asked - admitted
