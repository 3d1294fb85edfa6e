"""The window that refuses a sequence number seen before."""

from __future__ import annotations

from device_sdk.wire.codec.errors import WireError

WINDOW = 1024


class ReplayWindow:
    """Remembers which of the last 1,024 sequence numbers came (RFC 6479's idea, one big integer).

    Bit i of the mask stands for ``highest - i``. Ask only after the tag was found right: else a
    forged message with a huge number would push every honest one out of the window.
    """

    def __init__(self) -> None:
        self._highest = -1
        self._mask = 0

    def accept(self, sequence: int) -> None:
        """Mark ``sequence`` (0 or above) as seen.

        Raises ``WireError``: ``replayed`` when it was seen before, ``too-old`` when it lies 1,024
        or more below the highest seen, so that nobody can tell.
        """
        age = self._highest - sequence
        if age < 0:
            # A mask that was far left behind holds nothing: shifting it by the gap would first
            # build an integer as wide as the gap.
            self._mask = 1 if -age >= WINDOW else (self._mask << -age | 1) & (1 << WINDOW) - 1
            self._highest = sequence
        elif age >= WINDOW:
            raise WireError("too-old", f"sequence number {age} below the highest seen")
        elif self._mask >> age & 1:
            raise WireError("replayed", "this sequence number came before")
        else:
            self._mask |= 1 << age
