"""Settings that broadcasts carry, of every method alike."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.fields import Fields, Within
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.mutual.contract import MutualTraining
from device_sdk.methods.prototypes.contract import PrototypesTraining
from device_sdk.methods.scatter.contract import BprTraining, LeastSquaresTraining
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining
from device_sdk.wire.arrays.exchange import Broadcast

EACH = [
    AttentionTraining(neighbours=3, proximal=0.5),
    FedAvgTraining(epochs=4, personal="head"),
    MutualTraining(classes=10, public_steps=2),
    PrototypesTraining(classes=7, width=3, pull=0.5),
    BprTraining(scores="columns", user_l2=0.25),
    LeastSquaresTraining(),
    TeacherLogitsTraining(classes=7, divergence=False),
]


@pytest.mark.parametrize("settings", EACH, ids=lambda one: type(one).__name__)
def test_settings_come_back_from_a_broadcast_that_carries_more(settings) -> None:  # type: ignore[no-untyped-def]
    scalars = settings.as_scalars()
    carried = Broadcast(1, 0, {}, {**scalars, "other": 3}).settings
    assert type(settings).from_scalars(carried) == settings
    for name in scalars:
        lacking = {key: value for key, value in scalars.items() if key != name}
        lacks = f"lacks the training settings {name}$|the broadcast's {name} is None"
        if name in settings.LATER:
            assert type(settings).from_scalars(lacking) == settings
        else:
            with pytest.raises(ValueError, match=lacks):
                type(settings).from_scalars(lacking)
        with pytest.raises(ValueError, match=name):
            type(settings).from_scalars({**scalars, name: float("nan")})


BAD: dict[type, dict[str, list[object]]] = {
    AttentionTraining: {
        "warm_up_rounds": [-1],
        "base_steps": [0],
        "batch_size": [1.5],
        "learning_rate": [0.0, math.nan],
        "meta_learning_rate": [-0.1],
        "proximal": [math.inf],
        "own_weight": [-1.0],
        "layers": ["third"],
        "neighbours": [True],
        "folds": [1],
        "meta_every": [0],
        "sketch_rows": [12],
        "sketch_seed": [2**63],
        "mix": [1],
        "keeps": ["head"],
    },
    TeacherLogitsTraining: {
        "classes": [1, 2.0, 5000],
        "epochs": [0],
        "batch_size": [True],
        "most_steps": [-1],
        "learning_rate": [math.nan, -1.0],
        "alpha": [1.5],
        "divergence": [1],
        "l2": [-1.0],
        "weights": ["labels"],
        "normalise": ["no"],
        "least_teacher": [0.0, 0.6],
        "precision": ["fp16"],
        "top_classes": [-1],
        "least_confidence": [1.1],
        "most_confidence": [-0.1],
        "most_samples": [0],
    },
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in BAD for name in BAD[kind]])
def test_values_outside_their_range_are_refused_by_name(kind: Any, name: str) -> None:
    (usual,) = (one for one in EACH if type(one) is kind)
    for value in BAD[kind][name]:
        with pytest.raises(ValueError, match=name):
            replace(usual, **{name: value})


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (AttentionTraining, {"include_self": True, "own_weight": 1.0}, "exclude each other"),
        (AttentionTraining, {"personal": True}, "proximal pull"),
        (TeacherLogitsTraining, {"beta": 0.6}, r"alpha \+ beta"),
        (
            TeacherLogitsTraining,
            {"least_confidence": 0.9, "most_confidence": 0.5},
            "exceeds most_confidence",
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused(kind: Any, values: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**({"classes": 2} if kind is TeacherLogitsTraining else {}), **values)


def test_the_divergence_takes_what_the_two_losses_leave() -> None:
    assert TeacherLogitsTraining(2, alpha=0.5, beta=0.2).gamma == pytest.approx(0.3)
    assert TeacherLogitsTraining(2, alpha=0.5, beta=0.2, divergence=False).gamma == 0
    assert TeacherLogitsTraining(2, alpha=0.9, beta=0.1).gamma == 0


@given(st.one_of(st.integers(), st.booleans(), st.floats(), st.text(), st.none()))
def test_values_outside_their_range_are_named(value: object) -> None:
    def refused(hint: object) -> bool:
        try:
            Fields({"setting": value}).declared("setting", hint)
        except ValueError as error:
            assert "setting is " in str(error) and "expected " in str(error)
            return True
        return False

    whole = type(value) is int
    assert refused(Annotated[int, Within(2, 9)]) == (not (whole and 2 <= value <= 9))  # type: ignore[operator]
    assert refused(Annotated[int, Within(2)]) == (not (whole and value >= 2))  # type: ignore[operator]
    number = type(value) in (int, float)
    assert refused(Annotated[float, Within(0, 1)]) == (not (number and 0 <= value <= 1))  # type: ignore[operator]
    strictly = number and 0 < value <= 1  # type: ignore[operator]
    assert refused(Annotated[float, Within(0, 1, above=True)]) == (not strictly)
    below = number and 0 <= value < 1  # type: ignore[operator]
    assert refused(Annotated[float, Within(0, 1, below=True)]) == (not below)
    multiple = number and (value == 0 or 1 <= value <= 9)  # type: ignore[operator]
    assert refused(Annotated[float, Within(1, 9, or_zero=True)]) == (not multiple)
    assert refused(Literal["a", "b"]) == (value not in ("a", "b"))
    assert refused(bool) == (type(value) is not bool)
    assert refused(str) == (type(value) is not str)
    assert refused(float) == (not number or not math.isfinite(value))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("within", "words"),
    [
        (Within(), "a number"),
        (Within(2, 4096), "a number from 2 to 4,096"),
        (Within(1, or_zero=True), "0 or a number of at least 1"),
        (Within(0, 1, above=True), "a number above 0 and at most 1"),
        (Within(0, 1, below=True), "a number of at least 0 and below 1"),
        (Within(most=1e12), "a number at most 1e+12"),
    ],
)
def test_bounds_are_said_in_words(within: Within, words: str) -> None:
    assert within.words("a number") == words


def test_a_map_says_what_it_lacks_what_is_too_much_and_where() -> None:
    found = Fields({"a": 1, "b": "x"}, "place")
    assert found.integer("a", Within(0, 1)) == 1
    with pytest.raises(ValueError, match=r"^place.c is missing$"):
        found.text("c")
    with pytest.raises(ValueError, match=r"^place.b is unknown here; known are: a, c$"):
        found.end()
    assert found.text("b", 1) == "x"
    found.end()
    with pytest.raises(ValueError, match=r"^place.b is 'x'; expected a text of at most 0 bytes$"):
        found.text("b", 0)
    with pytest.raises(ValueError, match=r"^place.a is 1; expected a list, each anything$"):
        found.array("a")
