"""What devices told of the last rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from aggregator.store.database import TableOfTask
from aggregator.store.devices import STAYS
from aggregator.store.rows import Habit, LastParticipation, StoredReport

# What each device did last in each task.


_TOLD = ", ".join(
    f"{name} = CASE WHEN excluded.round >= coalesce(participations.round, 0) "
    f"THEN excluded.{name} ELSE participations.{name} END"
    for name in ("told_unix", "round", "report")
)


class Participations(TableOfTask):
    """A task's rows of the table ``participations``."""

    def all(self) -> dict[bytes, LastParticipation]:
        """By the device's id."""
        return self._by_device(LastParticipation, "participations")

    def of(self, device_ids: Sequence[bytes]) -> dict[bytes, LastParticipation]:
        """Those of these devices."""
        return self._by_device(LastParticipation, "participations", device_ids)

    def widths(self) -> dict[int, int]:
        """How many devices trained which part of the model last (k, or a ladder's rung), rising."""
        query = (
            "SELECT width, count(*) FROM participations WHERE task = ? AND width IS NOT NULL "
            "GROUP BY width ORDER BY width"
        )
        return dict(self._database.rows(query, (self._task,)))

    def note(self, seen: Mapping[bytes, LastParticipation]) -> None:
        """What devices did, by their ids, beside what is known of them: of each the newer update
        and the newer round."""
        # One statement for both: two take twice the time, and each update comes by here.
        self._database.execute_many(
            f"INSERT INTO participations VALUES ({self._task}, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (task, device_id) DO UPDATE SET counted_unix = "
            "coalesce(excluded.counted_unix, participations.counted_unix), width = CASE WHEN "
            "excluded.counted_unix IS NULL THEN participations.width ELSE excluded.width END, "
            f"{_TOLD}",
            [(device_id, *seen[device_id]) for device_id in sorted(seen)],
        )


# When devices' updates come in a task.


class Habits(TableOfTask):
    """A task's rows of the table ``habits``."""

    def all(self) -> dict[bytes, Habit]:
        """By the device's id."""
        return self._by_device(Habit, "habits")

    def of(self, device_ids: Sequence[bytes]) -> dict[bytes, Habit]:
        """Those of these devices."""
        return self._by_device(Habit, "habits", device_ids)

    def put(self, found: Mapping[bytes, Habit]) -> None:
        """In the place of what was known of these devices; inside a transaction."""
        self._database.execute_many(
            f"INSERT INTO habits VALUES ({self._task}, ?, ?, ?, ?) "
            "ON CONFLICT (task, device_id) DO UPDATE SET seconds = excluded.seconds, "
            "missed = excluded.missed, lives = excluded.lives",
            [
                (device_id, habit.seconds, habit.missed, int(habit.lives))
                for device_id, habit in sorted(found.items())
            ],
        )

    def forget(self, device_ids: Iterable[bytes]) -> None:
        """Of these devices, which were revoked."""
        self._database.execute_many(
            "DELETE FROM habits WHERE task = ? AND device_id = ?",
            [(self._task, each) for each in device_ids],
        )


class Late(TableOfTask):
    """A task's rows of the table ``late_arrivals``: what workers heard too late for its round, and
    the coordinator has not taken yet; of each device the longest time."""

    def add(self, came: Mapping[bytes, float | None]) -> None:
        """Seconds after the round opened, by device; None: it said that there is no update."""
        with self._database.transaction(shared=True):
            self._database.execute_many(
                f"INSERT INTO late_arrivals VALUES ({self._task}, ?, ?) "
                "ON CONFLICT (task, device_id) DO UPDATE SET seconds = CASE "
                "WHEN excluded.seconds > coalesce(late_arrivals.seconds, -1) "
                "THEN excluded.seconds ELSE late_arrivals.seconds END",
                sorted(came.items()),
            )

    def take(self) -> dict[bytes, float | None]:
        """All of them, which are gone then."""
        query = "SELECT device_id, seconds FROM late_arrivals WHERE task = ?"
        found = dict(self._database.rows(query, (self._task,)))
        if found:
            with self._database.transaction():
                self._database.execute_many(
                    "DELETE FROM late_arrivals WHERE task = ? AND device_id = ?",
                    [(self._task, device_id) for device_id in sorted(found)],
                )
        return found


KEPT_ROUNDS = 10
"""Of each task; each device's newest outcome stays among :class:`Participations`."""


class OutcomeCount(NamedTuple):
    """How many devices told this of a round."""

    round: int
    outcome: str
    reason: str
    devices: int


class RoundCost(NamedTuple):
    """What devices told of one round: how many did, and on average how long they trained and how
    many bytes the round brought them; None where nobody said."""

    round: int
    devices: int
    seconds: float | None
    received_bytes: float | None


