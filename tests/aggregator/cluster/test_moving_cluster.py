"""A cluster moves to another broker as one process does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from aggregator.cluster.coordinator import Crew, posts
from aggregator.cluster.orders import Post
from aggregator.cluster.serve import coordinate
from aggregator.cluster.worker import WorkerStatus
from aggregator.serve.alone import Hooks
from aggregator.serve.service import Service
from aggregator.task.file import read_task
from device_sdk.link.broker_url import parse_broker_url
from tests.brokers.fixtures import MakeMosquitto
from tests.fakes.clusters import Threads, world
from tests.fakes.homes import make_home
from tests.fakes.outputs import output_of
from tests.fakes.threads import on_thread
from tests.fakes.waiting import wait_until
from tests.faults.test_moving_brokers import ROUND, Devices, require_each_counted_once
from tests.servers.fixtures import MakeDatabase


@pytest.mark.exhaustive
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

    def start(where: list[Post]) -> Threads:
        started.append(Threads(where))
        return started[-1]

    def serve(ready: Callable[[None], None], stopping: Callable[[], bool]) -> None:
        def on_ready(service: Service) -> None:
            ready(None)

        task = read_task(home.task_file)
        coordinate(home, task, world(), start, stopping, hooks=Hooks(on_ready=on_ready))

    def said(*arguments: str) -> str:
        return output_of(capsys, home, *arguments)

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


def test_what_workers_are_started_with_follows_its_files(
    tmp_path: Path, make_database: MakeDatabase
) -> None:
    """The broker's password and the store's may be renewed while nobody restarts anything; a file
    that is being written changes nothing."""
    url, word = make_database(), tmp_path / "word"
    word.write_text("one\n")
    broker = f'mqtt://fleet@127.0.0.1:1"\npassword_file = "{word}'
    home = make_home(tmp_path, broker, ROUND, f'[cluster]\nstore = "{url}"', store_url=url)
    fleet = read_task(home.task_file).fleet
    store = home.open_store()
    posted: list[list[Post]] = []
    now = [0.0]

    class Runtime:
        def post(self, posts: list[Post]) -> None:
            posted.append(posts)

        def tend(self, revision: int, orders: object) -> None: ...

        def statuses(self) -> list[WorkerStatus]:
            return []

    parts = SimpleNamespace(
        clock=lambda: now[0],
        tasks=SimpleNamespace(served=[], absent=()),
        keys=SimpleNamespace(keyring=[]),
        move=SimpleNamespace(ways=()),
    )
    crew = Crew(
        Runtime(),  # type: ignore[arg-type]
        home,
        parts,  # type: ignore[arg-type]
        lambda: posts(home, store, fleet.cluster, fleet),
    )
    crew._make = lambda: None  # type: ignore[method-assign,assignment,return-value]

    def now_posted() -> tuple[object, ...]:
        now[0] += 60.0
        crew.tend()
        (post, _) = posted[-1]
        return post.store, [each.url.password for each in post.ways], len(posted)

    assert now_posted() == (url, ["one"], 1)
    word.write_text("")
    assert now_posted() == (url, ["one"], 1)
    word.write_text("two")
    assert now_posted() == (url, ["two"], 2)
    renewed = url.replace("tessera@", "tessera:renewed@")
    home.task_file.write_text(home.task_file.read_text().replace(url, renewed))
    assert now_posted() == (renewed, ["two"], 3)
    store.database.close()
