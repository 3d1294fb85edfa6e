"""A run of a cluster: coordinators, workers and their store, and what happens to each of them."""

from __future__ import annotations

import math
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from aggregator.task.cluster import Cell
from device_sdk.link.broker_url import parse_broker_url
from tests.faults.broker_setups import Broker, make_broker
from tests.faults.chaos import RunResult, RunSettings, Scene, play
from tests.faults.cluster_process import LEASE_SECONDS, Place, coordinate, take_in
from tests.faults.counters import Counters
from tests.faults.crash_points import COORDINATOR_POINTS, WORKER_POINTS
from tests.faults.fault_proxy import FaultProxy
from tests.faults.fleet_home import FleetHome, make_fleet
from tests.faults.holding import Watch
from tests.faults.oracle import Mismatch, count_counted
from tests.faults.processes import Victim
from tests.faults.wire_faults import FaultRates
from tests.servers.commit_cut import CommitCut
from tests.servers.namespaces import Machine, Network, machines
from tests.servers.postgres import USER, PostgresServer, running_postgres

_CALMER = 200
STORES = ("postgres", "sqlite")
STORE, BROKER = "store", "broker"
"""The networks of a cluster of machines."""
_EVERYWHERE = {
    "worker killed": 8.0,
    "worker paused": 3.0,
    "worker frozen and replaced": 4.0,
    "worker started twice": 2.0,
    "coordinator killed": 3.0,
    "coordinator paused": 2.0,
    "coordinator frozen beyond its lease": 2.0,
    "the cluster's clock jumped": 2.0,
    "the cluster's clock strobed": 1.0,
    "the cluster's clock put right": 1.0,
    "broker killed": 2.0,
    "broker replaced": 1.0,
    "broker paused": 2.0,
    "devices killed": 2.0,
    "devices paused": 1.0,
    "devices' disk full": 1.0,
}
KILLS = ("worker killed", "coordinator killed", "broker killed", "devices killed")
_OF_STORE = {
    "postgres": {
        "store crashed": 1.5,
        "store restarted": 1.0,
        "store killed": 1.0,
        "store failed over": 1.0,
    },
    "sqlite": {"worker's disk full": 2.0, "coordinator's disk full": 1.0},
}
_OF_WAYS = {
    "store's network cut": 4.0,
    "store's network hangs": 3.0,
    "commit cut before it arrived": 3.0,
    "commit cut before its answer": 3.0,
    "commit arrives late": 2.0,
}
_OF_MACHINES = {
    "worker's machine cut off the store": 5.0,
    "worker's machine cut off the broker": 5.0,
    "coordinator's machine cut off the store": 2.0,
    "coordinator's machine cut off the broker": 2.0,
}


@dataclass(frozen=True)
class ClusterSettings(RunSettings):
    """Two coordinators and ``workers`` workers on one of ``STORES``.

    ``cells``: brokers, which share the workers. ``machines``: each process is in a network
    namespace of its own. ``ray``: the product's own command, under Ray. ``only``: what happens,
    where not everything does.
    """

    store: str = "postgres"
    workers: int = 3
    adds_up: bool = True
    cells: int = 1
    machines: bool = False
    ray: bool = False
    only: tuple[str, ...] = ()


def run_cluster(settings: ClusterSettings, folder: Path) -> RunResult:
    """As :func:`~tests.faults.chaos.run`, of a cluster. Raises :class:`Mismatch`."""
    began = time.monotonic()
    names = [f"coordinator-{one}" for one in range(2)]
    names += [f"worker-{slot}" for slot in range(settings.workers)]
    with ExitStack() as stack:
        grounds = stack.enter_context(made_grounds(settings, folder, names))
        sockets = Path(tempfile.mkdtemp(prefix="t"))
        stack.callback(shutil.rmtree, sockets)
        return play(ClusterScene(settings, folder, grounds, sockets), Scene.torment, began)


