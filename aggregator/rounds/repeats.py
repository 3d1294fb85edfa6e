"""How often one device may ask for what was decided before."""

from __future__ import annotations

from collections.abc import Callable

from device_sdk.wire.seal.admission import TokenBuckets

__all__ = ["Repeats"]

_BURST = 64.0
_PER_SECOND = 1.0


class Repeats:
    """Answers that cost work and change nothing, bounded for each device.

    A device whose receipts are lost sends its updates again, with growing waits, and is answered
    each time. One that goes on beyond ``_BURST`` answers and one a second is not heard for a
    while: :meth:`exhausted` is asked before a message is decrypted. Only what a session's envelope
    proved to be a device's own is charged to it, so nobody can silence another.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._buckets = TokenBuckets(_BURST, _PER_SECOND, clock)

    def exhausted(self, device_id: bytes) -> bool:
        """Whether the device has to wait before it is heard again."""
        return self._buckets.is_empty(device_id)

    def answered(self, device_id: bytes) -> bool:
        """An update of the device was answered, or refused, without being new.

        Whether that was the last answer for a while.
        """
        if not self.exhausted(device_id):
            self._buckets.take(device_id)
        return self.exhausted(device_id)
