"""What tells a new request from a recorded one: the aggregator's life it is for, and a counter.

24 bytes in clear, under the tag of the request: ``incarnation 16 | counter 8``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated

from device_sdk.fields import Declared, Length, Within
from device_sdk.wire.codec.errors import WireError

INCARNATION_BYTES = 16
_LAYOUT = struct.Struct(f"<{INCARNATION_BYTES}sQ")
FRESHNESS_BYTES = _LAYOUT.size


Incarnation = Annotated[bytes, Length(INCARNATION_BYTES)]
"""A life of the aggregator's process: random bytes."""


@dataclass(frozen=True, slots=True)
class Freshness(Declared):
    """A device's counter rises with each request that it makes, whatever life it is for."""

    incarnation: Incarnation
    counter: Annotated[int, Within(0, 2**64 - 1)]

    def to_bytes(self) -> bytes:
        """24 bytes."""
        return _LAYOUT.pack(self.incarnation, self.counter)

    @classmethod
    def from_bytes(cls, data: bytes, offset: int) -> Freshness:
        """Read 24 bytes at ``offset``."""
        return cls(*_LAYOUT.unpack_from(data, offset))


class FreshnessMarks:
    """The highest counter of each sender that was answered in this life.

    In memory for as long as the process lives, and no longer: the next one has another incarnation.
    A mark is made for what was proven alone, so there are as many as senders at most.
    """

    def __init__(self, incarnation: bytes) -> None:
        self._incarnation = incarnation
        self._highest: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._highest)

    def require_this_life(self, freshness: Freshness) -> None:
        """Raises ``WireError("old-incarnation")`` for a request made for another life."""
        if freshness.incarnation != self._incarnation:
            raise WireError("old-incarnation", "made for another life of the aggregator")

    def is_new(self, sender: bytes, freshness: Freshness) -> bool:
        """Whether the counter is above the sender's mark."""
        return freshness.counter > self._highest.get(sender, 0)

    def raise_to(self, sender: bytes, freshness: Freshness) -> None:
        """The sender's request is answered."""
        self._highest[sender] = freshness.counter

    def forget(self, sender: bytes) -> None:
        """The sender is gone for good."""
        self._highest.pop(sender, None)
