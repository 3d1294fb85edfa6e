"""Commands at the same moment: what one looked at is still so when it writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aggregator.home import AggregatorHome, is_served, serve_lock
from aggregator.serve.successor import WatchMove, ask_for_move, find_move, next_move
from aggregator.store import Store
from aggregator.store.rows import DeviceRow
from aggregator.task.file import read_task
from aggregator.task.request import ReplaceRequest, write_task_files
from device_sdk.link.broker_url import BrokerWay, parse_broker_url
from device_sdk.system.lock import FileLock
from tests.fakes.homes import command, make_home, serving
from tests.fakes.tasks import add_task, task_text
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

NAME = b"\x01" * 16


@pytest.fixture
def home(tmp_path: Path) -> AggregatorHome:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", "quorum = 1")
    store = home.open_store()
    store.devices.add(DeviceRow(NAME, NAME * 2, NAME, NAME * 2, 0, NAME[:8], 0, 1))
    store.database.close()
    add_task(home, "air", task_text(home, "air"))
    with serving(home):
        pass
    return home


def overtaken(
    home: AggregatorHome,
    monkeypatch: pytest.MonkeyPatch,
    first: Callable[[Store], object],
    *arguments: str,
) -> int:
    """Run a command that waits for another one's transaction, which does ``first``."""
    waits, result = threading.Event(), list[int]()
    acquire = FileLock.try_acquire

    def noticed(lock: FileLock) -> bool:
        if acquire(lock):
            return True
        waits.set()
        return False

    monkeypatch.setattr(FileLock, "try_acquire", noticed)
    store = home.open_store()
    thread = threading.Thread(target=lambda: result.append(command(home, *arguments)))
    with store.database.transaction():
        thread.start()
        assert waits.wait(10)
        first(store)
    thread.join(30)
    store.database.close()
    return result[0]


def test_labels_of_two_commands_are_both_kept(
    home: AggregatorHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def label(store: Store) -> None:
        store.devices.set_labels(NAME, {"site": "north"})

    arguments = ("devices", "label", NAME.hex(), "room=3")
    assert overtaken(home, monkeypatch, label, *arguments) == 0
    store = home.open_store()
    (row,) = store.devices.all()
    assert row.labels == {"site": "north", "room": "3"}
    store.database.close()


@pytest.mark.parametrize("action", [("move", "mqtt://c"), ("stay",)])
def test_who_moves_the_fleet_goes_on_from_where_it_was_just_sent(
    home: AggregatorHome, monkeypatch: pytest.MonkeyPatch, action: tuple[str, ...]
) -> None:
    """Devices may have heard of the other one's broker: serve is there, too, and its word newer."""
    named = read_task(home.task_file).fleet.broker.way
    there = [named.at(parse_broker_url(f"mqtt://{name}")) for name in "bd"]

    def move(store: Store, to: BrokerWay = there[0]) -> None:
        move = next_move(store, named, to.url.address, to, 2**40, time.time())
        ask_for_move(store, move)

    store = home.open_store()
    with store.database.transaction():
        move(store, there[1])
    before = find_move(store)
    assert overtaken(home, monkeypatch, move, "broker", *action) == 0
    found = find_move(store)
    store.database.close()
    assert found is not None and before is not None
    assert found.announced.revision == before.announced.revision + 2
    assert {named, *there} <= set(found.ways(named, 0.0))


def test_nothing_is_said_of_a_move_where_the_task_file_names_another_broker_since(
    home: AggregatorHome,
) -> None:
    store = home.open_store()
    named = read_task(home.task_file).fleet.broker.way
    moved, since = (named.at(parse_broker_url(f"mqtt://{name}")) for name in "bc")
    ask_for_move(store, next_move(store, named, "mqtt://b", moved, 2**40, time.time()))
    watch = WatchMove(store, named, time.time)
    assert watch.ways == (moved, named) and watch.announced is not None
    watch = WatchMove(store, since, time.time)
    assert watch.ways == (since,) and watch.announced is None
    store.database.close()


@pytest.mark.parametrize("wish", [("models", "--pin"), ("rollback", "--to")])
def test_a_version_is_of_no_use_when_its_model_was_just_dropped(
    home: AggregatorHome, monkeypatch: pytest.MonkeyPatch, wish: tuple[str, str]
) -> None:
    def drop(store: Store) -> None:
        store.database.execute("UPDATE versions SET model = NULL WHERE task = 1")

    assert overtaken(home, monkeypatch, drop, *wish, "0", "--task", "default") == 1
    store = home.open_store()
    versions = store.first.versions
    assert [each.pinned for each in versions.all()] == [False] and versions.awaited() is None
    store.database.close()


def test_of_two_commands_that_add_one_name_one_does(
    home: AggregatorHome,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine, other = tmp_path / "mine.toml", task_text(home, "other")
    mine.write_text(task_text(home, "mine", width=12))

    def add(store: Store) -> None:
        store.tasks.add("boats", "tasks/boats.toml", other)

    arguments = ("task", "add", "boats", "--from", str(mine))
    assert overtaken(home, monkeypatch, add, *arguments) == 1
    assert "there is a task 'boats' already" in capsys.readouterr().err
    store = home.open_store()
    assert [row.unwritten for row in store.tasks.all() if row.name == "boats"] == [other]
    store.database.close()


def test_a_task_is_replaced_when_its_file_is_written(home: AggregatorHome, tmp_path: Path) -> None:
    """Whoever edits the file after the command loses nothing: before, what was told last of serve's
    two steps was the first one."""
    other, store = tmp_path / "other.toml", home.open_store()
    other.write_text(task_text(home, "air", width=4))
    result = list[int]()
    arguments = ("task", "replace", "air", "--from", str(other), "--now")
    with serve_lock(home):
        thread = threading.Thread(target=lambda: result.append(command(home, *arguments)))
        thread.start()
        wait_until(lambda: store.tasks.find(2).request is not None)
        row = store.tasks.find(2)
        assert row.request is not None
        text = ReplaceRequest.read(row.request).text
        with store.database.transaction():
            store.tasks.change(2, unwritten=text)
            store.tasks.change(2, served=text)
            store.tasks.change(2, request=None)
        thread.join(0.5)
        assert thread.is_alive(), "the file is not written yet"
        write_task_files(home.folder, store)
        thread.join(PATIENCE_SECONDS)
    assert result == [0]
    store.database.close()


@pytest.mark.parametrize("action", ["pause", "resume", "replace"])
def test_a_task_that_is_being_retired_stays_so(
    home: AggregatorHome,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    action: str,
) -> None:
    def retire(store: Store) -> None:
        store.tasks.change(2, state="retiring")

    more = ["--from", str(home.folder / "tasks" / "air.toml")] if action == "replace" else []
    assert overtaken(home, monkeypatch, retire, "task", action, "air", *more) == 1
    assert "is being retired" in capsys.readouterr().err
    store = home.open_store()
    row = store.tasks.find(2)
    assert (row.state, row.request) == ("retiring", None)
    store.database.close()


def test_whoever_looks_whether_serve_runs_is_not_taken_for_it(tmp_path: Path) -> None:
    """A status beside the start of a coordinator, say, each of which looks."""
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", "quorum = 1")
    looked = [is_served(home)]

    def look() -> None:
        looked.extend(is_served(home) for _ in range(2000))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not any(looked)
    with serve_lock(home):
        assert is_served(home)
    assert not is_served(home)
