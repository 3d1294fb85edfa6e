"""The aggregator's SQLite file: older formats, and who may write to it when."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from aggregator.errors import AggregatorError, StoreAway
from aggregator.store import SQLiteDatabase, Store
from aggregator.store.checkpoints import pack_state, unpack_state
from aggregator.store.participations import LastParticipation
from aggregator.store.schema import SCHEMA_VERSION
from device_sdk.artifact import safetensors
from tests.fakes.homes import make_home

_URL = "mqtt://127.0.0.1:1"
# What each version added, undone: the newest first.
_UNDO = {
    11: "ALTER TABLE reports DROP COLUMN items; ALTER TABLE reports DROP COLUMN unknown_items; "
    "DROP TABLE clashes;",
    10: "CREATE TABLE arrivals (task INTEGER NOT NULL, round INTEGER NOT NULL, "
    "slot INTEGER NOT NULL, commits INTEGER NOT NULL, seconds BLOB NOT NULL, "
    "PRIMARY KEY (task, round, slot, commits)) STRICT; "
    "ALTER TABLE rounds ADD COLUMN arrivals BLOB; ALTER TABLE rounds DROP COLUMN took_seconds;",
    9: "ALTER TABLE verdicts DROP COLUMN seconds; DROP TABLE habits; DROP TABLE sightings; "
    "DROP TABLE late_arrivals; CREATE TABLE late_arrivals (task INTEGER NOT NULL, "
    "round INTEGER NOT NULL, device_id BLOB NOT NULL, seconds REAL NOT NULL, "
    "PRIMARY KEY (task, round, device_id)) STRICT, WITHOUT ROWID; "
    "ALTER TABLE figures DROP COLUMN typical;",
    8: "ALTER TABLE workers DROP COLUMN connected;",
    7: "DROP TABLE arrivals; ALTER TABLE shares ADD COLUMN arrivals BLOB NOT NULL DEFAULT x'';",
    6: "DROP TABLE lease; DROP TABLE workers; DROP TABLE shares; DROP TABLE freshness; "
    "DROP TABLE device_changes; DROP TABLE late_arrivals;",
    5: """
DROP TABLE participations;
ALTER TABLE devices ADD COLUMN last_counted_unix INTEGER;
ALTER TABLE devices ADD COLUMN last_width INTEGER;
ALTER TABLE devices ADD COLUMN last_report_unix INTEGER;
ALTER TABLE devices ADD COLUMN last_report BLOB;
""",
    4: """
