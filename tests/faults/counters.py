"""Numbers in a file that several processes map: what was counted outlives a kill -9."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from pathlib import Path

NAMES = (
    "clock_offset_millis",  # added to the aggregator's calendar clock
    "commits",  # updates committed by devices
    "sends",  # envelopes with updates that devices handed to their links
    "arrivals",  # updates that came out of their envelopes at the aggregator
    "repeats",  # of these, the ones that had their verdict before
    "replays",  # envelopes whose sequence number had come before
    "oldest_micros",  # when the oldest update came that a worker has and did not commit, or 0
    "nonces",  # AEAD calls that sealed
    "nonces_reused",  # of these, with a key and nonce used before
)
_SLOT = struct.Struct("<q")


class Counters:
    """64-bit integers by name. Each name has one writing process at a time.

    A page that was written to belongs to the kernel: it survives its process, not a power cut.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, len(NAMES) * _SLOT.size)
            self._map = mmap.mmap(descriptor, len(NAMES) * _SLOT.size)
        finally:
            os.close(descriptor)
        self._lock = threading.Lock()

    def read(self, name: str) -> int:
        """The number now."""
        return int(_SLOT.unpack_from(self._map, NAMES.index(name) * _SLOT.size)[0])

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a number; from any thread."""
        place = NAMES.index(name) * _SLOT.size
        with self._lock:
            _SLOT.pack_into(self._map, place, _SLOT.unpack_from(self._map, place)[0] + amount)

    def put(self, name: str, value: int) -> None:
        """Set a number; from any thread."""
        with self._lock:
            _SLOT.pack_into(self._map, NAMES.index(name) * _SLOT.size, value)

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
