"""What was refused: counted, and logged once for each reason and device."""

from __future__ import annotations

from collections import Counter

from aggregator.events import LogEvent
from aggregator.store.facts import RefusalCounts
from device_sdk.wire.codec.errors import WireError

_MOST_REMEMBERED = 10_000
_USUAL = {"unknown-session": LogEvent.SESSIONS_UNKNOWN}
"""Reasons that nobody need look into."""


class Refusals:
    """Counts since the start in ``counts``; :meth:`save` adds what is new to the store.

    What a sender chose is never logged: a reason is one of our slugs, a device one of our ids.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._unsaved: Counter[str] = Counter()
        self._logged: set[tuple[str, bytes]] = set()

    def note(self, error: WireError, device_id: bytes = b"") -> None:
        """Count ``error``. ``device_id`` is empty while nobody is known to have sent it."""
        self.note_reason(error.reason, device_id, str(error))

    def note_reason(
        self, reason: str, device_id: bytes = b"", detail: str = "", times: int = 1
    ) -> None:
        """Count refusals that are no error."""
        self.counts[reason] += times
        self._unsaved[reason] += times
        key = (reason, device_id)
        # Bounded, since an insider could make up reasons times devices.
        if key in self._logged or len(self._logged) >= _MOST_REMEMBERED:
            return
        self._logged.add(key)
        if reason in _USUAL:
            _USUAL[reason].log()
            return
        who = device_id.hex() if device_id else "an unknown sender"
        LogEvent.REFUSED.log(sender=who, problem=detail or reason, reason=reason)

    def save(self, table: RefusalCounts) -> None:
        """Add to the store what was counted since the last time; in any transaction or none."""
        if self._unsaved:
            table.add(self._unsaved)
            table.when_kept(self._unsaved.clear)
