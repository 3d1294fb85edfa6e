"""Descriptors that were issued, and group keys by epoch."""

from __future__ import annotations

from dataclasses import dataclass

from aggregator.store.database import Database
from device_sdk.wire.seal.broadcast import GroupKey


@dataclass(frozen=True, slots=True)
class IssuedDescriptor:
    """A descriptor, and until when its keys are honoured (None: it is the current one)."""

    serial: int
    message: bytes
    honoured_until_unix_seconds: int | None


class Secrets:
    """Tables ``descriptors`` and ``group_keys``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def descriptors(self) -> list[IssuedDescriptor]:
        """All that were issued, the current one last."""
        query = "SELECT serial, message, honoured_until_unix FROM descriptors ORDER BY serial"
        return [IssuedDescriptor(*row) for row in self._database.rows(query)]

    def issue(self, serial: int, message: bytes, retire_others_at_unix_seconds: int) -> None:
        """Make this descriptor the current one; no other is honoured longer than said."""
        self._database.execute(
            "UPDATE descriptors SET honoured_until_unix = "
            "min(coalesce(honoured_until_unix, ?1), ?1)",
            (retire_others_at_unix_seconds,),
        )
        self._database.execute("INSERT INTO descriptors VALUES (?, ?, NULL)", (serial, message))

    def forget(self, serial: int) -> None:
        """A descriptor whose keys are erased."""
        self._database.execute("DELETE FROM descriptors WHERE serial = ?", (serial,))

    def group_keys(self) -> tuple[GroupKey, ...]:
        """Keys that sessions are told, epochs rising; the last one is used for what comes next."""
        query = "SELECT epoch, key FROM group_keys ORDER BY epoch"
        return tuple(GroupKey(epoch, key) for epoch, key in self._database.rows(query))

    def add_group_key(self, key: GroupKey) -> None:
        """A new epoch."""
        self._database.execute("INSERT INTO group_keys VALUES (?, ?)", (key.epoch, key.key))

    def drop_group_keys_below(self, epoch: int) -> None:
        """Forget keys under which nothing is published any more."""
        self._database.execute("DELETE FROM group_keys WHERE epoch < ?", (epoch,))
