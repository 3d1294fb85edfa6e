"""A device's standing: its labels, and the tasks that are for devices with such labels.

The aggregator sends it inside a session, after each opening and whenever it changes. Without one a
device goes by its own names: where no task chooses by labels, none is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import MOST_NAME_BYTES, Record, read_name, require_name

MOST_LABELS = 32
MOST_LABEL_BYTES = 64
MOST_TASKS = 256
_MOST_BYTES = 65_536
"""Room for the most labels and tasks of the longest names."""


@dataclass(frozen=True)
class Standing:
    """Raises ValueError, naming what is wrong."""

    labels: Mapping[str, str]
    """By name (1 to 64 of a-z 0-9 . _ -) a text of 1 to 64 bytes; at most 32."""
    tasks: tuple[tuple[str, str], ...]
    """Task and cohort of each that the device is to take part in, rising; at most 256."""

    def __post_init__(self) -> None:
        require_labels(self.labels)
        if len(self.tasks) > MOST_TASKS:
            raise ValueError(f"{len(self.tasks)} tasks; at most {MOST_TASKS} are told")
        for task, cohort in self.tasks:
            require_name("task", task)
            require_name("cohort", cohort)
        if any(after <= before for before, after in pairwise(self.tasks)):
            raise ValueError("tasks must be in rising order, each once")


def require_labels(labels: Mapping[str, str]) -> None:
    """Raises ValueError, naming the label, for what no device can have."""
    if len(labels) > MOST_LABELS:
        raise ValueError(f"{len(labels)} labels; a device has at most {MOST_LABELS}")
    for name, value in labels.items():
        require_name("label", name)
        if not isinstance(value, str) or not 1 <= len(value.encode()) <= MOST_LABEL_BYTES:
            raise ValueError(f"label {name} is {value!r:.80}; expected a text of 1 to 64 bytes")


def write_standing(standing: Standing) -> bytes:
    """Canonical CBOR of {labels, tasks}."""
    return cbor.encode(
        {
            "labels": dict(standing.labels),
            "tasks": [{"task": task, "cohort": cohort} for task, cohort in standing.tasks],
        }
    )


def read_standing(payload: bytes) -> Standing:
    """Parse a standing. Raises ``WireError``."""
    record = Record(cbor.decode(payload, limit_bytes=_MOST_BYTES), ("labels", "tasks"))
    labels = record.take("labels")
    if not isinstance(labels, dict):
        raise WireError("bad-field", "labels is no map")
    tasks = tuple(_task(each) for each in record.array("tasks", MOST_TASKS))
    try:
        return Standing(labels, tasks)
    except (ValueError, AttributeError):
        raise WireError("bad-field", "labels or tasks that are none, or not in order") from None


def _task(entry: cbor.CborValue) -> tuple[str, str]:
    record = Record(entry, ("task", "cohort"))
    task, cohort = (
        read_name(what, record.text(what, MOST_NAME_BYTES).encode()) for what in ("task", "cohort")
    )
    return task, cohort
