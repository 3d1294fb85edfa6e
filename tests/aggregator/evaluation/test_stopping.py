"""Early stopping: after so many rounds that brought nothing, and never by mistake before."""

from __future__ import annotations

import pytest

from aggregator.evaluation import Evaluated, stalled_since


def stalled(values: list[float], most: int = 3, least: float = 0.0, higher: bool = True) -> object:
    history = [Evaluated(place, place + 1, value) for place, value in enumerate(values)]
    found = stalled_since(
        history, higher_is_better=higher, most_rounds=most, least_improvement=least
    )
    return None if found is None else found.version


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([0.5], None),
        ([0.1, 0.2, 0.3, 0.4, 0.5], None),
        ([0.5, 0.4, 0.4], None),
        ([0.5, 0.4, 0.4, 0.4], 0),
        ([0.1, 0.5, 0.4, 0.5, 0.4], 1),  # as good is not better
        ([0.1, 0.5, 0.4, 0.4, 0.6], None),
        # It was let go on, and improved: a stop of before counts no more.
        ([0.5, 0.4, 0.4, 0.4, 0.4, 0.6], None),
    ],
)
def test_rounds_without_improvement(values: list[float], expected: int | None) -> None:
    assert stalled(values) == expected


def test_of_a_loss_less_is_better() -> None:
    assert stalled([5.0, 4.0, 3.0, 2.0], higher=False) is None
    assert stalled([2.0, 3.0, 4.0, 5.0], higher=False) == 0


def test_small_gains_are_none_until_they_have_added_up() -> None:
    creeping = [0.50, 0.504, 0.508, 0.512, 0.516]
    assert stalled(creeping, least=0.01) is None  # 0.512 is an improvement of 0.012
    assert stalled(creeping, least=0.1) == 0
    assert stalled([0.5, 0.75, 0.75], most=1, least=0.25) == 1  # at least so much


def test_rounds_that_evaluated_nothing_pass_as_well() -> None:
    history = [Evaluated(1, 10, 0.5), Evaluated(2, 20, 0.4)]
    for most, expected in ((10, history[0]), (11, None)):
        found = stalled_since(
            history, higher_is_better=True, most_rounds=most, least_improvement=0.0
        )
        assert found == expected
