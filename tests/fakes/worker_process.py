"""A worker's process: a pickled Post on standard input, then orders as they come."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import time

import numpy as np

from aggregator.cluster.worker import Worker
from aggregator.serve.assembly import World
from aggregator.store.cluster import Deposed


def _read() -> object:
    head = sys.stdin.buffer.read(8)
    if len(head) < 8:
        return None
    return pickle.loads(sys.stdin.buffer.read(int.from_bytes(head, "big")))


def main() -> int:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s worker {os.getpid()} %(message)s")
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    post = _read()
    rng = np.random.default_rng(os.getpid())
    world = World(time.monotonic, time.time, rng, os.urandom)
    worker = Worker(post, world)

    def listen() -> None:
        while (told := _read()) is not None:
            worker.follow(*told)
        stopping.set()

    threading.Thread(target=listen, daemon=True).start()
    try:
        worker.run(stopping.is_set)
    except Deposed as error:
        logging.error("%s", error)
        return 3
    return 0


if __name__ == "__main__":
    os._exit(main())  # a thread reads standard input still
