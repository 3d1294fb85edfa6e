"""The aggregator's SQLite file: older formats, and who may write to it when."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from aggregator.errors import AggregatorError
from aggregator.store import Database, Store
from aggregator.store.schema import SCHEMA_VERSION
from tests.aggregator.homes import make_home

_URL = "mqtt://127.0.0.1:1"
# What each version added, undone: the newest first.
_UNDO = {
    2: "DROP INDEX remembered; ALTER TABLE rounds DROP COLUMN closed_served_seconds;",
}


def _set_back(path: Path, version: int) -> None:
    """Make a file what it was in an older version."""
    connection = sqlite3.connect(path)
    for each in range(SCHEMA_VERSION, version, -1):
        connection.executescript(_UNDO[each])
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


def _shape(path: Path) -> list[tuple[str, ...]]:
    connection = sqlite3.connect(path)
    columns = connection.execute(
        "SELECT m.name, c.name, c.type FROM sqlite_schema m, pragma_table_info(m.name) c "
        "ORDER BY 1, 2"
    ).fetchall()
    indices = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'index' ORDER BY 1")
    shape = columns + indices.fetchall()
    connection.close()
    return shape


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
def test_a_file_of_each_older_version_becomes_one_of_this(tmp_path: Path, version: int) -> None:
    path = make_home(tmp_path, _URL).database
    new = _shape(path)
    _set_back(path, version)
    assert _shape(path) != new
    store = Store(Database(path))
    assert store.rounds.latest() == [] and store.facts.served_seconds == 0.0
    store.database.close()
    assert _shape(path) == new


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = make_home(tmp_path, _URL).database
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(AggregatorError, match="install a newer one"):
        Database(path)
