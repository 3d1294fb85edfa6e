"""What every store promises, whichever engine keeps it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import psycopg
import pytest

from aggregator import home as home_module
from aggregator import home as homes
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.keys.folder import initialise
from aggregator.store import Database, Store
from aggregator.store.rows import DeviceRow, LoggedUpdate
from aggregator.store.schema import TABLES, Shape
from device_sdk.system.files import erase_file
from device_sdk.wire.seal.broadcast import GroupKey
from tests.fakes.homes import make_home
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until
from tests.servers.fixtures import MakeDatabase

_URL = "mqtt://127.0.0.1:1"
_SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def home(tmp_path: Path, store_url: str | None) -> AggregatorHome:
    return make_home(tmp_path, _URL, store_url=store_url)


@pytest.fixture
def store(home: AggregatorHome) -> Iterator[Store]:
    opened = home.open_store()
    yield opened
    opened.database.close()


@contextmanager
def process(
    work: Callable[..., None], home: AggregatorHome, *more: Any
) -> Iterator[tuple[SpawnProcess, Connection]]:
    """Another process at work on the same store, once it said that it is ready."""
    ours, theirs = _SPAWN.Pipe()
    started = _SPAWN.Process(target=work, args=(home.folder, home.store_url, theirs, *more))
    started.start()
    theirs.close()  # so that its end is heard
    ours.recv()
    try:
        yield started, ours
    finally:
        started.join(PATIENCE_SECONDS)


def test_a_transaction_within_another_is_kept_with_it_or_taken_back_alone(store: Store) -> None:
    other = store.task(store.tasks.add("air", "tasks/air.toml", ""))
    with pytest.raises(LookupError), store.database.transaction():
        with store.database.transaction():
            other.facts.label = "inner"
        assert other.facts.label == "inner"
        raise LookupError
    assert other.facts.label is None, "what ended within went with the one around it"
    with store.database.transaction():
        store.tasks.change(other.number, file="outer")
        with pytest.raises(LookupError), store.database.transaction():
            other.facts.label = "inner"
            with store.database.transaction():
                store.tasks.change(other.number, file="innermost")
            raise LookupError
    assert (other.facts.label, store.tasks.find(other.number).file) == (None, "outer")


def test_one_that_is_to_be_alone_does_not_begin_within_a_shared_one(store: Store) -> None:
    with store.database.transaction(shared=True):
        with store.database.transaction(shared=True):
            store.refusals.add({"inner": 1})
        with pytest.raises(RuntimeError, match="alone"), store.database.transaction():
            pass
    with store.database.transaction(), store.database.transaction(shared=True):
        store.refusals.add({"inner": 1})
    with store.database.transaction():  # what the last one was is forgotten
        store.refusals.add({"inner": 1})
    assert store.refusals.all() == {"inner": 3}


def test_what_waits_for_a_commit_is_done_after_it_and_never_without(store: Store) -> None:
    done: list[str] = []
    when_kept = store.database.when_kept
    when_kept(lambda: done.append("outside"))
    assert done == ["outside"]
    with store.database.transaction(shared=True):
        with store.database.transaction(shared=True):
            when_kept(lambda: done.append("inner"))
        with pytest.raises(LookupError), store.database.transaction(shared=True):
            when_kept(lambda: done.append("taken back"))
            raise LookupError
        when_kept(lambda: done.append("outer"))
        assert done == ["outside"]
    assert done == ["outside", "inner", "outer"]
    with pytest.raises(LookupError), store.database.transaction():
        when_kept(lambda: done.append("rolled back"))
        raise LookupError
    with store.database.transaction():
        pass
    assert done == ["outside", "inner", "outer"]


def test_a_row_is_held_within_a_transaction_alone(store: Store) -> None:
    query = "SELECT count FROM refusals WHERE reason = ?"
    with pytest.raises(RuntimeError, match="transaction"):
        store.database.hold(query, ("late",))
    store.refusals.add({"late": 4})
    with store.database.transaction(shared=True):
        assert store.database.hold(query, ("late",)) == (4,)
        assert store.database.hold(query, ("late",), shared=True) == (4,)
        assert store.database.hold(query, ("never",)) is None


def test_the_store_s_clock_is_unix_time_and_goes_on(store: Store) -> None:
    first = store.database.now()
    assert abs(first - time.time()) < 60.0
    wait_until(lambda: store.database.now() > first)


def test_every_kind_of_single_value_comes_back_as_it_was(store: Store) -> None:
    for value in (0, -1, 2**63 - 1, -(2**63), 0.0, -1.5, 1e-300, "", "é\n", b"", bytes(range(256))):
        store.facts.put("any", value)
        found = store.facts.get("any")
        assert (type(found), found) == (type(value), value)


def test_a_change_elsewhere_is_noticed_once_and_one_s_own_is_none(
    home: AggregatorHome, store: Store
) -> None:
    other = home.open_store()
    store.database.changed_elsewhere()
    store.refusals.add({"late": 1})
    assert not store.database.changed_elsewhere()
    other.refusals.add({"late": 1})
    wait_until(store.database.changed_elsewhere)
    assert not store.database.changed_elsewhere()
    with other.database.transaction():
        other.refusals.add({"late": 1})
        assert not store.database.changed_elsewhere(), "nothing is committed yet"
    wait_until(store.database.changed_elsewhere)
    # The first commit of ours that follows does not hide another's.
    other.refusals.add({"late": 1})
    store.refusals.add({"late": 1})
    wait_until(store.database.changed_elsewhere)
    other.database.close()


def test_a_transaction_waits_for_another_process_s(home: AggregatorHome, store: Store) -> None:
    with process(_hold, home) as (_, pipe):
        pipe.send(None)
        store.refusals.add({"late": 1})
        ended = time.monotonic()
        assert pipe.recv() <= ended, "it was let in before the other had ended"
    assert store.refusals.all() == {"first": 1, "late": 1}


def _hold(folder: Path, url: str | None, ready: Connection) -> None:
    store = AggregatorHome(folder, url).open_store()
    with store.database.transaction():
        store.refusals.add({"first": 1})
        ready.send(None)
        ready.recv()
        time.sleep(0.5)
        ready.send(time.monotonic())
    store.database.close()


def test_two_that_read_and_write_by_turns_lose_nothing(home: AggregatorHome, store: Store) -> None:
    with process(_count, home) as (_, pipe):
        pipe.send(None)
        for _ in range(100):
            with store.database.transaction():
                store.facts.openings += 1
    assert store.facts.openings == 200


def _count(folder: Path, url: str | None, ready: Connection) -> None:
    store = AggregatorHome(folder, url).open_store()
    ready.send(None)
    ready.recv()
    for _ in range(100):
        with store.database.transaction():
            store.facts.openings += 1
    store.database.close()


def test_shared_writers_of_the_same_rows_lose_nothing(home: AggregatorHome, store: Store) -> None:
    with process(_refuse, home, ("c", "b", "a")) as (_, pipe), process(_refuse, home, "bad") as two:
        for each in (pipe, two[1]):
            each.send(None)
        _add(store, "abcd")
    assert store.refusals.all() == {"a": 120, "b": 120, "c": 80, "d": 80}


def _refuse(folder: Path, url: str | None, ready: Connection, reasons: tuple[str, ...]) -> None:
    store = AggregatorHome(folder, url).open_store()
    ready.send(None)
    ready.recv()
    _add(store, reasons)
    store.database.close()


def _add(store: Store, reasons: str | tuple[str, ...]) -> None:
    for _ in range(40):
        with store.database.transaction(shared=True):
            store.refusals.add(dict.fromkeys(reasons, 1))


def test_a_writer_killed_in_the_midst_leaves_all_of_what_it_said_was_kept(
    home: AggregatorHome, store: Store
) -> None:
    heard: list[int] = []
    with process(_commit_for_ever, home) as (writer, pipe):
        pipe.send(None)
        while len(heard) < 30:
            heard.append(pipe.recv())
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(PATIENCE_SECONDS)
        with pytest.raises(EOFError):
            while True:
                heard.append(pipe.recv())
    # Nobody has to wait for what the dead one held.
    with store.database.transaction():
        kept = store.refusals.all()
    count = kept["one"]
    assert kept == {"one": count, "other": count} and heard[-1] <= count <= heard[-1] + 1


def _commit_for_ever(folder: Path, url: str | None, ready: Connection) -> None:
    store = AggregatorHome(folder, url).open_store()
    ready.send(None)
    ready.recv()
    number = 0
    while True:
        with store.database.transaction():
            store.refusals.add({"one": 1})
            store.refusals.add({"other": 1})
        number += 1
        ready.send(number)


def test_a_home_is_made_once_and_opened_where_its_store_is(
    home: AggregatorHome, tmp_path: Path
) -> None:
    with pytest.raises(AggregatorError, match="holds an aggregator already"):
        initialise(AggregatorHome(home.folder, home.store_url), 1, os.urandom)
    elsewhere = None if home.store_url else "postgresql://127.0.0.1:1/none"
    with pytest.raises(AggregatorError, match="in PostgreSQL"):
        AggregatorHome(home.folder, elsewhere).open_store()


def test_a_home_with_a_file_moves_to_a_database(
    tmp_path: Path, make_database: MakeDatabase
) -> None:
    home = make_home(tmp_path, _URL)
    before = home.open_store()
    before.refusals.add({"late": 3})
    root = before.facts.root_fingerprint
    before.database.close()
    moved = AggregatorHome(home.folder, make_database())
    moved.move_store()
    with pytest.raises(AggregatorError, match="already"):
        moved.move_store()
    store = moved.open_store()
    assert store.refusals.all() == {"late": 3} and store.facts.root_fingerprint == root
    assert store.tasks.add("air", "tasks/air.toml", "") == 2
    store.database.close()
    with pytest.raises(AggregatorError, match="in PostgreSQL"):
        home.open_store()
    assert sorted(each.name for each in home.folder.glob("aggregator.sqlite*")) == []
    moved.move_store_back()
    store = home.open_store()
    assert store.refusals.all() == {"late": 3} and store.tasks.named("air") is not None
    store.database.close()
    with pytest.raises(AggregatorError, match="already"):
        home.move_store_back()
    assert sorted(each.name for each in home.folder.glob("*.new*")) == []
    for said in (b"of a copy of the home", b"\xff\0"):
        home.store_identity.write_bytes(said)
        with pytest.raises(AggregatorError, match="another fleet's"):
            moved.open_store()
    home.store_identity.unlink()
    os.mkfifo(home.store_identity)
    with pytest.raises(OSError, match="not a regular file"):
        moved.open_store()


_SECRETS = (b"admission".ljust(32, b"k"), b"group".ljust(32, b"k"), b"a body" * 900)


def _with_secrets(folder: Path) -> AggregatorHome:
    """A home of whose file's journal and free pages something is left, too."""
    home = make_home(folder, _URL)
    store = home.open_store()
    admission, group, body = _SECRETS
    row = DeviceRow(bytes(16), bytes(32), bytes(16), admission, 0, bytes(16), 0, 1)
    with store.database.transaction():
        store.devices.add(row)
        store.secrets.add_group_key(GroupKey(7, group))
        store.first.log.append([LoggedUpdate(1, 1, bytes(16), 0.0, body)], [])
    store.database.close()
    return home


