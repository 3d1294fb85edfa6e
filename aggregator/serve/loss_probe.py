"""Notices a broker that acknowledges messages and does not deliver them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from device_sdk.link.events import Delivery, Outcome
from device_sdk.wire.seal.admission import Clock

_EVERY_SECONDS = 5.0
_PATIENCE_SECONDS = 20.0
_NUMBER_BYTES = 8
_MOST_WAITING = 16


@dataclass(frozen=True, slots=True)
class _Sent:
    number: bytes
    delivery: Delivery
    at_seconds: float


class LossProbe:
    """Sends a message to itself every five seconds, and watches which come.

    ``send`` publishes at QoS 1, over another connection than the one that it comes back on: what
    the broker acknowledges there tells of this one's queue alone. ``nonce``: tells this process'
    messages from others'.

    A message is lost when the broker acknowledged it and either a later one came, since brokers
    keep the order between two connections, or it did not come within twenty seconds in which we
    were never behind with what did. Who is only slow loses nothing. Nothing is judged before one
    came back: the broker's rules may not allow it.
    """

    def __init__(
        self, send: Callable[[bytes], Delivery | None], nonce: bytes, clock: Clock
    ) -> None:
        self._send = send
        self._nonce = nonce
        self._clock = clock
        self._next_number = 0
        self._next_seconds = clock()
        self._waiting: deque[_Sent] = deque(maxlen=_MOST_WAITING)
        self._behind_at_seconds = clock()
        self._proven = False
        self.lost = 0
        """Messages acknowledged and not delivered, since the start."""

    def interrupted(self) -> None:
        """One of the two connections ended: what was under way proves nothing any more."""
        self._waiting.clear()

    def turn(self, behind: bool) -> None:
        """To be called often, while both connections stand.

        ``behind``: whether more has come than was taken so far.
        """
        now = self._clock()
        if behind:
            self._behind_at_seconds = now
        elif now - self._behind_at_seconds >= _PATIENCE_SECONDS:
            while self._waiting and now - self._waiting[0].at_seconds >= _PATIENCE_SECONDS:
                self._judge(self._waiting.popleft())
        if now < self._next_seconds:
            return
        self._next_seconds = now + _EVERY_SECONDS
        number = self._next_number.to_bytes(_NUMBER_BYTES, "big")
        self._next_number += 1
        delivery = self._send(self._nonce + number)
        if delivery is not None:
            self._waiting.append(_Sent(number, delivery, now))

    def came(self, payload: bytes) -> None:
        """A message came on the probe's topic."""
        number = payload[len(self._nonce) :]
        if payload[: len(self._nonce)] != self._nonce:
            return  # another process', or made up
        if number not in [sent.number for sent in self._waiting]:
            return  # a repetition
        while (sent := self._waiting.popleft()).number != number:
            self._judge(sent)
        self._proven = True

    def _judge(self, sent: _Sent) -> None:
        if self._proven and sent.delivery.outcome is Outcome.ACKNOWLEDGED:
            self.lost += 1
