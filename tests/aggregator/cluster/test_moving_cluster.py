"""A cluster moves to another broker as one process does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from aggregator.cluster.orders import Post
from aggregator.cluster.serve import coordinate
from aggregator.serve.service import Service
from aggregator.task.file import read_task
from device_sdk.link.broker_url import parse_broker_url
from tests.brokers.fixtures import MakeMosquitto
from tests.fakes.clusters import Threads, world
from tests.fakes.homes import command, make_home
from tests.fakes.threads import on_thread
from tests.fakes.waiting import wait_until
from tests.faults.test_moving_brokers import ROUND, Devices, require_each_counted_once
from tests.servers.fixtures import MakeDatabase


def test_workers_and_devices_move_and_the_old_broker_can_go(
    tmp_path: Path,
    make_mosquitto: MakeMosquitto,
    make_database: MakeDatabase,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Coordinator and two workers; devices go to the announced broker, the old one is switched off
    within the grace, and after it all are at the new one alone."""
    old, new = make_mosquitto(), make_mosquitto()
    url = make_database()
    home = make_home(tmp_path, old.url, ROUND, f'[cluster]\nstore = "{url}"', store_url=url)
    started: list[Threads] = []

    def start(posts: list[Post]) -> Threads:
        started.append(Threads(posts))
        return started[-1]

    def serve(ready: Callable[[None], None], stopping: Callable[[], bool]) -> None:
        def on_ready(service: Service) -> None:
            ready(None)

        task = read_task(home.task_file)
        coordinate(home, task, world(), start, stopping, on_ready=on_ready)

    def said(*arguments: str) -> str:
        assert command(home, *arguments) == 0
        return capsys.readouterr().out

    with ExitStack() as stack:
        stack.enter_context(on_thread(serve))
        wait_until(lambda: bool(started) and started[0].connected())
        devices = Devices(home, old.url, 3, tmp_path, stack)
        devices.await_rounds()
        shown = said("broker", "move", new.url, "--grace", "5s")
        assert f"moves        to {new.url}" in shown and "does not run" not in shown
        wait_until(lambda: devices.at(new.url), devices.problems)
        devices.await_rounds()
        old.stop()
        devices.await_rounds()
        wait_until(lambda: f"moved        to {new.url}" in said("broker"))
        there = [read_task(home.task_file).fleet.broker.way.at(parse_broker_url(new.url))]
        wait_until(lambda: all([*post.ways] == there for post in started[0].posts))
        devices.await_rounds()
        devices.stop()
    assert not started[0].errors
    require_each_counted_once(home)
