"""Links with short times, for tests, and a way to wait for one kind of event."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from device_sdk.link import LinkSettings
from device_sdk.link.events import Event
from device_sdk.link.link import Link
from tests.fakes.waiting import PATIENCE_SECONDS

QUICK = LinkSettings(backoff_first_seconds=0.02, backoff_most_seconds=0.1)
"""Soon there again, and as patient with a broker as the product is: it may be on a busy machine."""
SUSPICIOUS = replace(
    QUICK,
    keepalive_seconds=1,
    stall_seconds=0.5,
    connect_timeout_seconds=1,
    version_probe_seconds=0.3,
)
"""For brokers that fall silent: they are given up at once, a slow one too."""
EventKind = TypeVar("EventKind", bound=Event)
MakeLink = Callable[..., Link]


def await_event(link: Link, kind: type[EventKind]) -> EventKind:
    """The next event of this kind; others before it are dropped."""
    until = time.monotonic() + PATIENCE_SECONDS
    seen: list[Event] = []
    while (left := until - time.monotonic()) > 0:
        for event in link.events(most=1, timeout_seconds=left):
            if isinstance(event, kind):
                return event
            seen.append(event)
    raise AssertionError(f"no {kind.__name__} within {PATIENCE_SECONDS} s; saw {seen}")
