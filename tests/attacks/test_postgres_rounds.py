"""Whole rounds with their store in PostgreSQL: who dies, and the server that goes away."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from aggregator.home import copy_store
from aggregator.store import STORE_FAILURES, Database, Store, create_database, open_database
from tests.attacks.conftest import MakeStage
from tests.attacks.stage import Stage
from tests.servers.fixtures import MakeDatabase
from tests.servers.postgres import PostgresServer


def moved_to(url: str) -> Callable[[Path], Database]:
    """Opens a home's store in the database, where its file is copied to first."""
    moved: list[str] = []

    def open_moved(path: Path) -> Database:
        if not moved:
            with closing(open_database(path)) as file, closing(create_database(url)) as target:
                copy_store(file, target)
            moved.append(url)
        return open_database(url)

    return open_moved


def rounds_closed(stage: Stage) -> int:
    return sum(row.next_version is not None for row in stage.store.first.rounds.latest(50))


def counted(store: Store) -> tuple[int, int]:
    """Verdicts that were counted, and participants of the closed rounds."""
    verdicts = store.database.row("SELECT count(*) FROM verdicts WHERE reason IS NULL")
    closed = [row for row in store.first.rounds.latest(50) if row.closed_unix_seconds is not None]
    return int(verdicts[0]), sum(row.participants or 0 for row in closed)


def test_rounds_close_over_a_store_that_restarts_and_an_aggregator_that_dies(
    make_database: MakeDatabase, make_stage: MakeStage, postgres: PostgresServer
) -> None:
    url = make_database()
    # The oracle reads files: here the verdicts are held against the rounds instead.
    stage = make_stage(database=moved_to(url), judged=False)
    stage.run_until(lambda: rounds_closed(stage) >= 1)
    stage.restart_aggregator()
    stage.run_until(lambda: rounds_closed(stage) >= 2)
    postgres.crash()
    postgres.start()
    try:
        stage.run(5.0)
    except STORE_FAILURES:
        stage.restart_aggregator()
    stage.run_until(lambda: rounds_closed(stage) >= 4)
    verdicts, participants = counted(stage.store)
    open_round = stage.store.first.log.last_seq()
    assert verdicts == participants + open_round and participants >= 12
