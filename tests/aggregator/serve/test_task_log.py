"""Log lines of a fleet with several tasks name the task, whichever part writes them."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aggregator.home import AggregatorHome
from aggregator.logs import add_task as add_task_filter
from aggregator.operate.fleet import Fleet
from aggregator.serve.assembly import World, assemble
from aggregator.serve.live import log_round
from aggregator.serve.service import Service
from aggregator.store.rows import DeviceRow
from aggregator.task.file import read_task
from device_sdk.system.printable import PrintableFormatter
from device_sdk.wire.publish.receipts import UpdateIdentity, write_update
from tests.fakes.homes import make_home
from tests.fakes.tasks import add_task, task_text

ANNA, BERT, CLEO = (bytes([index]) * 16 for index in (1, 2, 3))
ROUND = "quorum = 1\nwait_for_devices = 3\ndeadline_seconds = 20.0"
_WAITS = "no round opens before 3 devices are enrolled (round.wait_for_devices); there are"


class Log:
    """What is said by the aggregator, as its views write it."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        self.handler = logging.StreamHandler(self._text)
        self.handler.addFilter(add_task_filter)
        self.handler.setFormatter(PrintableFormatter("%(task)s%(message)s"))

    def take(self) -> list[str]:
        lines = self._text.getvalue().splitlines()
        self._text.seek(0)
        self._text.truncate()
        return lines


@pytest.fixture
def log() -> Iterator[Log]:
    made, logger = Log(), logging.getLogger("aggregator")
    before = logger.level
    logger.addHandler(made.handler)
    logger.setLevel(logging.INFO)
    yield made
    logger.removeHandler(made.handler)
    logger.setLevel(before)


class Served:
    """A service without a broker. ``now``: seconds on both its clocks."""

    def __init__(self, home: AggregatorHome) -> None:
        store = home.open_store()
        self.now = float(store.facts.generation)
        world = World(lambda: self.now, lambda: self.now, np.random.default_rng(1))
        self.parts = assemble(home, store, read_task(home.task_file), world)
        self.service = Service(self.parts, log_round)

    def join(self, device: bytes) -> None:
        row = DeviceRow(device, device * 2, device, device * 2, 0, device[:8], 0, 1)
        with self.parts.store.database.transaction():
            self.parts.store.devices.add(row)
        self.parts.registry.add(row)

    def send_nonsense(self, device: bytes, task: str) -> None:
        generation = self.parts.store.facts.generation
        sent = write_update(UpdateIdentity(device, task, generation, 1), b"nonsense")
        self.parts.inbox.offer(device, sent)


def test_each_line_names_its_task_where_there_are_several(tmp_path: Path, log: Log) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", ROUND)
    add_task(home, "air", task_text(home, "air", ROUND))
    served = Served(home)
    assert log.take() == ["air: the task is served"]
    served.service.turn()
    assert log.take() == [f"default: {_WAITS} 0", f"air: {_WAITS} 0"]
    # Said once, and not with each device that joins.
    for device in (ANNA, BERT):
        served.join(device)
        served.service.turn()
    assert log.take() == []
    served.join(CLEO)
    served.service.turn()
    opened = "round 1 opened: version 0, 3 devices selected, 20 s"
    assert log.take() == [f"default: {opened}", f"air: {opened}"]
    served.send_nonsense(BERT, "air")
    served.service.turn()
    (refused,) = log.take()
    assert refused.startswith(f"air: refused from {BERT.hex()}: ")
    served.send_nonsense(BERT, "none")
    assert log.take() == [f"refused from {BERT.hex()}: wrong-task (logged once)"]
    (home.folder / "air.tsv").write_text("a\na\n")  # a catalogue with a row twice
    served.now += 25.0
    served.service.turn()
    said = log.take()
    assert sorted(each.partition(": ")[0] for each in said) == ["air"] * 3 + ["default"] * 2
    assert any(each.startswith("air: the catalogue stays as it was: ") for each in said)
    path = home.folder / "tasks" / "air.toml"
    path.write_text(path.read_text() + "nonsense = 1\n")
    served.now += 25.0
    served.service.turn()
    (wrong,) = [each for each in log.take() if "settings" in each]
    assert wrong.startswith("air: it goes on with the settings it had: ")
    with served.parts.store.database.transaction():
        served.parts.store.tasks.change(2, state="retiring")
    served.parts.tasks.look_again()
    assert log.take() == ["air: the task is retired"]
    served.send_nonsense(ANNA, "default")
    served.service.turn()
    (refused,) = log.take()
    assert refused.startswith(f"refused from {ANNA.hex()}: ")
    served.parts.store.database.close()


def test_a_fleet_that_shrinks_is_told_once_more_why_no_round_opens(
    tmp_path: Path, log: Log
) -> None:
    served = Served(make_home(tmp_path, "mqtt://127.0.0.1:1", ROUND))
    for device in (ANNA, BERT, CLEO):
        served.join(device)
    served.service.turn()
    assert log.take() == ["round 1 opened: version 0, 3 devices selected, 20 s"]
    store = served.parts.store
    for device in (ANNA, BERT):
        with store.database.transaction():
            store.devices.revoke(device, 1)
        served.parts.registry.reload()
    served.now += 25.0
    for _ in range(2):
        served.service.turn()
    closed = "round 1 closed without quorum: 0 updates wait for the next one"
    assert log.take() == [closed, f"{_WAITS} 1"]
    # A change of the file alone is no news; another number is.
    path = served.parts.first.task.path
    text = path.read_text()
    for more in ("pause_seconds = 0.0\n", "pause_seconds = 0.0\nmost_rounds = 4\n"):
        path.write_text(text.replace("[round]\n", f"[round]\n{more}"))
        served.now += 1.0
        served.service.turn()
    assert log.take() == ["the settings of the task file are in use"] * 2
    path.write_text(text.replace("wait_for_devices = 3", "wait_for_devices = 2"))
    served.now += 1.0
    for _ in range(2):
        served.service.turn()
    assert log.take()[1:] == [_WAITS.replace("3", "2", 1) + " 1"]
    store.database.close()


def test_a_pause_and_its_end_are_told_once(tmp_path: Path, log: Log) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", ROUND)
    add_task(home, "air", task_text(home, "air", ROUND))
    served = Served(home)
    log.take()
    with Fleet.open(home.folder) as fleet:
        fleet.pause("air")
    paused = "air: the task is paused: no further round opens"
    for _ in range(2):
        served.parts.tasks.look_again()
    assert log.take() == [paused]
    # Parts that are made anew are none.
    path = home.folder / "tasks" / "air.toml"
    path.write_text(path.read_text().replace("deadline_seconds = 20.0", "deadline_seconds = 30.0"))
    served.parts.tasks.look_at_files()
    assert log.take() == ["air: the settings of the task file are in use"]
    served.parts.store.database.close()
    # A restart says that it still is.
    served = Served(home)
    assert sorted(log.take()) == [paused, "air: the task is served"]
    with Fleet.open(home.folder) as fleet:
        fleet.resume("air")
    served.parts.tasks.look_again()
    assert log.take() == ["air: the task is resumed: rounds open again"]
    served.parts.store.database.close()
