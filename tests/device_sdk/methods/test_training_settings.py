"""Settings that broadcasts carry, of every method alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.mutual.contract import MutualTraining
from device_sdk.methods.scatter.contract import ScatterTraining
from device_sdk.methods.settings import require_choice, require_number, require_whole
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining
from device_sdk.wire.arrays.exchange import Broadcast

EACH = [
    AttentionTraining(neighbours=3, proximal=0.5),
    FedAvgTraining(epochs=4, personal="head"),
    MutualTraining(classes=10, public_steps=2),
    ScatterTraining(scores="columns", user_l2=0.25),
    TeacherLogitsTraining(classes=7, divergence=False),
]


@pytest.mark.parametrize("settings", EACH, ids=lambda one: type(one).__name__)
def test_settings_come_back_from_a_broadcast_that_carries_more(settings) -> None:  # type: ignore[no-untyped-def]
    scalars = settings.as_scalars()
    carried = Broadcast(1, 0, {}, {**scalars, "other": 3}).settings
    assert type(settings).from_scalars(carried) == settings
    for name in scalars:
        lacking = {key: value for key, value in scalars.items() if key != name}
        with pytest.raises(ValueError, match=f"lacks the training settings {name}$"):
            type(settings).from_scalars(lacking)
        with pytest.raises(ValueError, match=name):
            type(settings).from_scalars({**scalars, name: float("nan")})


@given(st.one_of(st.integers(), st.booleans(), st.floats(), st.text(), st.none()))
def test_values_outside_their_range_are_named(value: object) -> None:
    def refused(check, *bounds: object, **more: bool) -> bool:  # type: ignore[no-untyped-def]
        try:
            check("setting", value, *bounds, **more)
        except ValueError as error:
            assert "setting is " in str(error) and "expected " in str(error)
            return True
        return False

    whole = type(value) is int
    assert refused(require_whole, 2, 9) == (not (whole and 2 <= value <= 9))  # type: ignore[operator]
    assert refused(require_whole, 2) == (not (whole and value >= 2))  # type: ignore[operator]
    number = type(value) in (int, float)
    assert refused(require_number, 0, 1) == (not (number and 0 <= value <= 1))  # type: ignore[operator]
    strictly = number and 0 < value <= 1  # type: ignore[operator]
    assert refused(require_number, 0, 1, above=True) == (not strictly)
    assert refused(require_choice, ("a", "b")) == (value not in ("a", "b"))
