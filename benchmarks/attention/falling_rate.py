"""A learning rate that falls from round to round, for any method that tells devices one."""

from __future__ import annotations

from dataclasses import replace

from aggregator.methods.falling_rate import rate_at
from aggregator.methods.method import Method, RoundSummary
from device_sdk.methods.state import State
from device_sdk.wire.arrays.exchange import Broadcast, Update


class FallingRate(Method):
    """The method, with ``learning_rate`` times decay^(round - 1) in its broadcasts.

    All methods fall alike, so that none is ahead because its last steps are quieter.
    """

    def __init__(self, method: Method, decay: float) -> None:
        self._method = method
        self._decay = decay

    def open_round(self, round_id: int) -> Broadcast:
        """The method's, at this round's rate."""
        opened = self._method.open_round(round_id)
        rate = rate_at(float(opened.settings["learning_rate"]), self._decay, round_id)
        return replace(opened, settings={**opened.settings, "learning_rate": rate})

    def check(self, update: Update) -> None:
        """The method's."""
        self._method.check(update)

    def absorb(self, update: Update) -> None:
        """The method's."""
        self._method.absorb(update)

    def close_round(self) -> RoundSummary:
        """The method's."""
        return self._method.close_round()

    def state(self) -> State:
        """The method's."""
        return self._method.state()

    def restore(self, state: State) -> None:
        """The method's."""
        self._method.restore(state)
