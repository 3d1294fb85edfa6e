"""Devices as tables and lines name them."""

from __future__ import annotations

from collections.abc import Sequence

from aggregator.store.devices import DeviceRow
from device_sdk.system.printable import printable

CLASH_SHOWN_SECONDS = 86_400
"""For so long it is shown that two machines had one device's identity."""
_DIGITS = 12
_MOST_NAMED = 8


def short_id(row: DeviceRow) -> str:
    """The first digits of a device's id, by which commands know it."""
    return row.device_id.hex()[:_DIGITS]


def called(row: DeviceRow) -> str:
    """Its name, or the first digits of its id."""
    return printable(row.name) if row.name else short_id(row)


def called_all(rows: Sequence[DeviceRow]) -> str:
    """Such as "hall-1, 3f2a11c09b72 and 4 more"."""
    more = len(rows) - _MOST_NAMED
    named = ", ".join(map(called, rows[:_MOST_NAMED]))
    return f"{named} and {more} more" if more > 0 else named
