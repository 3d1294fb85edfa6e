"""What the parts of a task are called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aggregator.rounds.model_parts import ModelParts


def parts(*rungs: tuple[str, int]) -> ModelParts:
    """Of artifacts with these names; a rung's number, 0 for what is none."""
    made: list[Any] = [
        SimpleNamespace(name=name, submodel=SimpleNamespace(rung=rung) if rung else None)
        for name, rung in rungs
    ]
    return ModelParts.of(made)


def test_a_rung_is_told_by_its_name_whether_or_not_others_were_left_out() -> None:
    ladder = parts(("1of8", 1), ("full", 4))
    assert ladder.counts({4: 2, 1: 3}) == {"1of8": 3, "full": 2}
    assert ladder.trained(0) == ""
    assert ladder.trained(2) == "k=2", "of a ladder that was replaced"


def test_an_update_says_more_than_the_report_beside_it() -> None:
    ladder = parts(("1of8", 1), ("full", 2))
    assert ladder.told("full", 1) == "1of8" == ladder.told("", 1) == ladder.told("1of8")
    assert ladder.told("elsewhere") == ladder.told("") == ""
    others = parts(("lenet", 0), ("resnet", 0))
    assert others.told("lenet") == "lenet" and others.told("alexnet") == ""


def test_columns_are_told_by_their_number() -> None:
    assert ModelParts().counts({64: 1, 8: 4}) == {"k=8": 4, "k=64": 1}
    assert ModelParts().told("k=8") == "k=8" and ModelParts().told("k=08") == ""


def test_rungs_whose_names_reports_cut_to_the_same_are_counted_together() -> None:
    alike = parts(("a-long-name-of-width-16", 1), ("a-long-name-of-width-32", 2))
    assert alike.counts({1: 2, 2: 3}) == {"a-long-name-of-w": 5}