@dataclass(frozen=True)
class Grounds:
    """What a cluster stands on.

    Attributes:
        server: None where the store is a file.
        brokers, outer, inner: one a cell, with the proxy that devices go through and the one that
            coordinator and workers do.
        machines, networks: by name; none where everything is on one.
    """

    server: PostgresServer | None
    brokers: list[Broker]
    outer: list[FaultProxy]
    inner: list[FaultProxy]
    machines: dict[str, Machine]
    networks: dict[str, Network]

    def cells(self, workers: int) -> tuple[Cell, ...]:
        """For so many workers in all."""
        shares = [len(part) for part in np.array_split(np.arange(workers), len(self.brokers))]
        # The only cell needs no name: devices stay where they enrolled.
        names = [proxy.url.removeprefix("mqtt://") for proxy in self.outer]
        return tuple(
            Cell(name if len(names) > 1 else "", parse_broker_url(proxy.url), share)
            for name, proxy, share in zip(names, self.inner, shares, strict=True)
        )

    def store_url(self, port: int) -> str:
        """Of the fleet's database behind a port of this machine, for any of the machines."""
        if STORE not in self.networks:
            return f"postgresql://{USER}@127.0.0.1:{port}/fleet"
        host = self.networks[STORE].address
        return f"postgresql://{USER}@{host}:{port}/fleet?sslmode=disable"


@contextmanager
def made_grounds(
    settings: ClusterSettings,
    folder: Path,
    names: Sequence[str],
    networks: Sequence[str] = (STORE, BROKER),
) -> Iterator[Grounds]:
    """``names``: of machines, where the settings want them."""
    with ExitStack() as stack:
        made, nets = {}, {}
        if settings.machines:
            made, nets = stack.enter_context(machines(names, networks))
        server = None
        if settings.store == "postgres":
            everywhere = ("listen_addresses = '*'",) if nets else ()
            server = stack.enter_context(running_postgres(*everywhere, own_calendar=True))
            server.run("CREATE DATABASE fleet")
        brokers = [make_broker(settings.broker, folder) for _ in range(settings.cells)]
        seed, rates = settings.seed, settings.rates
        inside = nets[BROKER].address if nets else "127.0.0.1"
        for broker in brokers:
            stack.callback(broker.kill)
            broker.start()
        outer = [FaultProxy(each.port, seed, rates) for each in brokers]
        inner = [FaultProxy(each.port, seed, _calmer(rates), host=inside) for each in brokers]
        yield Grounds(server, brokers, outer, inner, made, nets)


class _Way(CommitCut):
    """One process's way to the store. ``open_since``: monotonic seconds; infinity while nothing
    passes."""

    open_since = 0.0

    def cut(self) -> None:
        self.dead, self.open_since = True, math.inf

    def mend(self) -> None:
        self._where = None
        if self.dead:
            self.dead, self.open_since = False, time.monotonic()
        self.thaw()

    def freeze(self) -> None:
        self.open_since = math.inf
        super().freeze()

    def thaw(self) -> None:
        if self._frozen:
            self.open_since = math.inf if self.dead else time.monotonic()
        super().thaw()

    def _forward(self, data: bytes, to: socket.socket) -> bool:
        goes_on = super()._forward(data, to)
        if not goes_on and not self.dead:
            self.open_since = time.monotonic()
        return goes_on


