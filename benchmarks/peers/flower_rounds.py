"""Rounds in Flower's simulation engine, the devices' work in NumPy: ``flower_rounds.py WORKLOAD``.

Each device is a node whose context keeps its user's vector; it replies with the whole gradient, of
which Flower's FedAvg takes the mean. Ray runs the nodes, one of its workers a core.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.flower_client import client
from benchmarks.peers.turns import Turns
from benchmarks.peers.workload import Floats, Workload


class FlowerRounds:
    """See :class:`~benchmarks.peers.turns.Framework`."""

    def __init__(self, workload: Workload, path: str, grid: Grid) -> None:
        self._workload = workload
        self._path = path
        self._grid = grid
        every = workload.devices
        self._strategy = FedAvg(
            fraction_evaluate=0.0, min_train_nodes=every, min_available_nodes=every
        )
        self.items: Floats = workload.items
        self.users = None  # each is in its node's own context

    def prepare(self, number: int) -> None:
        """Nothing: nodes read their triples from the workload."""

    def round(self, number: int) -> None:
        asked = self._strategy.configure_train(
            number + 1,
            ArrayRecord([self.items]),
            ConfigRecord({"workload": self._path}),
            self._grid,
        )
        replies = self._grid.send_and_receive(asked)
        found, _ = self._strategy.aggregate_train(number + 1, replies)
        if found is None or len(list(replies)) != self._workload.devices:
            raise RuntimeError(f"round {number}: not every node replied")
        (mean,) = found.to_numpy_ndarrays()
        self.items = self._workload.server_step(
            self.items, mean * np.float32(self._workload.devices)
        )


class Tree:
    """A :class:`~benchmarks.peers.turns.Measure` of this process and of all below it."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._most = 0.0
        self._done = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def processor_seconds(self) -> float:
        # With the children of each that have ended.
        return sum(self._each(lambda process: sum(process.cpu_times()[:4])))

    def peak_bytes(self) -> int:
        return int(self._most)

    def _watch(self) -> None:
        while not self._done.wait(1.0):
            # Pages that are shared would be counted once for each of Ray's workers.
            now = sum(self._each(lambda process: process.memory_full_info().pss))
            self._most = max(self._most, now)

    def _each(self, read: Callable[[psutil.Process], float]) -> Iterator[float]:
        for process in (self._me, *self._me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                yield read(process)


def main(path: str, temporary: str) -> None:
    """One simulation, whose server app answers the lines."""
    workload = Workload.load(Path(path))
    turns = Turns(workload, ("flwr", "ray", "numpy"), Tree())
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        turns.rounds(FlowerRounds(workload, path, grid))

    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"include_dashboard": False, "_temp_dir": temporary},
    }
    run_simulation(server, client, num_supernodes=workload.devices, backend_config=backend)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
