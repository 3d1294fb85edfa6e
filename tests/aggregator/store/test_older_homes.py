"""A home of version 3, which knew one task, in the midst of a round: nothing of it is lost.

``home-version-3.zip`` was made by the program of that version: a round that made version 1, one
without quorum, and a third that is open, with a checkpoint and an update behind it.
``expected.json`` says what that program saw.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sqlite3
import zipfile
from pathlib import Path
from typing import Any

import pytest

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome, serve_lock
from aggregator.store import SQLiteDatabase
from aggregator.store.schema import SCHEMA_VERSION


@pytest.fixture
def home(tmp_path: Path) -> AggregatorHome:
    with zipfile.ZipFile(Path(__file__).with_name("home-version-3.zip")) as stored:
        stored.extractall(tmp_path / "home")
    for key in (tmp_path / "home" / "keys").iterdir():
        key.chmod(0o600)
    return AggregatorHome(tmp_path / "home")


def _expected(home: AggregatorHome) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home.folder / "expected.json").read_text())
    return found


def _hex(rows: Any) -> list[list[object]]:
    return [[each.hex() if isinstance(each, bytes) else each for each in row] for row in rows]


def test_every_row_of_a_home_with_one_task_is_the_first_task_s(home: AggregatorHome) -> None:
    expected = _expected(home)
    store = home.open_store()
    (task,) = store.tasks.all()
    assert (task.number, task.name, task.state) == (1, "default", "active")
    rounds = [
        [
            row.round,
            row.generation,
            row.version,
            row.opened_unix_seconds,
            row.deadline_unix_seconds,
            row.seed.hex(),
            row.threshold,
            row.expected,
            row.items,
            row.closed_unix_seconds,
            row.next_version,
            row.participants,
            row.metrics,
            row.held,
            row.forgotten,
        ]
        for row in store.first.rounds.latest(9)
    ]
    assert rounds == expected["rounds"]
    assert [row.opening for row in store.first.rounds.latest(9)] == [3, 2, 1]
    assert store.facts.openings == 3
    assert store.first.facts.generation == store.facts.generation == expected["generation"]
    tables, columns = (
        expected["tables"],
        "seq, round, device_id, arrived_seconds, quarantined, body",
    )
    read = store.database.rows
    assert _hex(read(f"SELECT {columns} FROM updates ORDER BY 1")) == tables["updates"]
    columns = "generation, round, device_id, body_sha256, reason"
    assert _hex(read(f"SELECT {columns} FROM verdicts ORDER BY 1, 2, 3")) == tables["verdicts"]
    assert _hex(read("SELECT * FROM group_keys ORDER BY 1, 2")) == tables["group_keys"]
    assert tables["devices"][0][-2] is not None
    devices = [[*row[:-2], "{}", None] for row in tables["devices"]]
    assert _hex(read("SELECT * FROM devices ORDER BY 1, 2")) == devices
    columns = "task, device_id, counted_unix, width, told_unix, round, report"
    participations = [
        [1, row[0], *row[-2:], None, None, None] for row in tables["devices"] if row[-2] is not None
    ]
    assert _hex(read(f"SELECT {columns} FROM participations ORDER BY 1, 2")) == participations
    published = [
        [*row[:3], None if row[3] is None else hashlib.sha256(row[3]).hexdigest()]
        for row in read("SELECT topic, part, place, message FROM publications ORDER BY 1, 2")
    ]
    assert published == tables["publications"]
    assert store.first.facts.key_epoch == tables["group_keys"][-1][0]
    store.database.close()


def test_a_home_is_not_taken_over_under_an_older_versions_serve(home: AggregatorHome) -> None:
    def version() -> int:
        connection = sqlite3.connect(home.database)
        found: int = connection.execute("PRAGMA user_version").fetchone()[0]
        connection.close()
        return found

    serving = AggregatorHome(home.folder)
    with serve_lock(serving):
        with pytest.raises(AggregatorError, match="its serve runs: restart serve"):
            home.open_store()
        assert version() == 3
        serving.open_store().database.close()  # as serve itself does
        assert version() == SCHEMA_VERSION
        home.open_store().database.close()


def _die(path: Path, statement: int) -> None:
    """Migrate, and be killed before one of the statements, or before the commit."""
    left = statement

    def trace(sql: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    connect = sqlite3.connect

    def traced(*values: Any, **named: Any) -> sqlite3.Connection:
        connection = connect(*values, **named)
        connection.set_trace_callback(trace)
        return connection

    sqlite3.connect = traced  # type: ignore[assignment]
    SQLiteDatabase(path).close()


def test_a_kill_in_the_midst_leaves_the_old_home_or_the_new_one(home: AggregatorHome) -> None:
    before = home.database.read_bytes()
    context = multiprocessing.get_context("fork")
    old = new = 0
    for statement in range(0, 200, 3):
        for leftover in home.folder.glob("aggregator.sqlite*"):
            leftover.unlink()
        home.database.write_bytes(before)
        process = context.Process(target=_die, args=(home.database, statement))
        process.start()
        process.join()
        connection = sqlite3.connect(home.database)
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_schema")}
        count = connection.execute("SELECT count(*) FROM verdicts").fetchone()[0]
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        connection.close()
        assert not any(name.startswith("old_") for name in tables)
        assert count == len(_expected(home)["tables"]["verdicts"])
        assert version == (SCHEMA_VERSION if "task_facts" in tables else 3)
        old, new = old + (version == 3), new + (version == SCHEMA_VERSION)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        home.open_store().database.close()  # whatever there was, the next one goes on
    else:
        raise AssertionError("the migration has more statements than were tried")
    assert old > 10 and new >= 1
