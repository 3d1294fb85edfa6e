"""A fleet that does not wait for its slow device, over a real broker: what it sends counts, once.

The device's training takes as long as the test says: it is given its samples when the test opens
its gate.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from aggregator.home import AggregatorHome
from aggregator.store import TaskStore
from aggregator.store.evaluations import EvaluatedVersion
from device_sdk import LocalData
from device_sdk.device import Device
from device_sdk.world import TrainingOptions
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.array_device import local_data
from tests.fakes.averaging import averaging_home
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import ServeProcess, invite, serving
from tests.fakes.quick import joined
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

ROUNDS = """
quorum = 2
wanted = 2
over_select = 100.0
wait_for_devices = 3
late = "staleness"
most_stale = 2
"""


class Gate:
    """Samples that are there once they are let go, a training each time."""

    def __init__(self, place: int) -> None:
        self._data = LocalData(local_data(place).train, holdout=0.5)
        self._let_go = threading.Semaphore(0)
        self.asked = 0

    def __call__(self) -> LocalData:
        self.asked += 1
        assert self._let_go.acquire(timeout=PATIENCE_SECONDS)
        return self._data

    def open(self) -> None:
        """Let one training begin."""
        self._let_go.release()


class Fleet:
    """Devices, the last of which are slow."""

    def __init__(
        self,
        home: AggregatorHome,
        url: str,
        folder: Path,
        stack: ExitStack,
        count: int = 3,
        options: TrainingOptions | None = None,
    ) -> None:
        self.gates = [Gate(place) for place in range(count)]
        self.devices: list[Device] = []
        for place, (code, gate) in enumerate(zip(invite(home, count), self.gates, strict=True)):
            home_folder = folder / f"device-{place}"
            device = joined(url, code, home_folder, data=gate, options=options)
            stack.callback(self._end, device, gate)
            self.devices.append(device)
            device.start()

    def _end(self, device: Device, gate: Gate) -> None:
        for _ in range(100):
            gate.open()
        device.close()

    def let_go(self, *places: int) -> None:
        for place in places:
            self.gates[place].open()

    def trained(self, place: int) -> list[int]:
        """Rounds whose updates have their receipts, and what these say."""
        rounds = self.devices[place]._home.rounds
        generation = rounds.mark("default", "all").generation  # type: ignore[union-attr]
        found = rounds.receipted("default", generation, 100)
        assert all(part.verdict is not None and part.verdict.value == "counted" for part in found)
        return sorted(part.round for part in found)


@contextmanager
def read(home: AggregatorHome) -> Iterator[TaskStore]:
    store = home.open_store()
    try:
        yield store.first
    finally:
        store.database.close()


def heard(home: AggregatorHome, number: int, device_id: bytes) -> bool:
    """Whether a device has a verdict in a round."""
    with read(home) as store:
        return device_id in store.log.judged(store.facts.generation, number)


def test_what_a_slow_device_began_counts_in_the_next_round(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = averaging_home(tmp_path / "fleet", ROUNDS, url=mosquitto.url)
    with serving(home) as served, ExitStack() as stack:
        rounds, ingest = served.parts.first.rounds, served.parts.first.ingest
        fleet = Fleet(home, mosquitto.url, tmp_path, stack)
        wait_until(lambda: all(gate.asked for gate in fleet.gates))
        fleet.let_go(0, 1)
        wait_until(lambda: rounds.current is not None and rounds.current.round == 2)
        wait_until(lambda: fleet.gates[0].asked == fleet.gates[1].asked == 2)
        assert fleet.gates[2].asked == 1  # of round 1, still
        fleet.let_go(2)
        wait_until(lambda: ingest.counted == 3)
        # Now it is at the newest round, and at one only.
        wait_until(lambda: fleet.gates[2].asked == 2)
        fleet.let_go(2)
        wait_until(lambda: rounds.current is not None and rounds.current.round == 3)
        wait_until(lambda: fleet.trained(2) == [1, 2])
        with read(home) as store:
            found = [store.rounds.find(number) for number in (1, 2)]
            assert [row.participants for row in found if row is not None] == [2, 2]
            device = bytes.fromhex(fleet.devices[2].device_id)
            generation = store.facts.generation
            verdicts = [store.log.verdict(generation, number, device) for number in (1, 2)]
            assert all(each is not None and each.reason is None for each in verdicts)


def test_it_counts_once_whenever_the_aggregator_dies(mosquitto: Mosquitto, tmp_path: Path) -> None:
    home = averaging_home(tmp_path / "fleet", ROUNDS, url=mosquitto.url)
    process = ServeProcess(home)
    with ExitStack() as stack:
        stack.callback(process.kill)
        process.start()
        fleet = Fleet(home, mosquitto.url, tmp_path, stack)
        wait_until(lambda: all(gate.asked for gate in fleet.gates))
        fleet.let_go(0, 1)
        wait_until(lambda: fleet.gates[0].asked == fleet.gates[1].asked == 2)
        process.kill()  # it ends its training while nobody serves, and begins the next
        fleet.let_go(2)
        wait_until(lambda: fleet.devices[2].status().outbox == 1)
        wait_until(lambda: fleet.gates[2].asked == 2)
        process.start()
        fleet.let_go(2)
        wait_until(lambda: fleet.trained(2) == [1, 2], process.log.read_text)
        process.kill()
        process.start()
        fleet.let_go(0, 1)
        wait_until(lambda: fleet.gates[0].asked == 3, process.log.read_text)
    with read(home) as store:
        found = [store.rounds.find(number) for number in (1, 2)]
        assert [row.participants for row in found if row is not None] == [2, 2]
        assert [row.next_version for row in found if row is not None] == [1, 2]


def test_a_version_that_three_of_four_evaluate_late_has_the_figure_of_all_four(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    """The aggregator dies once the second of them was heard."""
    rounds = ROUNDS.replace("= 2\n", "= 1\n").replace("devices = 3", "devices = 4")
    rounds = rounds.replace("most_stale = 1", "most_stale = 99")
    more = "[evaluation]\nleast_devices = 4\n"
    home = averaging_home(tmp_path / "fleet", rounds, more, url=mosquitto.url)
    linear_artifact(tmp_path / "fleet" / "linear", "mae")
    with ExitStack() as stack:
        process = ServeProcess(home)
        stack.callback(process.kill)
        process.start()
        # A device that waits for its samples sends nothing meanwhile: none does before its receipt.
        options = TrainingOptions(most_outbox_updates=1)
        fleet = Fleet(home, mosquitto.url, tmp_path, stack, 4, options)
        wait_until(lambda: all(gate.asked for gate in fleet.gates))
        for place, device in enumerate(fleet.devices):
            fleet.let_go(place)  # the first one's update closes the round
            came = partial(heard, home, 1, bytes.fromhex(device.device_id))
            wait_until(came, process.log.read_text)
            if place == 2:
                process.kill()
                process.start()

        def figures() -> list[EvaluatedVersion]:
            with read(home) as store:
                return store.evaluations.latest(10)

        wait_until(lambda: bool(figures()), process.log.read_text)
    (found,) = figures()
    assert (found.version, found.round) == (0, 1)
    assert {each.devices for each in found.figures if not each.part} == {4}
    assert {each.stage for each in found.figures} == {"global", "personal"}
