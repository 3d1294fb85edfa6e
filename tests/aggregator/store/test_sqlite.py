"""The aggregator's SQLite file: other versions, and who may write to it when."""

from __future__ import annotations

import multiprocessing
import sqlite3
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from aggregator.errors import AggregatorError, StoreAway
from aggregator.evaluation import Figure, as_json
from aggregator.store import SQLiteDatabase
from aggregator.store.rows import RoundRow
from aggregator.store.schema import SCHEMA_VERSION
from tests.fakes.homes import make_home
from tests.fakes.waiting import PATIENCE_SECONDS

_URL = "mqtt://127.0.0.1:1"


def test_a_store_of_an_earlier_release_gets_the_columns_that_it_lacks(tmp_path: Path) -> None:
    home = make_home(tmp_path, _URL)
    told = Figure("global", "hr10", "", 5, 50.0, 0, 0.5, 0.0, 0.5)
    store = home.open_store()
    with store.database.transaction():
        store.first.evaluations.put(3, 4, [told])
    store.database.close()
    connection = sqlite3.connect(home.database)
    present = {row[1] for row in connection.execute("PRAGMA table_info(figures)")}
    for name in sorted(present - FIGURES_OF_0_1_0):
        connection.execute(f"ALTER TABLE figures DROP COLUMN {name}")
    connection.close()
    for _ in range(2):
        store = home.open_store()
        (found,) = store.first.evaluations.latest()
        assert as_json(found.figures[0]) == as_json(told)
        with store.database.transaction():
            store.first.evaluations.put(3, 4, [told])
        store.database.close()


FIGURES_OF_0_1_0 = {
    *("task", "version", "round", "stage", "metric", "part", "devices", "samples", "capped"),
    *("value", "error_bound", "median", "deciles", "typical"),
}