class ClusterScene(Scene):
    def __init__(
        self, settings: ClusterSettings, folder: Path, grounds: Grounds, sockets: Path
    ) -> None:
        self._cluster, self._grounds = settings, grounds
        self._server, self._sockets = grounds.server, sockets
        self._ways: list[_Way] = []
        self._zombies: list[Victim] = []
        # By process: among the servers, and the machine that it is on.
        self._places: dict[int, int] = {}
        self._machine_of: dict[int, Machine] = {}
        self._full: dict[int, float] = {}  # until when a process's disk is
        self._watch: Watch | None = None
        self._folder = folder
        on_the_way = _OF_MACHINES if grounds.machines else _OF_WAYS if grounds.server else {}
        events = {**_EVERYWHERE, **_OF_STORE[settings.store], **on_the_way}
        if grounds.server is not None and not grounds.server.has_calendar:
            # A cluster goes by its store's calendar, which is this machine's then.
            events = {each: weight for each, weight in events.items() if "clock" not in each}
        self.events = {each: events[each] for each in settings.only or events}
        super().__init__(settings, folder, grounds.brokers, [*grounds.outer, *grounds.inner])

    def _make_fleet(self, folder: Path, rounds: str) -> FleetHome:
        settings = self._cluster
        made = make_fleet(
            folder,
            self.proxies[0].url,
            settings.devices,
            rounds,
            settings.seed,
            store_url=None if self._server is None else self._server.url("fleet"),
            **self._of_task(),
        )
        return replace(made, clustered=True, adds_up=settings.adds_up)

    def _of_task(self) -> dict[str, str]:
        """What the task file has besides, for :func:`make_fleet`."""
        return {}

    def _make_servers(self, folder: Path) -> list[Victim]:
        clock = str(folder / "counters")
        self._counted = [Counters(folder / f"counters-{slot}") for slot in self._slots]
        coordinators = [
            Victim(
                coordinate,
                (self._place(folder, f"coordinator-{one}", clock), clock),
                "coordinator",
                COORDINATOR_POINTS,
            )
            for one in range(2)
        ]
        workers = [
            Victim(
                take_in,
                (self._place(folder, f"worker-{slot}", f"{clock}-{slot}"), slot, clock),
                "worker",
                WORKER_POINTS,
            )
            for slot in self._slots
        ]
        return [*coordinators, *workers]

    @property
    def _slots(self) -> range:
        return range(self._cluster.workers)

    def _place(self, folder: Path, name: str, counters: str) -> Place:
        grounds, url = self._grounds, None
        machine = grounds.machines.get(name)
        if grounds.server is not None:
            port = grounds.server.port
            if machine is None:
                self._ways.append(_Way(port))
                port = self._ways[-1].port
            url = grounds.store_url(port)
        return Place(
            str(self.fleet.aggregator.folder),
            url,
            grounds.cells(self._cluster.workers),
            None if machine is None else machine.name,
            str(self._sockets),
            counters,
            str(folder / f"{name}.log"),
            self._cluster.adds_up,
            self._cluster.late,
        )

    def _settle(self) -> None:
        def counted() -> bool:
            self._look_after(0.0)
            return count_counted(self.fleet) > 0

        self._await(counted)
        self._watch = Watch(
            self._folder / "counters", self.fleet.aggregator.open_store, self._reaches_since
        )

    def _await(self, true: Callable[[], bool]) -> None:
        until = time.monotonic() + self.patience_seconds
        while not true():
            if time.monotonic() > until:
                raise Mismatch(f"nothing is counted before the first fault: {self._logs()}")
            time.sleep(0.3)

    def _logs(self) -> str:
        paths = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in paths)

    def count(self, name: str) -> int:
        return self.counters.read(name) + sum(each.read(name) for each in self._counted)

    def rest(self) -> None:
        self._look_after(float("inf"))
        for zombie in list(self._zombies):
            self._bury(zombie)
        for way in self._ways:
            way.mend()
        if self._watch is not None:
            # Not before: it may wait for a process that holds the store's lock and is frozen.
            self._watch.end()
            self.between, self._watch = self._watch.moments, None
        super().rest()

    @staticmethod
    def _heal(machine: Machine) -> None:
        for network in machine.addresses:
            machine.heal(network)

    def _see_to_servers(self) -> None:
        """On a busy machine a lease of two seconds may run out, and a broker be silent for one."""
        for victim in self._servers:
            if victim.ended() is not None:
                self._require_sound(victim)
                victim.start()

    def end(self) -> None:
        if self._watch is not None:
            self._watch.end()
        for zombie in self._zombies:
            zombie.kill()
        for machine in self._grounds.machines.values():
            self._heal(machine)
        super().end()
        for way in self._ways:
            way.stop()

    def _cause(self, name: str, now: float) -> None:
        rng = self._rng
        place = int(rng.integers(2 + self._cluster.workers))
        pause = now + float(rng.uniform(0.1, 2.5))
        coordinator = self._servers[place % 2]
        worker = self._servers[2 + place % self._cluster.workers]
        way = self._ways[place] if self._ways else None
        machines = self._grounds.machines
        outage = now + outage_seconds(rng)
        match name:
            case "worker killed":
                self._kill_worker(worker)
            case "worker paused":
                self._pause(worker, pause)
            case "worker frozen and replaced":
                zombie = self._replace(worker)
                self._pause(zombie, pause + 1.0)
            case "worker started twice":
                self._replace(worker)
            case "coordinator killed":
                coordinator.kill()
            case "coordinator paused":
                self._pause(coordinator, pause)
            case "coordinator frozen beyond its lease":
                self._pause(coordinator, pause + 1.5 * LEASE_SECONDS)
            case "worker's disk full":
                self._fill_disk(worker, pause)
            case "coordinator's disk full":
                self._fill_disk(coordinator, pause)
            case "store failed over":
                self._fail_over()
            case "store crashed" | "store restarted" | "store killed":
                self._end_store(name)
            case "worker's machine cut off the store":
                self._cut(machines[f"worker-{place % self._cluster.workers}"], STORE, outage)
            case "worker's machine cut off the broker":
                self._cut(machines[f"worker-{place % self._cluster.workers}"], BROKER, outage)
            case "coordinator's machine cut off the store":
                self._cut(machines[f"coordinator-{place % 2}"], STORE, outage)
            case "coordinator's machine cut off the broker":
                self._cut(machines[f"coordinator-{place % 2}"], BROKER, outage)
            case "store's network cut" if way is not None:
                way.cut()
                self._resume_at.append((pause, way.mend))
            case "store's network hangs" if way is not None:
                way.freeze()
                self._resume_at.append((pause + float(rng.exponential(1.5)), way.thaw))
            case "commit cut before it arrived" if way is not None:
                way.arm("before")
            case "commit cut before its answer" if way is not None:
                way.arm("after")
            case "commit arrives late" if way is not None:
                way.arm("late")
            case _:
                super()._cause(name, now)
                return
        self._note(name)

    def _set_clock(self, ahead_seconds: float) -> None:
        """Of the store, where several machines share that one's."""
        super()._set_clock(ahead_seconds)
        if self._server is not None:
            self._server.set_calendar(ahead_seconds)

    def _fail_over(self) -> None:
        """To a machine with all that was committed, and with a calendar of its own."""
        assert self._server is not None
        self._server.crash()
        self._set_clock(self._jump_seconds())
        self._server.start()

    def _end_store(self, name: str) -> None:
        server = self._server
        assert server is not None
        {"store crashed": server.crash, "store killed": server.kill}.get(name, server.stop)()
        server.start()

    def _cut(self, machine: Machine, network: str, until: float) -> None:
        machine.cut(network)
        self._resume_at.append((until, lambda: machine.heal(network)))

    def _kill_worker(self, worker: Victim) -> None:
        if worker.ended() is None:
            process, at_seconds = worker.pid, time.monotonic()
            worker.kill()
            self._measure(process, at_seconds)

    def _measure(self, process: int, at_seconds: float) -> None:
        """What the death of a worker's process cost."""
        cost = None if self._watch is None else self._watch.cost(process, at_seconds)
        if cost is not None:
            self.costs.append(cost)

    def _reaches_since(self, process: int) -> float:
        since = self._full.get(process, 0.0)
        for machine in self._grounds.machines.values():
            if machine.holds(process):
                self._machine_of[process] = machine
        if process in self._machine_of:
            since = max(since, self._machine_of[process].joined_since(STORE))
        for place, victim in enumerate(self._servers):
            if victim.is_process(process):
                self._places[process] = place
        if self._ways and process in self._places:
            since = max(since, self._ways[self._places[process]].open_since)
        return since

    def _fill_disk(self, victim: Victim, until: float) -> None:
        super()._fill_disk(victim, until)
        self._full[victim.pid] = until

    def _replace(self, worker: Victim) -> Victim:
        """Another process for its slot: the one before is taken for dead, and is not."""
        zombie = worker.leave()
        self._zombies.append(zombie)
        self._start(worker)
        return zombie

    def _look_after(self, now: float, *, restart: bool = True) -> None:
        super()._look_after(now, restart=restart)
        for zombie in [each for each in self._zombies if each.ended() is not None]:
            self._bury(zombie)

    def _bury(self, zombie: Victim) -> None:
        self._require_sound(zombie)
        zombie.kill()
        self._zombies.remove(zombie)


def outage_seconds(rng: np.random.Generator) -> float:
    """Seconds as a rule, now and then tens of them."""
    return float(rng.uniform(1.0, 5.0) if rng.random() < 0.85 else rng.uniform(10.0, 25.0))


def _calmer(rates: FaultRates) -> FaultRates:
    """Of the wire between broker and workers, who listen to thousands of topics and need a packet
    for each whenever they connect: at the devices' rates no connection would ever come about."""
    return FaultRates(*(rate / _CALMER for rate in rates.in_order()))
