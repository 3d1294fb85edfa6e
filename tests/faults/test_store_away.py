"""A store that is away, whenever and for however long, ends no serve, and nothing is lost by it."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from aggregator.home import serve_lock
from aggregator.serve.alone import serve_alone
from aggregator.serve.assembly import World
from aggregator.task.file import read_task
from device_sdk import Device
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK
from tests.fakes.homes import ServeProcess, command, invite, make_home
from tests.fakes.threads import on_thread
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until
from tests.servers.fixtures import MakeDatabase
from tests.servers.postgres import PostgresServer

ROUND = "least_deadline_seconds = 0.05\npause_seconds = 0.0"


def test_serve_waits_for_its_store_whatever_it_was_doing_and_says_so(
    tmp_path: Path,
    make_mosquitto: MakeMosquitto,
    make_database: MakeDatabase,
    postgres: PostgresServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """PostgreSQL is away when serve starts, then ended in each way in the midst of rounds."""
    broker, url = make_mosquitto(), make_database()
    home = make_home(tmp_path, broker.url, ROUND, f'[cluster]\nstore = "{url}"', store_url=url)
    (code,) = invite(home)
    serve = ServeProcess(home)

    def said(*options: str) -> str:
        command(home, "status", *options)
        out, err = capsys.readouterr()
        return out + err

    postgres.stop()
    serve.start()
    wait_until(
        lambda: "serve waits for its store" in (text := said()) and "cannot be reached" in text
    )
    postgres.start()
    serve.await_connections(1)
    with Device.enrol(
        broker.url,
        code,
        tmp_path / "device",
        timeout_seconds=PATIENCE_SECONDS,
        link_settings=QUICK,
    ) as device:
        device.record_all((f"item-{row}", "anna") for row in range(5))
        device.start()

        def await_rounds(more: int = 2) -> None:
            wanted = (device.status().receipted_round or 0) + more
            wait_until(
                lambda: (device.status().receipted_round or 0) >= wanted, serve.log.read_text
            )

        await_rounds()
        rng = np.random.default_rng(7)
        for end in (postgres.stop, postgres.crash, postgres.kill, postgres.crash):
            time.sleep(rng.uniform(0.0, 0.5))  # whatever it does then
            end()
            postgres.start()
            assert serve.ended() is None, serve.log.read_text()
            await_rounds()
        assert f"runs, connected to {broker.url} for" in said()
        broker.stop()
        wait_until(lambda: "not connected to its broker" in said())
        assert json.loads(said("--json"))["serve"]["connected"] is False
        postgres.stop()
        wait_until(lambda: "serve waits for its store" in said())
        assert serve.stop() == 0, "it can be stopped meanwhile"
        postgres.start()
        broker.start()
        serve.start()
        await_rounds()
        device.stop()
        assert serve.stop() == 0
    assert "the store is there again, after" in serve.log.read_text()
    assert "problem      serve does not run" in said()
    name = url.rpartition("/")[2]
    ((counted,),) = postgres.run("SELECT count(*) FROM verdicts WHERE reason IS NULL", name)
    ((closed, waiting),) = postgres.run(
        "SELECT coalesce(sum(participants), 0), (SELECT count(*) FROM updates) FROM rounds", name
    )
    assert counted == closed + waiting, "each is in exactly one version"


@pytest.mark.exhaustive
def test_a_renewed_password_and_a_server_that_stands_still_need_no_restart(
    tmp_path: Path,
    make_mosquitto: MakeMosquitto,
    make_database: MakeDatabase,
    postgres: PostgresServer,
) -> None:
    """Serve starts with a password that is refused, gets the right one by the task file, loses it
    to a newer one, and is told that; then the server freezes, and serve ends when it is told to."""
    broker, url = make_mosquitto(), make_database()
    role = f"renewed_{os.getpid()}"
    hba = Path(postgres.run("SHOW hba_file")[0][0])
    hba.write_text(f"host all {role} 127.0.0.1/32 scram-sha-256\n{hba.read_text()}")
    postgres.run(f"CREATE ROLE {role} SUPERUSER LOGIN PASSWORD 'one'")
    postgres.run("SELECT pg_reload_conf()")
    named = [url.replace("tessera@", f"{role}:{word}@") for word in ("none", "one", "two")]
    home = make_home(tmp_path, broker.url, ROUND, f'[cluster]\nstore = "{url}"', store_url=url)
    serve = ServeProcess(home)

    def name(url: str, instead: str) -> None:
        home.task_file.write_text(home.task_file.read_text().replace(instead, url))

    def said() -> str:
        return home.live_file.read_text() if home.live_file.exists() else ""

    name(named[0], url)
    serve.start()
    try:
        wait_until(lambda: "does not let us in" in said(), serve.log.read_text)
        name(named[1], named[0])
        serve.await_connections(1)
        wait_until(lambda: '"store_problem": ""' in said(), said)
        postgres.run(f"ALTER ROLE {role} PASSWORD 'two'")
        postgres.run(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'"
        )
        wait_until(lambda: "does not let us in" in said(), serve.log.read_text)
        name(named[2], named[1])
        wait_until(lambda: '"store_problem": ""' in said(), said)
        with postgres.frozen():
            wait_until(lambda: "does not answer" in said(), serve.log.read_text)
        wait_until(lambda: '"store_problem": ""' in said(), said)
        with postgres.frozen():
            wait_until(lambda: "does not answer" in said(), serve.log.read_text)
            assert serve.stop() == 0, serve.log.read_text()
    finally:
        serve.kill()
    log = serve.log.read_text()
    assert log.count("the store is away") >= 3 and "there again" in log
    assert "one@" not in log and "two@" not in log


def test_a_file_that_another_program_holds_is_waited_for_too(
    tmp_path: Path,
    make_mosquitto: MakeMosquitto,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A backup's or an editor's transaction, for longer than a writer waits."""
    monkeypatch.setattr("aggregator.store.sqlite._BUSY_SECONDS", 0.1)
    home = make_home(tmp_path, make_mosquitto().url, ROUND)

    def serve(ready: Callable[[None], None], stopping: Callable[[], bool]) -> None:
        world = World(time.monotonic, time.time, np.random.default_rng(3), os.urandom)
        ready(None)
        with serve_lock(home):
            serve_alone(home, read_task(home.task_file), world, stopping)

    def said() -> str:
        command(home, "status")
        return capsys.readouterr().out

    with closing(sqlite3.connect(home.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with on_thread(serve):
            wait_until(lambda: "another process has been writing to it for long" in said())
            other.execute("ROLLBACK")
            wait_until(lambda: "runs, connected" in (text := said()) and "its store" not in text)
