"""A run of a cluster under real Ray: the product's command as it is, on nodes that die."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from aggregator.cluster.serve import LEASE_SECONDS
from tests.brokers.mosquitto import free_port
from tests.faults.chaos import RunResult, Scene, play
from tests.faults.cluster_chaos import (
    BROKER,
    STORE,
    ClusterScene,
    ClusterSettings,
    Grounds,
    made_grounds,
    outage_seconds,
)
from tests.faults.counters import Counters
from tests.faults.known_plugin import BODIES, COUNTERS, SUMS, write_plugin
from tests.faults.oracle import Mismatch
from tests.faults.processes import Program, Victim
from tests.servers.ray_nodes import CONTROL_SERVICE, RAYLET, RayNode

_RAY = "ray"
"""The network between Ray's nodes."""
_FROZEN_SECONDS = 16.0
"""After which the product hires another worker."""
_AGAIN_SECONDS = 2.0
_HEADLESS_SECONDS = 8.0
"""The nodes go on so long without a head."""
_GIVE_UP_SECONDS = "15"
"""After which Ray's processes end without a head; Ray's own is a minute."""
_EVENTS = {
    "worker killed": 8.0,
    "worker paused": 3.0,
    "worker frozen and replaced": 2.0,
    "coordinator killed": 3.0,
    "coordinator paused": 2.0,
    "coordinator frozen beyond its lease": 2.0,
    "Ray's node process killed": 2.0,
    "Ray's control service killed": 1.0,
    "a Ray node's processes all killed": 1.0,
    "store crashed": 1.5,
    "store restarted": 1.0,
    "store killed": 1.0,
    "store failed over": 1.0,
    "the cluster's clock jumped": 2.0,
    "the cluster's clock strobed": 1.0,
    "the cluster's clock put right": 1.0,
    "broker killed": 2.0,
    "broker paused": 2.0,
    "devices killed": 2.0,
    "devices paused": 1.0,
}
_OF_MACHINES = {
    "workers' machine cut off the store": 3.0,
    "workers' machine cut off the broker": 3.0,
    "workers' machine cut off Ray's head": 2.0,
}
_NETWORKS = {"store": STORE, "broker": BROKER, "Ray's head": _RAY}


def run_ray(settings: ClusterSettings, folder: Path) -> RunResult:
    """As :func:`~tests.faults.chaos.run`, under Ray. Raises :class:`Mismatch`."""
    began = time.monotonic()
    with ExitStack() as stack:
        names = ["node-0", "node-1"]
        grounds = stack.enter_context(made_grounds(settings, folder, names, (STORE, BROKER, _RAY)))
        short = Path(tempfile.mkdtemp(prefix="tsr", dir="/tmp"))  # Ray's sockets lie deep below it
        stack.callback(shutil.rmtree, short, ignore_errors=True)
        scene = _RayScene(settings, folder, grounds, short)
        return play(scene, lambda scene: scene.torment(), began)