@pytest.mark.parametrize(
    ("pragma", "message"),
    [
        (f"user_version = {SCHEMA_VERSION + 1}", "install the newer version that made it"),
        ("application_id = 0x54455353", "a development version made .* make the home anew"),
    ],
)
def test_a_file_of_another_version_is_refused_and_left_alone(
    tmp_path: Path, pragma: str, message: str
) -> None:
    path = make_home(tmp_path, _URL).database
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute(f"PRAGMA {pragma}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(AggregatorError, match=message):
        SQLiteDatabase(path)
    assert path.read_bytes() == before


def _write(path: Path, first: int, count: int, ready: Connection) -> None:
    """Another process: commits, and checkpoints after nearly each of them."""
    database = SQLiteDatabase(path)
    with database._file as connection:
        connection.execute("PRAGMA wal_autocheckpoint = 1")
    ready.send(None)
    ready.recv()
    for number in range(first, first + count):
        with database.transaction():
            database.execute("INSERT INTO refusals VALUES (?, ?)", (str(number) * 200, number))
        if number % 7 == 0:
            database.erase_deleted()
    database.close()


def test_processes_that_write_and_checkpoint_at_once_lose_nothing(tmp_path: Path) -> None:
    path = make_home(tmp_path, _URL).database
    context = multiprocessing.get_context("spawn")
    writers = []
    for place in range(3):
        ours, theirs = context.Pipe()
        process = context.Process(target=_write, args=(path, place * 1000, 150, theirs))
        process.start()
        writers.append((process, ours))
    for _, pipe in writers:
        pipe.recv()
    for _, pipe in writers:
        pipe.send(None)
    for process, _ in writers:
        process.join()
        assert process.exitcode == 0
    database = SQLiteDatabase(path)
    assert database.row("SELECT count(*) FROM refusals") == (450,)
    assert database.row("PRAGMA integrity_check") == ("ok",)
    database.close()


def test_no_checkpoint_meets_another_connection_s_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aggregator.store.sqlite._BUSY_SECONDS", 0.05)
    path = make_home(tmp_path, _URL).database
    one, other = SQLiteDatabase(path), SQLiteDatabase(path)
    with one.transaction():
        # Not even before the transaction has written anything, when SQLite's own lock is all that
        # it has: a checkpoint would go on without it.
        for write in (other.erase_deleted, lambda: other.execute("DELETE FROM refusals")):
            with pytest.raises(StoreAway, match="another process"):
                write()
    assert other.erase_deleted()
    other.execute("DELETE FROM refusals")
    one.close()
    other.close()


def test_flushes_reach_the_medium_on_systems_that_need_to_be_asked(tmp_path: Path) -> None:
    database = SQLiteDatabase(make_home(tmp_path, _URL).database)
    for pragma in ("fullfsync", "checkpoint_fullfsync"):
        assert database.row(f"PRAGMA {pragma}") == (1,)
    assert database.row("PRAGMA synchronous") == (2,)
    database.close()


def test_threads_that_ask_at_once_are_each_told_what_their_own_call_came_to(tmp_path: Path) -> None:
    home = make_home(tmp_path, _URL)
    store = home.open_store()
    asked, stopping = 0, threading.Event()
    errors: list[BaseException] = []

    def ask() -> None:
        nonlocal asked
        try:
            while not stopping.is_set():
                assert [row.number for row in store.tasks.all()] == [1]
                asked += 1
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    beside = threading.Thread(target=ask)
    beside.start()
    try:
        while asked < 300 and not errors:
            store.refusals.add({"late": 1})
            store.database.erase_deleted()
    finally:
        sys.setswitchinterval(interval)
        stopping.set()
        beside.join()
    assert not errors
    store.database.close()


def test_who_reads_on_keeps_nobody_from_writing(tmp_path: Path) -> None:
    """A query of many rows is not over when another process commits; and all hear of that."""
    home = make_home(tmp_path, _URL)
    one, other = home.open_store(), home.open_store()
    one.database.execute_many("INSERT INTO refusals VALUES (?, 1)", [(f"{n}",) for n in range(200)])
    reading = one.database.rows("SELECT * FROM refusals")
    next(reading)
    other.refusals.add({"elsewhere": 1})
    assert one.database.changed_elsewhere()
    one.refusals.add({"here": 1})
    assert len(list(reading)) == 199
    for each in (one, other):
        each.database.close()


def test_what_waits_for_a_commit_waits_for_that_of_its_own_thread(tmp_path: Path) -> None:
    store = make_home(tmp_path, _URL).open_store()
    kept: list[int] = []
    errors: list[BaseException] = []
    within, goes_on = threading.Event(), threading.Event()

    def one() -> None:
        with store.database.transaction():
            within.set()
            goes_on.wait(PATIENCE_SECONDS)
            store.database.when_kept(lambda: kept.append(1))

    def other() -> None:
        try:
            with store.database.transaction():
                store.database.when_kept(lambda: kept.append(2))
                assert 2 not in kept, "not before its commit"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=each) for each in (one, other)]
    threads[0].start()
    within.wait(PATIENCE_SECONDS)
    threads[1].start()
    threads[1].join(0.2)  # at the lock
    goes_on.set()
    for each in threads:
        each.join(PATIENCE_SECONDS)
    assert kept == [1, 2] and not errors
    store.database.close()


def test_a_versions_devices_are_counted_without_a_look_at_older_rounds(tmp_path: Path) -> None:
    home, rounds = make_home(tmp_path, _URL), 100
    store = home.open_store()
    ids = [bytes([each]) * 16 for each in range(100)]
    with store.database.transaction():
        for number in range(rounds):
            store.first.rounds.add(
                RoundRow(number, 1, number // 2, 1.0, 9.0, bytes(32), 2**64 - 1, 100, 2)
            )
            store.database.execute_many(
                "INSERT INTO verdicts (task, generation, round, device_id, body_sha256) "
                "VALUES (1, 1, ?, ?, ?)",
                [(number, each, bytes(32)) for each in ids[: 40 + number]],
            )
    store.database.close()
    connection, steps = sqlite3.connect(home.database), [0]
    statements: list[str] = []
    store = home.open_store()
    with store.database._file as own:  # type: ignore[attr-defined]
        own.set_trace_callback(statements.append)
        assert store.first.log.devices(5) == 51
        own.set_trace_callback(None)

    def count() -> int:
        steps[0] += 1
        return 0

    connection.set_progress_handler(count, 100)
    (asked,) = (each for each in statements if "verdicts" in each)
    assert connection.execute(asked).fetchall() == [(51,)]
    assert steps[0] < 50, "of two rounds of a hundred"
    connection.close()
    store.database.close()
