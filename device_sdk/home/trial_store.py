"""What this device knows of artifacts that came to it: which may run, and which not for now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from device_sdk.home.database import HomeStore
from device_sdk.wire.publish.report import Reason

FIRST_PAUSE_SECONDS: Final = 3600
_LONGEST_PAUSE_SECONDS: Final = 30 * 86_400


@dataclass(frozen=True, slots=True)
class TriedArtifact:
    """One artifact.

    Attributes:
        passed: it came through a trial since it last did harm.
        strikes: how often it did harm, or may have, since a training with it last came to its end.
        reason, detail: what it did; ``reason`` is a slug.
        until_unix_seconds: it is not run before this; 0 where it may be.
    """

    passed: bool
    strikes: int = 0
    reason: str = ""
    detail: str = ""
    until_unix_seconds: int = 0

    def seconds_held(self, now_unix_seconds: int) -> int:
        """For how long it is still not run; 0 where it may be."""
        left = self.until_unix_seconds - now_unix_seconds
        # Further off than any pause is, it was reckoned by a clock that was set back since.
        return left if 0 < left <= _LONGEST_PAUSE_SECONDS else 0


class TrialStore(HomeStore):
    """By the artifacts' ids."""

    def find(self, artifact_id: bytes) -> TriedArtifact | None:
        """None for one that was not tried yet."""
        row = self._database.row(
            "SELECT passed, strikes, reason, detail, until_unix_seconds FROM trial "
            "WHERE artifact = ?",
            artifact_id,
        )
        return None if row is None else TriedArtifact(bool(row[0]), *row[1:])

    def passed(self, artifact_id: bytes) -> None:
        """It came through a trial; what was held against it stays until :meth:`absolve`."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT INTO trial VALUES (?, 1, 0, '', '', 0) ON CONFLICT (artifact) "
                "DO UPDATE SET passed = 1, until_unix_seconds = 0",
                (artifact_id,),
            )

    def absolve(self, artifact_ids: Iterable[bytes]) -> None:
        """A training with them came to its end."""
        with self._database.transaction() as sql:
            sql.executemany(
                "UPDATE trial SET strikes = 0, reason = '', detail = '' WHERE artifact = ?",
                [(each,) for each in artifact_ids],
            )

    def strike(
        self,
        artifact_id: bytes,
        reason: Reason,
        detail: str,
        now_unix_seconds: int,
        *,
        free: int = 0,
        pause_seconds: int = FIRST_PAUSE_SECONDS,
    ) -> TriedArtifact:
        """It did harm, or may have: it is tried again before it is run.

        Not before a pause, ``pause_seconds`` at first and twice as long each time, 30 days at most;
        the first ``free`` times without one.
        """
        known = self.find(artifact_id)
        strikes = 1 + (0 if known is None else known.strikes)
        until = 0
        if strikes > free:
            pause = pause_seconds << min(strikes - free - 1, 16)
            until = now_unix_seconds + min(pause, _LONGEST_PAUSE_SECONDS)
        row = TriedArtifact(False, strikes, reason.value, detail[:500], until)
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT OR REPLACE INTO trial VALUES (?, 0, ?, ?, ?, ?)",
                (artifact_id, row.strikes, row.reason, row.detail, row.until_unix_seconds),
            )
        return row
