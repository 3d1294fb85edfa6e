"""Enrolment codes."""

from __future__ import annotations

from dataclasses import dataclass

from aggregator.store.database import Database
from device_sdk.wire.seal.enrolment_code import EnrolmentCode

__all__ = ["TokenRow", "Tokens"]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One code. ``last_stranger``: the key of the latest other identity that tried to use it."""

    token_id: bytes
    secret: bytes
    expires_unix_seconds: int
    replaces: bytes | None
    device_id: bytes | None
    strangers: int
    last_stranger: bytes | None

    def __repr__(self) -> str:
        return f"TokenRow(token_id={self.token_id.hex()}, ...)"


_COLUMNS = "token_id, secret, expires_unix, replaces, device_id, strangers, last_stranger"


class Tokens:
    """Table ``tokens``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self, code: EnrolmentCode, created_unix: int, expires_unix: int, replaces: bytes | None
    ) -> None:
        """A new code."""
        self._database.execute(
            "INSERT INTO tokens (token_id, secret, created_unix, expires_unix, replaces) "
            "VALUES (?, ?, ?, ?, ?)",
            (code.token_id, code.secret, created_unix, expires_unix, replaces),
        )

    def find(self, token_id: bytes) -> TokenRow | None:
        """The code of this id."""
        query = f"SELECT {_COLUMNS} FROM tokens WHERE token_id = ?"
        row = self._database.row(query, (token_id,))
        return None if row is None else TokenRow(*row)

    def bind(self, token_id: bytes, device_id: bytes) -> None:
        """Note who used a code."""
        self._database.execute(
            "UPDATE tokens SET device_id = ? WHERE token_id = ?", (device_id, token_id)
        )

    def note_stranger(self, token_id: bytes, identity: bytes) -> None:
        """Another key tried to use a code that is bound."""
        self._database.execute(
            "UPDATE tokens SET strangers = strangers + 1, last_stranger = ? WHERE token_id = ?",
            (identity, token_id),
        )

    def tried_by_strangers(self) -> list[TokenRow]:
        """Codes that somebody else tried to use too: leaked, or handed out twice."""
        query = f"SELECT {_COLUMNS} FROM tokens WHERE strangers > 0"
        return [TokenRow(*row) for row in self._database.rows(query)]

    def unused(self, now_unix_seconds: int) -> int:
        """How many codes can still be used."""
        row = self._database.row(
            "SELECT count(*) FROM tokens WHERE device_id IS NULL AND expires_unix > ?",
            (now_unix_seconds,),
        )
        return 0 if row is None else int(row[0])
