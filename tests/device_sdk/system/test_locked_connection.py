"""An SQLite connection is had with its lock, or not at all."""

from __future__ import annotations

import threading
from pathlib import Path

from device_sdk.system.lock import LockedConnection
from tests.fakes.waiting import PATIENCE_SECONDS


def test_a_thread_waits_for_the_one_that_has_the_connection(tmp_path: Path) -> None:
    file = LockedConnection(tmp_path / "file.sqlite")
    came: list[int] = []
    begun = threading.Event()

    def count() -> None:
        begun.set()
        row = file.row("SELECT count(*) FROM seen")
        assert row is not None
        came.append(row[0])

    other = threading.Thread(target=count)
    with file as sql:
        sql.execute("CREATE TABLE seen (one INTEGER)")
        other.start()
        assert begun.wait(PATIENCE_SECONDS)
        with file as again:
            again.execute("INSERT INTO seen VALUES (1)")
        assert came == []
        sql.execute("INSERT INTO seen VALUES (2)")
    other.join(PATIENCE_SECONDS)
    assert came == [2]
    file.close()
