"""A learning rate of the devices that falls from round to round."""

from __future__ import annotations

from typing import Annotated

from device_sdk.fields import Within

RateDecay = Annotated[float, Within(0, 1, above=True)]
"""A round's factor."""
_LEAST = 1e-9
"""Never quite 0, which devices refuse or take for the artifact's own."""


def rate_at(learning_rate: float, rate_decay: float, round_id: int) -> float:
    """``learning_rate`` as it is in round ``round_id``, counted from 1."""
    return max(_LEAST, learning_rate * rate_decay ** (round_id - 1))
