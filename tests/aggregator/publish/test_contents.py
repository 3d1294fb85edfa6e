"""Artifacts and catalogues at the broker: the fleet's, each with the tasks that use it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from aggregator.serve.assembly import World, assemble
from aggregator.serve.service import Service
from aggregator.store.devices import DeviceRow
from aggregator.store.publications import PublishedContent
from aggregator.task.file import read_task
from tests.fakes.homes import make_home


def test_users_are_counted_and_what_nobody_uses_is_cleared(tmp_path: Path) -> None:
    store = make_home(tmp_path, "mqtt://127.0.0.1:1").open_store()
    contents = store.contents
    with store.database.transaction():
        contents.put("aa", PublishedContent((1,), 1, "x"), [("t/aa/0", b"a"), ("t/aa/1", b"b")])
        contents.put("aa", PublishedContent((1, 2), 1, "x"), None)
        contents.put("bb", PublishedContent((2,), 1, "x"), [("t/bb/0", b"c")])
    assert contents.take_replaced() == ["t/aa/0", "t/aa/1", "t/bb/0"]
    assert contents.used_by(1) == {b"\xaa"} and contents.used_by(2) == {b"\xaa", b"\xbb"}
    with store.database.transaction():
        contents.keep(2, ())
    assert contents.all() == {"aa": PublishedContent((1,), 1, "x")}
    assert store.retained.topics() == ["t/aa/0", "t/aa/1"]
    assert store.retained.superseded() == ["t/bb/0"]
    store.database.close()


def test_what_a_version_before_published_for_one_task_is_replaced(tmp_path: Path) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", "quorum = 1")
    store = home.open_store()
    with store.database.transaction():
        store.devices.add(DeviceRow(b"a" * 16, b"a" * 32, b"a" * 16, b"k" * 32, 0, b"t" * 8, 0, 1))
        store.first.facts.sealed_contents = "1 signer ids"
        store.first.publications.replace("contents", [("tessera/all/chunk/old/0", b"old")])
    store.database.close()
    world = World(time.monotonic, time.time, np.random.default_rng(1))
    parts = assemble(home, home.open_store(), read_task(home.task_file), world)
    Service(parts)._tick()
    store = parts.store
    assert store.retained.superseded() == ["tessera/all/chunk/old/0"]
    assert store.first.facts.sealed_contents == ""
    assert {each.tasks for each in store.contents.all().values()} == {(1,)}
    assert len(store.contents.used_by(1)) == 1, "the catalogue"
    store.database.close()
