"""What a device process tells the demo: lines of JSON in a file of its own, never over MQTT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeAlias


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A device has its identity and its users' data."""

    device: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A device, made ``slowdown`` times slower, timed its own training and picked ``k``.

    ``p90_seconds``: what a round took at that k, emulated slowness included.
    """

    device: str
    capacity: str
    slowdown: float
    k: int
    p90_seconds: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class RoundQuality:
    """Sums over a device's ``users``, with the vectors that it would recommend from now.

    ``full_hits`` and ``full_gain``: of HR@10 and NDCG@10 among all items that the user did not
    train on; ``hits`` and ``gain``: among 99 negatives.
    """

    device: str
    capacity: str
    round: int
    k: int
    users: int
    full_hits: int
    full_gain: float
    hits: int
    gain: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A device's own account at the end, of the rounds after the one in which it was timed.

    ``sent_bytes``: sealed updates, repeated ones too. ``train_seconds``: mean of the rounds'
    training, emulated slowness included. ``waiting``: updates without a receipt.
    """

    device: str
    capacity: str
    k: int
    updates: int
    sent_bytes: int
    train_seconds: float | None
    waiting: int
    refused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UserShown:
    """Recommendations for one user, by title; the demo shows them, nobody else gets them."""

    device: str
    user: str
    k: int
    watched: tuple[str, ...]
    recommended: tuple[str, ...]
    watched_next: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that a device could not do; ``over`` when it can now."""

    device: str
    text: str
    over: bool = False


Record: TypeAlias = Enrolled | Measured | RoundQuality | Finished | UserShown | Trouble
_KINDS = {
    kind.__name__: kind for kind in (Enrolled, Measured, RoundQuality, Finished, UserShown, Trouble)
}


class JournalWriter:
    """Appends records; each is in the file when :meth:`write` returns."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one record."""
        values = {"kind": type(record).__name__, **asdict(record)}
        self._file.write(json.dumps(values, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JournalReader:
    """Reads what was appended since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_records(self) -> list[Record]:
        """Whole lines only: one that is being written comes the next time."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [_record(json.loads(line)) for line in whole.splitlines()]


def _record(values: dict[str, Any]) -> Record:
    kind = _KINDS[values.pop("kind")]
    for name in ("watched", "recommended"):
        if name in values:
            values[name] = tuple(values[name])
    record: Record = kind(**values)
    return record