class _RayScene(ClusterScene):
    patience_seconds = 600.0  # Ray takes its time on a machine that does much else

    def __init__(
        self, settings: ClusterSettings, folder: Path, grounds: Grounds, short: Path
    ) -> None:
        self._head = grounds.networks[_RAY].address if grounds.networks else "127.0.0.1"
        self._port = free_port()
        plugin, here = folder / "plugin", Path(__file__).parents[2]
        write_plugin(plugin)
        self._environment = {
            **os.environ,
            "HOME": str(short),
            "PYTHONPATH": f"{plugin}{os.pathsep}{here}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "60",
            "RAY_agent_register_timeout_ms": "100000",
            "RAY_worker_niceness": "0",  # else whatever runs beside them takes all there is
            "RAY_prestart_worker_first_driver": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": _GIVE_UP_SECONDS,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            COUNTERS: str(folder / "counters"),
        }
        machines = grounds.machines
        self._nodes = [
            RayNode(
                short,
                self._environment,
                self._port,
                self._head,
                machine=machine,
                address=self._head if machine is None else machine.addresses[_RAY],
                cpus=0 if machine is None and machines else settings.workers,
            )
            for machine in [None, *machines.values()]
        ]
        self._headless_seconds = 0.0  # since when, or 0
        self._frozen: list[psutil.Process] = []
        self._next_start_seconds = 0.0
        super().__init__(settings, folder, grounds, short)
        may_jump = "the cluster's clock jumped" in self.events
        events = {each: _EVENTS[each] for each in _EVENTS if may_jump or "clock" not in each}
        self.events = {**events, **(_OF_MACHINES if machines else {})}

    def _of_task(self) -> dict[str, str]:
        grounds = self._grounds
        assert grounds.server is not None
        lines = ["[cluster]", f'store = "{grounds.store_url(grounds.server.port)}"']
        cells = grounds.cells(self._cluster.workers)
        if len(cells) == 1:
            lines += [f"workers = {cells[0].workers}"]
        for cell in cells if len(cells) > 1 else ():
            lines += ["[[cluster.cells]]", f'name = "{cell.name}"']
            lines += [f'broker = "{cell.broker}"', f"workers = {cell.workers}"]
        return {
            "method": SUMS if self._cluster.adds_up else BODIES,
            "further_tables": "\n".join([*lines, ""]),
        }

    def _make_servers(self, folder: Path) -> list[Victim]:
        home = str(self.fleet.aggregator.folder)
        command = [sys.executable, "-m", "aggregator.cli", "serve", "--home", home, "--plain"]
        command += ["--cluster", "ray", "--address", f"{self._head}:{self._port}", "--standby"]
        return [
            Program(command, self._environment, folder / f"coordinator-{one}.log", "coordinator")
            for one in range(2)
        ]

    def count(self, name: str) -> int:
        return self.counters.read(name) + sum(
            Counters(path).read(name) for path in self._folder.glob("taken-*")
        )

    def torment(self) -> None:
        self._raise_nodes()
        super().torment()

    def rest(self) -> None:
        for process in self._frozen:
            _resume(process)
        for machine in self._grounds.machines.values():
            self._heal(machine)
        self._raise_nodes()
        super().rest()

    def end(self) -> None:
        super().end()
        for node in self._nodes:
            node.kill()

    def _raise_nodes(self) -> None:
        """Until all are up, the head first."""
        if self._nodes[0].ended():
            self._nodes[0].start()

        def up() -> bool:
            self._see_to_nodes()
            return all(node.is_up() for node in self._nodes)

        self._await(up)

    def _see_to_nodes(self) -> None:
        """As whatever supervises machines would."""
        head, *others = self._nodes
        now = time.monotonic()
        if not head.ended():
            self._headless_seconds = 0.0
        elif not self._headless_seconds:
            self._headless_seconds = now
        elif now - self._headless_seconds > _HEADLESS_SECONDS:
            # A head refuses to start while it sees processes that look for it.
            for node in others:
                node.kill()
            head.start()
        # One after the other: they choose their sockets' names without a thought of each other.
        if any(not node.ended() and not node.is_up() for node in self._nodes) or head.ended():
            return
        for node in others:
            if node.ended():
                node.start()
                return

    def _look_after(self, now: float, *, restart: bool = True) -> None:
        if restart:
            self._see_to_nodes()
        super()._look_after(now, restart=restart)

    def _see_to_servers(self) -> None:
        self._see_to_nodes()
        super()._see_to_servers()

    def _start(self, victim: Victim) -> None:
        if isinstance(victim, Program):
            now = time.monotonic()
            if not self._nodes[0].is_up() or now < self._next_start_seconds:
                return
            self._next_start_seconds = now + _AGAIN_SECONDS
        super()._start(victim)

    def _require_sound(self, victim: Victim) -> None:  # type: ignore[override]
        if not isinstance(victim, Program):
            super()._require_sound(victim)
        elif b"Traceback (most recent call last)" in victim.log.read_bytes():
            raise Mismatch(f"the {victim.who} ended by a defect: see {victim.log}")

    def _cause(self, name: str, now: float) -> None:
        rng = self._rng
        outage, short = now + outage_seconds(rng), now + float(rng.uniform(0.1, 2.5))
        nodes = self._nodes[1:] or self._nodes
        node = nodes[int(rng.integers(len(nodes)))]
        coordinator = self._servers[int(rng.integers(2))]
        workers = [process for each in nodes for process in each.workers()]
        worker = workers[int(rng.integers(len(workers)))] if workers else None
        match name:
            case "worker killed" if worker is not None:
                at_seconds = time.monotonic()
                if _kill(worker):
                    self._measure(worker.pid, at_seconds)
            case "worker paused" if worker is not None:
                self._freeze(worker, short)
            case "worker frozen and replaced" if worker is not None:
                self._freeze(worker, now + _FROZEN_SECONDS + float(rng.exponential(5.0)))
            case "coordinator frozen beyond its lease" if coordinator.ended() is None:
                self._pause(coordinator, short + 1.5 * LEASE_SECONDS)
            case "coordinator killed" if coordinator.ended() is None:
                coordinator.kill()
            case "coordinator paused" if coordinator.ended() is None:
                self._pause(coordinator, short)
            case "store failed over":
                self._fail_over()
            case "store crashed" | "store restarted" | "store killed":
                self._end_store(name)
            case "Ray's node process killed":
                process = self._nodes[int(rng.integers(len(self._nodes)))].process(RAYLET)
                if process is None or not _kill(process):
                    return
            case "Ray's control service killed":
                process = self._nodes[0].process(CONTROL_SERVICE)
                if process is None or not _kill(process):
                    return
            case "a Ray node's processes all killed":
                node.kill()
            case _ if name in _OF_MACHINES:
                machines = list(self._grounds.machines.values())
                network = _NETWORKS[name.partition(" cut off ")[2].removeprefix("the ")]
                self._cut(machines[int(rng.integers(len(machines)))], network, outage)
            case _ if "worker" in name or "coordinator" in name:
                return  # there is none just now
            case _:
                Scene._cause(self, name, now)
                return
        self._note(name)

    def _freeze(self, process: psutil.Process, until: float) -> None:
        process.suspend()
        self._frozen.append(process)
        self._resume_at.append((until, lambda: _resume(process)))

    def _logs(self) -> str:
        logs = [f"{node.log}:\n{node.log.read_text()[-1500:]}" for node in self._nodes]
        return "\n".join([super()._logs(), *logs])


def _kill(process: psutil.Process) -> bool:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def _resume(process: psutil.Process) -> None:
    try:
        process.resume()
    except psutil.NoSuchProcess:
        return