class UnknownItems(NamedTuple):
    """What devices told of the items that they recorded: how many ``devices`` have some that the
    task's catalogue does not know, of how many ``told`` it; ``unknown`` of ``recorded`` items, the
    same one on several devices counted on each."""

    devices: int
    told: int
    unknown: int
    recorded: int


class NotTrained(NamedTuple):
    """Devices that told this of a round, those of the newest rounds first."""

    outcome: str
    reason: str
    device_ids: tuple[bytes, ...]


class Reports(TableOfTask):
    """A task's rows of the table ``reports``, of its last ``KEPT_ROUNDS`` rounds."""

    def add(self, reports: Sequence[StoredReport]) -> None:
        """Reports of a group; of two by one device on one round the first stays, of a device that
        was revoked none."""
        places = ", ".join(f"?{place + 1}" for place in range(len(StoredReport._fields)))
        self._database.execute_many(
            f"INSERT INTO reports SELECT {self._task}, {places} WHERE {STAYS} "
            "ON CONFLICT DO NOTHING",
            reports,
        )

    def has(self, generation: int, number: int, device_id: bytes) -> bool:
        of = {"generation": generation, "round": number, "device_id": device_id}
        return self._count("reports", **of) > 0

    def outcomes(self) -> list[OutcomeCount]:
        """Of all rounds kept, the newest first."""
        query = (
            "SELECT round, outcome, reason, count(*) FROM reports WHERE task = ? "
            "GROUP BY generation, round, outcome, reason "
            "ORDER BY round DESC, count(*) DESC, outcome, reason"
        )
        return [OutcomeCount(*row) for row in self._database.rows(query, (self._task,))]

    def of(self, device_id: bytes) -> list[StoredReport]:
        """What a device told of the rounds kept, the newest first."""
        tail = "ORDER BY generation DESC, round DESC"
        return list(self._all(StoredReport, "reports", tail, device_id=device_id))

    def trained(self, most: int) -> list[StoredReport]:
        """The newest reports, at most so many, of those that say what was trained, and in what
        time."""
        told = "AND option != '' AND seconds IS NOT NULL "
        tail = f"{told}ORDER BY generation DESC, round DESC, device_id DESC LIMIT ?"
        return list(self._all(StoredReport, "reports", tail, most))

    def costs(self) -> list[RoundCost]:
        """Of the rounds kept, the newest first."""
        query = (
            "SELECT round, count(*), avg(seconds), CAST(avg(received_bytes) AS DOUBLE PRECISION) "
            "FROM reports WHERE task = ? "
            "GROUP BY generation, round ORDER BY generation DESC, round DESC"
        )
        return [RoundCost(*row) for row in self._database.rows(query, (self._task,))]

    def reasons(self, generation: int, number: int) -> dict[str, int]:
        """How many devices trained no update in a round, by reason."""
        query = (
            "SELECT reason, count(*) FROM reports WHERE task = ? AND generation = ? AND round = ? "
            "AND reason != '' GROUP BY reason"
        )
        return dict(self._database.rows(query, (self._task, generation, number)))

    def unknown_items(self) -> UnknownItems:
        """By the newest of the reports kept of each device."""
        query = (
            "SELECT coalesce(sum(CASE WHEN unknown_items > 0 THEN 1 ELSE 0 END), 0), count(*), "
            "coalesce(sum(unknown_items), 0), coalesce(sum(items), 0) FROM reports AS own "
            "WHERE task = ? AND items IS NOT NULL AND NOT EXISTS (SELECT 1 FROM reports AS later "
            "WHERE later.task = own.task AND later.device_id = own.device_id "
            "AND later.round > own.round AND later.items IS NOT NULL)"
        )
        row = self._database.row(query, (self._task,))
        assert row is not None  # sums of nothing are one row too
        return UnknownItems(*map(int, row))

    def not_trained(self) -> list[NotTrained]:
        """Who trained in one of the rounds kept no update, and why."""
        query = (
            "SELECT outcome, reason, device_id FROM reports WHERE task = ? AND reason != '' "
            "GROUP BY outcome, reason, device_id ORDER BY max(round) DESC, device_id"
        )
        found: dict[tuple[str, str], list[bytes]] = {}
        for outcome, reason, device_id in self._database.rows(query, (self._task,)):
            found.setdefault((outcome, reason), []).append(device_id)
        return [NotTrained(*why, tuple(ids)) for why, ids in found.items()]

    def keep_last(self, newest: int) -> None:
        """Forget all but the last rounds, of which ``newest`` is the newest."""
        self._delete("reports", "AND round <= ?", newest - KEPT_ROUNDS)