DROP INDEX remembered;
DROP TABLE rounds; DROP TABLE updates; DROP TABLE verdicts; DROP TABLE checkpoints;
DROP TABLE publications; DROP TABLE tasks; DROP TABLE task_facts;
DROP TABLE versions; DROP TABLE device_evaluations; DROP TABLE figures;
DROP TABLE reports;
ALTER TABLE devices DROP COLUMN labels; ALTER TABLE devices DROP COLUMN name;
ALTER TABLE devices DROP COLUMN last_report_unix; ALTER TABLE devices DROP COLUMN last_report;
ALTER TABLE tokens DROP COLUMN name; ALTER TABLE tokens DROP COLUMN labels;
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY, generation INTEGER NOT NULL, version INTEGER NOT NULL,
    opened_unix REAL NOT NULL, deadline_unix REAL NOT NULL, seed BLOB NOT NULL,
    threshold BLOB NOT NULL, expected INTEGER NOT NULL, items INTEGER NOT NULL, closed_unix REAL,
    next_version INTEGER, participants INTEGER, metrics TEXT, arrivals BLOB, held TEXT,
    forgotten INTEGER NOT NULL DEFAULT 0, closed_served_seconds REAL
) STRICT;
CREATE INDEX remembered ON rounds (round) WHERE forgotten = 0;
CREATE TABLE updates (
    seq INTEGER PRIMARY KEY, round INTEGER NOT NULL, device_id BLOB NOT NULL,
    arrived_seconds REAL NOT NULL, quarantined TEXT, body BLOB NOT NULL
) STRICT;
CREATE TABLE verdicts (
    generation INTEGER NOT NULL, round INTEGER NOT NULL, device_id BLOB NOT NULL,
    body_sha256 BLOB NOT NULL, reason TEXT, PRIMARY KEY (generation, round, device_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE checkpoints (
    kind TEXT PRIMARY KEY, round INTEGER NOT NULL, seq INTEGER NOT NULL,
    version INTEGER NOT NULL, state BLOB NOT NULL
) STRICT;
CREATE TABLE publications (
    topic TEXT PRIMARY KEY, part TEXT NOT NULL, place INTEGER NOT NULL, message BLOB
) STRICT;
""",
    3: "",
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
    store = Store(SQLiteDatabase(path))
    assert store.first.rounds.latest() == [] and store.facts.served_seconds == 0.0
    store.database.close()
    assert _shape(path) == new


def test_what_a_device_did_last_is_of_the_task_whose_round_it_told_of(tmp_path: Path) -> None:
    path = make_home(tmp_path, _URL).database
    _set_back(path, 4)
    connection = sqlite3.connect(path)
    connection.execute(
        "INSERT INTO tasks (task, name, state, file) VALUES (2, 'air', 'active', '')"
    )
    for name in (b"a", b"b", b"c"):
        connection.execute(
            "INSERT INTO devices VALUES (?1, ?1, ?1, ?1, 0, ?1, 0, 1, NULL, '{}', NULL, ?2, 8, ?2, "
            "?3)",
            (name, None if name == b"c" else 77, None if name == b"c" else b"told " + name),
        )
    for task, number, opening in ((1, 4, 5), (1, 5, 7), (2, 3, 6)):
        connection.execute(
            "INSERT INTO rounds (task, round, generation, version, opened_unix, deadline_unix, "
            "seed, threshold, expected, items, opening) "
            "VALUES (?, ?, 1, 0, 0.0, 0.0, x'', x'', 3, 0, ?)",
            (task, number, opening),
        )
    for task, number in ((1, 4), (2, 3)):
        connection.execute(
            "INSERT INTO reports (task, generation, round, device_id, outcome, reason) "
            "VALUES (?, 1, ?, CAST('a' AS BLOB), 'trained', '')",
            (task, number),
        )
    connection.commit()
    connection.close()
    store = Store(SQLiteDatabase(path))
    # Of b, no round is left that it told of: it is taken for the first task's.
    assert store.first.participations.all() == {b"b": LastParticipation(77, 8, 77, None, b"told b")}
    assert store.task(2).participations.all() == {b"a": LastParticipation(77, 8, 77, 3, b"told a")}
    assert [row.device_id for row in store.devices.all()] == [b"a", b"b", b"c"]
    store.database.close()


def test_a_checkpoint_of_an_older_version_is_read_and_replaced_by_one_of_this(
    tmp_path: Path,
) -> None:
    path = make_home(tmp_path, _URL).database
    _set_back(path, 2)
    connection = sqlite3.connect(path)
    written = Path(__file__).with_name("checkpoint-version-2.bin").read_bytes()
    connection.execute("INSERT INTO checkpoints VALUES ('version', 7, 0, 5, ?)", (written,))
    connection.commit()
    connection.close()
    store = Store(SQLiteDatabase(path))
    for _ in range(2):
        found = store.first.checkpoints.get("version")
        assert found is not None and (found.round, found.version) == (7, 5)
        wanted = unpack_state(written)
        assert found.state.keys() == wanted.keys()
        for name, array in wanted.items():
            each = found.state[name]
            assert (each.dtype, each.shape) == (array.dtype, array.shape)
            assert each.tobytes() == array.tobytes() and each.flags.writeable
        with store.database.transaction():
            store.first.checkpoints.put(found)
    row = store.database.row("SELECT state FROM checkpoints")
    assert row is not None and safetensors.decode(row[0]).tensors.keys() == wanted.keys()
    for damaged in (row[0][:-1], row[0][:20], written[:-1], written[:9]):
        with pytest.raises(ValueError):
            unpack_state(damaged)
    assert unpack_state(pack_state({})) == unpack_state(b"") == {}
    store.database.close()


def test_what_an_older_version_deleted_is_in_no_byte_of_the_file_it_becomes(tmp_path: Path) -> None:
    path = make_home(tmp_path, _URL).database
    _set_back(path, 1)
    body = os.urandom(200_000)  # of more pages than the newer format's own rows take
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute("INSERT INTO updates VALUES (1, 1, x'00', 0.0, NULL, ?)", (body,))
    connection.commit()
    connection.execute("DELETE FROM updates")
    connection.commit()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    probes = [body[at : at + 64] for at in range(0, len(body), 1000)]
    assert sum(each in path.read_bytes() for each in probes) > 100
    database = SQLiteDatabase(path)
    assert database.erase_deleted()  # what serve does as it starts
    for each in path.parent.glob(f"{path.name}*"):
        found = each.read_bytes()
        assert not any(probe in found for probe in probes)
    database.close()


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = make_home(tmp_path, _URL).database
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(AggregatorError, match="install a newer one"):
        SQLiteDatabase(path)


def _write(path: Path, first: int, count: int, ready: Connection) -> None:
    """Another process: commits, and checkpoints after nearly each of them."""
    database = SQLiteDatabase(path)
    database._connection.execute("PRAGMA wal_autocheckpoint = 1")
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
