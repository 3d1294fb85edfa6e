"""A device's standing: its labels, and the tasks that are for devices with such labels.

The aggregator sends it inside a session, after each opening and whenever it changes. Without one a
device goes by its own names: where no task chooses by labels, none is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from device_sdk.fields import Length, Rising, require
from device_sdk.wire.codec.message import Name, Record, Served

MOST_LABELS = 32
MOST_TASKS = 256

Labels = Annotated[Mapping[Name, Annotated[str, Length(1, 64)]], Length(0, MOST_LABELS)]


@dataclass(frozen=True)
class Standing(Record):
    """What a device is told of itself."""

    labels: Labels
    """Its labels: by name a text."""
    tasks: Annotated[tuple[Served, ...], Length(0, MOST_TASKS), Rising()]
    """Those that the device is to take part in."""

    MOST_BYTES = 65_536


def require_labels(labels: Mapping[str, str]) -> None:
    """Raises ValueError, naming the label, for what no device can have."""
    require(Labels, labels, "labels")
