"""What is logged: refused input, once for each reason and device; which task a line is about."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from aggregator.store.facts import RefusalCounts
from device_sdk.wire.codec.errors import WireError

_LOG = logging.getLogger(__name__)
_MOST_REMEMBERED = 10_000
_USUAL = {
    "unknown-session": "devices went on with sessions that are not open here, as after each start "
    "of serve: they are told, and open new ones (logged once)"
}
"""Reasons that nobody need look into: what happened, and what comes of it."""


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
            _LOG.info(_USUAL[reason])
            return
        who = device_id.hex() if device_id else "an unknown sender"
        _LOG.warning("refused from %s: %s (logged once)", who, detail or reason)

    def save(self, table: RefusalCounts) -> None:
        """Add to the store what was counted since the last time; in any transaction or none."""
        if self._unsaved:
            table.add(self._unsaved)
            table.when_kept(self._unsaved.clear)


# Which task a log line is about: it is named in front of the line.

_TASK = ContextVar("task", default="")


@contextmanager
def about(task: str) -> Iterator[None]:
    """What is logged meanwhile, by whatever part, is about this task; empty: about none."""
    token = _TASK.set(task)
    try:
        yield
    finally:
        _TASK.reset(token)


def add_task(record: logging.LogRecord) -> bool:
    """A filter of handlers whose formatters begin the message with ``%(task)s``."""
    task = _TASK.get()
    record.task = f"{task}: " if task else ""
    return True
