"""How long the next round collects, and who was late for the last ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.rounds.machine import LAST_ROUNDS, LateArrivals, deadline_seconds
from aggregator.tables import TomlTable
from aggregator.task.file import RoundSettings

MOST_LATE = 20_000


def settings(**lines: object) -> RoundSettings:
    table = {"deadline_seconds": 100.0, "least_deadline_seconds": 7.0, **lines}
    return RoundSettings.read(TomlTable(table))


ADAPTIVE = settings(adaptive_deadline=True, deadline_margin=2.0)
TIMES = np.linspace(0, 20, 101, dtype=np.float32)


def test_the_configured_one_holds_where_nothing_else_is_known() -> None:
    none = np.zeros(0, np.float32)
    assert deadline_seconds(settings(), [TIMES]) == 100.0
    assert deadline_seconds(ADAPTIVE, []) == 100.0
    assert deadline_seconds(ADAPTIVE, [none, none]) == 100.0
    # Beyond the last five rounds nothing is known.
    assert deadline_seconds(ADAPTIVE, [none] * LAST_ROUNDS + [TIMES]) == 100.0
    assert deadline_seconds(ADAPTIVE, [none] * (LAST_ROUNDS - 1) + [TIMES]) == pytest.approx(36.0)


def test_one_arrival_is_enough() -> None:
    assert deadline_seconds(ADAPTIVE, [np.array([8.0], np.float32)]) == 16.0


def test_it_is_nine_tenths_of_the_arrivals_times_the_margin_within_the_bounds() -> None:
    assert deadline_seconds(ADAPTIVE, [TIMES]) == pytest.approx(36.0)
    assert deadline_seconds(ADAPTIVE, [TIMES, TIMES * 2]) == pytest.approx(
        2.0 * float(np.quantile(np.concatenate([TIMES, TIMES * 2]), 0.9))
    )
    assert deadline_seconds(ADAPTIVE, [TIMES * 50]) == 100.0
    assert deadline_seconds(ADAPTIVE, [TIMES * 0]) == 7.0


def test_one_arrival_counts_for_no_more_than_the_configured_time() -> None:
    half = settings(adaptive_deadline=True, deadline_margin=1.0)
    # The 90th percentile lies between 10 s and one that came after 1e6 s: capped, it is near 100.
    times = np.array([10.0] * 9 + [1e6], np.float32)
    assert deadline_seconds(half, [times]) == pytest.approx(19.0)


@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 5), st.floats(0.0, 1e6)), max_size=60
    )
)
def test_each_device_is_late_once_a_round_and_only_in_the_last_rounds(
    arrivals: list[tuple[int, int, float]],
) -> None:
    late, first = LateArrivals(), dict[tuple[int, int], float]()
    newest = 0
    for number, place, seconds in arrivals:
        if number > newest:
            newest = number
            late.round_opens(number)
        late.note(number, bytes([place]), seconds)
        if number >= newest - LAST_ROUNDS:
            first.setdefault((number, place), seconds)
    wanted = [s for (number, _), s in first.items() if number >= newest - LAST_ROUNDS]
    assert sorted(late.seconds()) == pytest.approx(sorted(wanted))
    assert late.seconds().dtype == np.float32


def test_a_round_remembers_so_many_late_devices_and_no_more() -> None:
    late = LateArrivals()
    late.round_opens(2)
    for number in range(MOST_LATE + 10):
        late.note(1, number.to_bytes(4, "big"), 1.0)
    late.note(1, bytes(4), 9.0)  # came before: the first time stands
    late.note(2, bytes(4), 3.0)  # another round has room of its own
    seconds = late.seconds()
    assert len(seconds) == MOST_LATE + 1 and sorted(set(seconds.tolist())) == [1.0, 3.0]


def test_before_any_round_opened_all_are_taken() -> None:
    late = LateArrivals()
    late.note(0, b"a", 1.5)
    assert late.seconds().tolist() == [1.5]


def test_the_sixth_round_before_the_open_one_is_forgotten() -> None:
    late = LateArrivals()
    for number in range(1, 8):
        late.note(number, b"a", float(number))
    late.round_opens(7)
    assert late.seconds().tolist() == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    late.note(1, b"b", 1.0)
    late.note(2, b"b", 2.5)
    assert sorted(late.seconds()) == [2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0]
