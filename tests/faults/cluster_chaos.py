"""A run of a cluster: coordinators, workers and their store, and what happens to each of them."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults.broker_setups import Broker, make_broker
from tests.faults.chaos import RunResult, RunSettings, Scene, play
from tests.faults.cluster_process import LEASE_SECONDS, Place, coordinate, take_in
from tests.faults.counters import Counters
from tests.faults.crash_points import COORDINATOR_POINTS, WORKER_POINTS
from tests.faults.fault_proxy import FaultProxy
from tests.faults.fleet_home import FleetHome, make_fleet
from tests.faults.processes import Victim
from tests.faults.wire_faults import FaultRates
from tests.servers.commit_cut import CommitCut
from tests.servers.postgres import USER, PostgresServer, running_postgres

_CALMER = 200
STORES = ("postgres", "sqlite")
_EVERYWHERE = {
    "worker killed": 6.0,
    "worker paused": 3.0,
    "worker frozen and replaced": 4.0,
    "worker started twice": 2.0,
    "coordinator killed": 3.0,
    "coordinator paused": 2.0,
    "coordinator frozen beyond its lease": 2.0,
    "the cluster's clock jumped": 3.0,
    "broker killed": 2.0,
    "broker paused": 2.0,
    "devices killed": 3.0,
    "devices paused": 2.0,
    "devices' disk full": 1.0,
}
_OF_STORE = {
    "postgres": {
        "store crashed": 2.0,
        "store restarted": 1.0,
        "store's network cut": 4.0,
        "store's network hangs": 3.0,
        "commit cut before it arrived": 3.0,
        "commit cut before its answer": 3.0,
        "commit arrives late": 2.0,
    },
    "sqlite": {"worker's disk full": 2.0, "coordinator's disk full": 1.0},
}


@dataclass(frozen=True)
class ClusterSettings(RunSettings):
    """Two coordinators and ``workers`` workers on one of ``STORES``."""

    store: str = "postgres"
    workers: int = 3
    adds_up: bool = True


def run_cluster(settings: ClusterSettings, folder: Path) -> RunResult:
    """As :func:`~tests.faults.chaos.run`, of a cluster. Raises :class:`Mismatch`."""
    began = time.monotonic()
    with ExitStack() as stack:
        server = None
        if settings.store == "postgres":
            server = stack.enter_context(running_postgres())
            server.run("CREATE DATABASE fleet")
        sockets = Path(tempfile.mkdtemp(prefix="t"))
        stack.callback(shutil.rmtree, sockets)
        broker = make_broker(settings.broker, folder)
        broker.start()
        proxy = FaultProxy(broker.port, settings.seed, settings.rates)
        return play(
            _ClusterScene(settings, folder, broker, proxy, server, sockets), Scene.torment, began
        )


class _Way(CommitCut):
    """One process's way to the store."""

    def url(self) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/fleet"

    def cut(self) -> None:
        self.dead = True

    def mend(self) -> None:
        self.dead, self._where = False, None
        self.thaw()


class _ClusterScene(Scene):
    def __init__(
        self,
        settings: ClusterSettings,
        folder: Path,
        broker: Broker,
        proxy: FaultProxy,
        server: PostgresServer | None,
        sockets: Path,
    ) -> None:
        self._cluster = settings
        self._server, self._sockets = server, sockets
        self._ways: list[_Way] = []
        self._zombies: list[Victim] = []
        self.events = {**_EVERYWHERE, **_OF_STORE[settings.store]}
        self._inner = FaultProxy(broker.port, settings.seed, _calmer(settings.rates))
        super().__init__(settings, folder, broker, proxy)
        self.proxies.append(self._inner)

    def _make_fleet(self, folder: Path, rounds: str) -> FleetHome:
        settings = self._cluster
        made = make_fleet(
            folder,
            self.proxy.url,
            settings.devices,
            rounds,
            settings.seed,
            store_url=None if self._server is None else self._server.url("fleet"),
        )
        return replace(made, clustered=True, adds_up=settings.adds_up)

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
        url = None
        if self._server is not None:
            self._ways.append(_Way(self._server.port))
            url = self._ways[-1].url()
        return Place(
            str(self.fleet.aggregator.folder),
            url,
            self._inner.url,
            self._cluster.workers,
            str(self._sockets),
            counters,
            str(folder / f"{name}.log"),
            self._cluster.adds_up,
        )

    def count(self, name: str) -> int:
        return self.counters.read(name) + sum(each.read(name) for each in self._counted)

    def rest(self) -> None:
        self._look_after(float("inf"))
        for zombie in list(self._zombies):
            self._bury(zombie)
        for way in self._ways:
            way.mend()
        super().rest()

    def _see_to_servers(self) -> None:
        """On a busy machine a lease of two seconds may run out, and a broker be silent for one."""
        for victim in self._servers:
            if victim.ended() is not None:
                self._require_sound(victim)
                victim.start()

    def end(self) -> None:
        for zombie in self._zombies:
            zombie.kill()
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
        match name:
            case "worker killed":
                worker.kill()
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
            case "the cluster's clock jumped":
                self._jump()
            case "worker's disk full":
                self._fill_disk(worker, pause)
            case "coordinator's disk full":
                self._fill_disk(coordinator, pause)
            case "store crashed" if self._server is not None:
                self._server.crash()
                self._server.start()
            case "store restarted" if self._server is not None:
                self._server.stop()
                self._server.start()
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
        self.faults[name] += 1

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


def _calmer(rates: FaultRates) -> FaultRates:
    """Of the wire between broker and workers, who listen to thousands of topics and need a packet
    for each whenever they connect: at the devices' rates no connection would ever come about."""
    return FaultRates(*(rate / _CALMER for rate in rates.in_order()))
