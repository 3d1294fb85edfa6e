"""Exponential back-off with full jitter, so that a fleet does not return in step."""

from __future__ import annotations

import numpy as np


class Backoff:
    """Waits of uniform(c / 10, c) seconds; c starts at ``first_seconds`` and doubles at each try.

    Raises ValueError unless 0 < ``first_seconds`` <= ``most_seconds``.
    """

    def __init__(
        self, rng: np.random.Generator, *, first_seconds: float, most_seconds: float
    ) -> None:
        if not 0 < first_seconds <= most_seconds:
            raise ValueError(
                f"back-off from {first_seconds} to {most_seconds} seconds; "
                "expected 0 < first <= most"
            )
        self._rng = rng
        self._first_seconds = first_seconds
        self._most_seconds = most_seconds
        self._tries = 0

    def next_seconds(self) -> float:
        """How long to wait before the next try."""
        # 2^64 tries never come; the cap keeps the power from overflowing a float.
        ceiling = min(self._most_seconds, self._first_seconds * 2.0 ** min(self._tries, 64))
        self._tries += 1
        return float(self._rng.uniform(ceiling / 10, ceiling))

    def reset(self) -> None:
        """Start from the first wait again: the last try went well."""
        self._tries = 0
