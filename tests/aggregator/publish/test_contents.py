"""Artifacts and catalogues at the broker: the fleet's, each with the tasks that use it."""

from __future__ import annotations

from pathlib import Path

from aggregator.store.facts import PublishedContent
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
