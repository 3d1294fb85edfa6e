"""A learning rate of the devices that falls from round to round."""

from __future__ import annotations

_LEAST = 1e-9
"""Never quite 0, which devices refuse or take for the artifact's own."""


def require_decay(rate_decay: float) -> None:
    """Raises ValueError unless ``rate_decay``, a round's factor, is above 0 and at most 1."""
    if not 0 < rate_decay <= 1:
        raise ValueError(f"rate_decay is {rate_decay}; expected above 0, at most 1")


def rate_at(learning_rate: float, rate_decay: float, round_id: int) -> float:
    """``learning_rate`` as it is in round ``round_id``, counted from 1."""
    return max(_LEAST, learning_rate * rate_decay ** (round_id - 1))
