"""The registry: a device's row is its credential."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from aggregator.store.database import Database

__all__ = ["DeviceRow", "Devices"]


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One identity. ``first_round``: it takes part from this round on."""

    device_id: bytes
    identity: bytes
    handle: bytes
    admission_key: bytes
    shard: int
    token_id: bytes
    enrolled_unix_seconds: int
    first_round: int
    revoked_unix_seconds: int | None = None
    last_counted_unix_seconds: int | None = None
    last_width: int | None = None

    def __repr__(self) -> str:
        return f"DeviceRow(device_id={self.device_id.hex()}, ...)"


class Devices:
    """Table ``devices``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, row: DeviceRow) -> None:
        """A device that enrolled."""
        self._database.execute(
            "INSERT INTO devices VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row.device_id,
                row.identity,
                row.handle,
                row.admission_key,
                row.shard,
                row.token_id,
                row.enrolled_unix_seconds,
                row.first_round,
                row.revoked_unix_seconds,
                row.last_counted_unix_seconds,
                row.last_width,
            ),
        )

    def all(self) -> Iterator[DeviceRow]:
        """Every device, revoked ones too, in the order of enrolment."""
        for row in self._database.rows("SELECT * FROM devices ORDER BY enrolled_unix, device_id"):
            yield DeviceRow(*row)

    def find(self, device_id: bytes) -> DeviceRow | None:
        """The device of this id."""
        row = self._database.row("SELECT * FROM devices WHERE device_id = ?", (device_id,))
        return None if row is None else DeviceRow(*row)

    def revoke(self, device_id: bytes, now_unix_seconds: int) -> bool:
        """Revoke, and delete its admission key; whether it was not revoked before."""
        changed = self._database.execute(
            "UPDATE devices SET revoked_unix = ?, admission_key = zeroblob(32) "
            "WHERE device_id = ? AND revoked_unix IS NULL",
            (now_unix_seconds, device_id),
        )
        return changed > 0

    def note_counted(self, seen: Iterable[tuple[int, int | None, bytes]]) -> None:
        """(Unix seconds, width, device id) of devices whose updates were counted."""
        self._database.execute_many(
            "UPDATE devices SET last_counted_unix = ?, last_width = ? WHERE device_id = ?", seen
        )
