"""Rounds of Flower's simulation engine with near-empty clients, for its cost a device.

Run by ``python -m benchmarks.peers`` in an environment that holds Flower and not this project:
``python flower_round.py CLIENTS ROUNDS``. Prints one line of JSON last.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import numpy as np
import psutil
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

_SHAPE = (3706, 32)


def main(clients: int, rounds: int) -> None:
    """Every client sends the model back; what is timed is the framework."""
    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"]
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
        return Message(content=content, reply_to=message)

    ends: list[float] = []
    server = ServerApp()

    class Timed(FedAvg):
        """Notes when each round's replies are aggregated."""

        def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
            result = super().aggregate_train(server_round, replies)
            ends.append(time.perf_counter())
            return result

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        ends.append(time.perf_counter())
        strategy = Timed(
            fraction_train=1.0,
            fraction_evaluate=0.0,
            min_train_nodes=clients,
            min_available_nodes=clients,
        )
        first = ArrayRecord([np.zeros(_SHAPE, dtype=np.float32)])
        strategy.start(grid=grid, initial_arrays=first, num_rounds=rounds)

    peak = _Peak()
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=clients, backend_config=resources)
    seconds = np.diff(ends).round(2).tolist()
    print(json.dumps({"clients": clients, "round_seconds": seconds, "peak_bytes": peak.stop()}))


class _Peak:
    """Samples the resident memory of this process and its children, twice a second."""

    def __init__(self) -> None:
        self._most = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._done.wait(0.5):
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    # Shared pages would be counted once for each of Ray's workers.
                    memory = process.memory_full_info()
                    total += getattr(memory, "pss", memory.rss)
                except psutil.Error:
                    continue
            self._most = max(self._most, total)

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._most


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
