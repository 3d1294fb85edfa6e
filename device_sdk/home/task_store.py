"""Tasks as a device knows them, and what it has spent on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from device_sdk.home.database import HomeStore
from device_sdk.wire.publish.report import Reason

Takes = Literal["records", "arrays"]
"""What a task's method trains on: what the app recorded, or the arrays that it gives."""
_ID_BYTES = 32


@dataclass(frozen=True, slots=True)
class KnownTask:
    """One task.

    ``served``: whether it is for this device, as last heard. The rest is known once the terms of a
    round were read: they are those of ``generation``. ``artifacts``: ids of all that it brought,
    and of the values that these share.
    """

    name: str
    cohort: str
    served: bool
    generation: int | None = None
    method: str = ""
    takes: Takes | None = None
    artifacts: tuple[bytes, ...] = ()


class KnownTasks(HomeStore):
    """Every task that this device ever heard was for it."""

    def all(self) -> list[KnownTask]:
        """In the order of their names."""
        rows = self._database.rows(
            "SELECT name, cohort, served, generation, method, takes, artifacts FROM task "
            "ORDER BY name"
        )
        return [
            KnownTask(
                name,
                cohort,
                bool(served),
                generation,
                method or "",
                takes,
                tuple(ids[at : at + _ID_BYTES] for at in range(0, len(ids or b""), _ID_BYTES)),
            )
            for name, cohort, served, generation, method, takes, ids in rows
        ]

    def find(self, name: str) -> KnownTask | None:
        """One of them."""
        return next((row for row in self.all() if row.name == name), None)

    def set_served(self, served: Mapping[str, str]) -> None:
        """These tasks, by name with their cohorts, are for this device, and no others."""
        with self._database.transaction() as sql:
            sql.execute("UPDATE task SET served = 0")
            sql.executemany(
                "INSERT INTO task (name, cohort, served) VALUES (?, ?, 1) ON CONFLICT (name) "
                "DO UPDATE SET cohort = excluded.cohort, served = 1",
                served.items(),
            )

    def set_terms(
        self, name: str, cohort: str, generation: int, method: str, takes: Takes | None
    ) -> None:
        """What the terms of a round say of its task."""
        with self._database.transaction() as sql:
            sql.execute(
                "INSERT INTO task (name, cohort, served, generation, method, takes) "
                "VALUES (?, ?, 1, ?, ?, ?) ON CONFLICT (name) DO UPDATE "
                "SET generation = excluded.generation, method = excluded.method, "
                "takes = excluded.takes",
                (name, cohort, generation, method, takes),
            )

    def set_artifacts(self, name: str, artifacts: Iterable[bytes]) -> None:
        """Ids of what the task trains with here: artifacts, and values that they share."""
        with self._database.transaction() as sql:
            sql.execute("UPDATE task SET artifacts = ? WHERE name = ?", (b"".join(artifacts), name))

    def owner(self) -> str | None:
        """The task that what is recorded without a task's name belongs to; None before it does."""
        row = self._database.row("SELECT name FROM task WHERE owns_unnamed = 1")
        return None if row is None else str(row[0])

    def own(self, name: str) -> None:
        """It belongs to this one from now on, for good."""
        with self._database.transaction() as sql:
            sql.execute(
                "UPDATE task SET owns_unnamed = 1 WHERE name = ? "
                "AND NOT EXISTS (SELECT 1 FROM task WHERE owns_unnamed = 1)",
                (name,),
            )

    def forget_contents(self) -> None:
        """Drop attachments and measurements of tasks that are no longer served."""
        with self._database.transaction() as sql:
            gone = "(SELECT name FROM task WHERE served = 0)"
            sql.execute(f"DELETE FROM attachment WHERE task IN {gone}")
            sql.execute(f"DELETE FROM capability WHERE task IN {gone}")
            sql.execute("UPDATE task SET artifacts = NULL WHERE served = 0")


@dataclass(frozen=True, slots=True)
class Spent:
    """What taking part took on one day: seconds of training, bytes sent and received."""

    seconds: float = 0.0
    bytes: int = 0


class SpentStore(HomeStore):
    """Of one day, the last one. Days are counted from 1970 in the aggregator's time."""

    def day(self) -> int | None:
        """Which one it is; None before the first."""
        row = self._database.row("SELECT day FROM spent")
        return None if row is None else int(row[0])

    def so_far(self) -> Spent:
        """What was spent on it."""
        row = self._database.row("SELECT seconds, bytes FROM spent")
        return Spent() if row is None else Spent(float(row[0]), int(row[1]))

    def begin(self, day: int) -> None:
        """Another day, on which nothing is spent yet."""
        with self._database.transaction() as sql:
            sql.execute("DELETE FROM spent")
            sql.execute("INSERT INTO spent VALUES (?, 0, 0)", (day,))

    def rename(self, day: int) -> None:
        """It is the same day, and has another number."""
        with self._database.transaction() as sql:
            sql.execute("UPDATE spent SET day = ?", (day,))

    def add(self, seconds: float, bytes_: int) -> None:
        """Spend more; ``seconds`` below 0 gives back what was set aside."""
        with self._database.transaction() as sql:
            sql.execute(
                "UPDATE spent SET seconds = max(0, seconds + ?), bytes = bytes + ?",
                (seconds, bytes_),
            )


# What this device knows of artifacts that came to it: which may run, and which not for now.

FIRST_PAUSE_SECONDS: Final = 3600
_LONGEST_PAUSE_SECONDS: Final = 30 * 86_400
# Whoever ends a process, or cuts its power, in the middle of a training or of a trial says nothing
# of the artifact, and a training for which there was no memory may have met a bad moment; the trial
# that follows says more. From the second time in a row on it is the artifact's, if not for certain:
# who was unlucky loses a minute, and what does it each time is soon seldom run.
_FREE: Final = 1
_DOUBT_PAUSE_SECONDS: Final = 60


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
        certain: bool = True,
    ) -> TriedArtifact:
        """It did harm, or may have: it is tried again before it is run.

        Not before a pause, which is twice as long each time, 30 days at most; where it is not
        ``certain``, the first time without one, and from a minute on.
        """
        known = self.find(artifact_id)
        free, pause_seconds = (0, FIRST_PAUSE_SECONDS) if certain else (_FREE, _DOUBT_PAUSE_SECONDS)
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