def _remains(home: AggregatorHome) -> list[str]:
    """What of the secrets lies in which file."""
    found = []
    for path in sorted(home.folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        found += [f"{path.name}: {each[:9]!r}" for each in _SECRETS if each[:32] in content]
    return found


def test_nothing_of_a_store_that_moved_stays_behind(
    tmp_path: Path, make_database: MakeDatabase
) -> None:
    home = _with_secrets(tmp_path)
    assert _remains(home)
    moved = AggregatorHome(home.folder, make_database())
    # Somebody reads beside it: the journal is not moved into the file.
    reader = home.open_store()
    found = reader.database.rows("SELECT body FROM updates")
    moved.move_store()
    assert _remains(home) == [] and list(home.folder.glob("aggregator.sqlite*")) == []
    found.close()  # type: ignore[attr-defined]
    reader.database.close()
    store = moved.open_store()
    assert next(iter(store.devices.all())).admission_key == _SECRETS[0]
    store.database.close()
    with pytest.raises(AggregatorError, match=r"its store in PostgreSQL at .* name it as store"):
        home.open_store()
    assert moved.store_identity.stat().st_mode & 0o777 == 0o600
    moved.move_store_back()
    store = home.open_store()
    assert next(store.first.log.after(0)).body == _SECRETS[2]
    store.database.close()
    assert home.database.stat().st_mode & 0o777 == 0o600
    with psycopg.connect(str(moved.store_url)) as connection:
        for table in TABLES:
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table


def _die_at(folder: Path, url: str, back: bool, step: int) -> None:
    """Move, and be killed at the nth step that can be seen on the disk."""
    steps = iter(range(step))

    def dying(done: Any) -> Any:
        def do(*given: Any, **more: Any) -> Any:
            # What is not there is not erased.
            if (done is not erase_file or given[0].exists()) and next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return done(*given, **more)

        return do

    home = AggregatorHome(folder, url)
    for owner, name in (
        (home_module, "erase_file"),
        (home_module, "write_atomically"),
        (Path, "touch"),
        (Path, "rename"),
    ):
        setattr(owner, name, dying(getattr(owner, name)))
    home.move_store_back() if back else home.move_store()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("back", [False, True])
def test_a_move_that_is_killed_anywhere_leaves_one_store_and_no_other(
    tmp_path: Path, make_database: MakeDatabase, back: bool
) -> None:
    for step in range(12):
        home, url = _with_secrets(tmp_path / str(step)), make_database()
        there = AggregatorHome(home.folder, url)
        if back:
            there.move_store()
        killed = _SPAWN.Process(target=_die_at, args=(home.folder, url, back, step))
        killed.start()
        killed.join(PATIENCE_SECONDS)
        moved = home.store_identity.exists()
        store = (there if moved else home).open_store()
        assert next(iter(store.devices.all())).admission_key == _SECRETS[0]
        store.database.close()
        assert bool(_remains(home)) is not moved
        if killed.exitcode == 0:
            assert step > 2 and moved is not back
            return
        assert killed.exitcode == -signal.SIGKILL
    raise AssertionError("it never came to its end")


def _move_and_die(folder: Path, url: str) -> None:
    rows = homes._rows

    def dying(source: Database, target: Database, table: str, shape: Shape) -> Any:
        if table == "refusals":
            os.kill(os.getpid(), signal.SIGKILL)
        return rows(source, target, table, shape)

    homes._rows = dying
    AggregatorHome(folder, url).move_store()


def test_a_move_that_was_killed_is_done_again(tmp_path: Path, make_database: MakeDatabase) -> None:
    home, url = make_home(tmp_path, _URL), make_database()
    killed = _SPAWN.Process(target=_move_and_die, args=(home.folder, url))
    killed.start()
    killed.join(PATIENCE_SECONDS)
    assert killed.exitcode == -signal.SIGKILL
    store = home.open_store()
    store.refusals.add({"late": 3})
    store.database.close()
    moved = AggregatorHome(home.folder, url)
    moved.move_store()
    store = moved.open_store()
    assert store.refusals.all() == {"late": 3}
    store.database.close()


def test_a_thread_beside_the_one_that_opened_it_may_ask(store: Store) -> None:
    found: list[dict[str, int]] = []
    thread = threading.Thread(target=lambda: found.append(store.refusals.all()))
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert found == [{}]
