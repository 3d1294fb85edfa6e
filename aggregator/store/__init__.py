"""Everything the aggregator must not lose: one SQLite file, or a PostgreSQL database."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from aggregator.errors import OutcomeUnknown, StoreError
from aggregator.store.cluster import GrantedCounters, Leases, Shares, Workers
from aggregator.store.database import STORE_FAILURES, Database
from aggregator.store.devices import Devices, Secrets, Tokens
from aggregator.store.evaluations import Evaluations
from aggregator.store.facts import Facts, RefusalCounts, TaskFacts
from aggregator.store.publications import Contents, Publications, Retained
from aggregator.store.reports import Habits, Late, Participations, Reports
from aggregator.store.roles import OWNER, WORKER
from aggregator.store.rounds import Rounds, UpdateLog
from aggregator.store.sqlite import SQLiteDatabase
from aggregator.store.tasks import FIRST, Tasks
from aggregator.store.versions import Checkpoints, Versions

if TYPE_CHECKING:
    from aggregator.store.postgres import PostgresDatabase

__all__ = [
    "STORE_FAILURES",
    "Database",
    "OutcomeUnknown",
    "SQLiteDatabase",
    "Store",
    "StoreError",
    "TaskStore",
    "create_database",
    "open_database",
]


class Store:
    """What the fleet has once, each table behind an object of its own; they share the database's
    transactions. :meth:`task` gives what each task has for itself."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.facts = Facts(database)
        self.secrets = Secrets(database)
        self.tokens = Tokens(database)
        self.devices = Devices(database)
        self.refusals = RefusalCounts(database)
        self.retained = Retained(database)
        self.contents = Contents(database, self.facts)
        self.tasks = Tasks(database)
        self.lease = Leases(database)
        self.workers = Workers(database)
        self.granted = GrantedCounters(database)

    def end_cluster(self) -> None:
        """What is left of a cluster writes nothing from now on, alive or not: workers without a
        coordinator, and a coordinator that froze. Raises AggregatorError while one coordinates.

        For whoever is to be the only one; within its transaction, where it has one.
        """
        with self.database.transaction():
            self.lease.require_free()
            self.lease.depose()
            self.workers.depose()
            if self.facts.cluster_life is not None:
                self.facts.cluster_life = None

    def task(self, number: int) -> TaskStore:
        """A task's tables."""
        return TaskStore(self, number)

    @cached_property
    def first(self) -> TaskStore:
        """Those of the first task, the only one for most."""
        return self.task(FIRST)


class TaskStore:
    """One task's rows of the tables that all tasks share. ``fleet``: what they have in common."""

    def __init__(self, fleet: Store, number: int) -> None:
        self.number = number
        self.fleet = fleet
        self.database = database = fleet.database
        self.facts = TaskFacts(database, number, fleet.facts)
        self.rounds = Rounds(database, number)
        self.log = UpdateLog(database, number)
        self.shares = Shares(database, number)
        self.habits = Habits(database, number)
        self.late = Late(database, number)
        self.reports = Reports(database, number)
        self.participations = Participations(database, number)
        self.checkpoints = Checkpoints(database, number)
        self.versions = Versions(database, number, self.facts)
        self.evaluations = Evaluations(database, number)
        self.publications = Publications(database, number)


def create_database(
    where: Path | str, fill: Callable[[Database], None] = lambda made: None
) -> Database:
    """A new store: in a file that is not there yet, or an empty database that a URL
    ``postgresql://...`` names, which stays empty where ``fill`` does not come to its end. Raises
    AggregatorError."""
    if not isinstance(where, Path):
        return _postgres()(where, fill)
    made = SQLiteDatabase(where, create=True)
    try:
        fill(made)
    except BaseException:
        made.close()
        raise
    return made


def open_database(
    where: Path | str | Callable[[], str],
    *,
    identity: str = "",
    by_worker: bool = False,
    read_only: bool = False,
) -> Database:
    """The store of a file or a URL, which is there. Raises AggregatorError. What gives a URL is
    asked at each connection.

    ``identity``: what that store has to be, where it is said. ``by_worker``: the URL's role may
    have no more than workers need. ``read_only``: whatever would write fails, and a store of an
    earlier release is refused, which anybody else would bring up to date.
    """
    if isinstance(where, Path):
        return SQLiteDatabase(where, read_only=read_only)
    rights = WORKER if by_worker else OWNER
    return _postgres()(where, identity=identity, rights=rights, read_only=read_only)


def _postgres() -> type[PostgresDatabase]:
    # Imported where it is asked for: whoever has one machine has no psycopg.
    from aggregator.store.postgres import PostgresDatabase

    return PostgresDatabase
