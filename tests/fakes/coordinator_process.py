"""A coordinator whose workers are processes too: ``coordinator_process HOME WORKERS STORE``."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from aggregator.cluster.serve import coordinate
from aggregator.home import AggregatorHome
from aggregator.store.cluster import Deposed
from aggregator.task.cluster import Cell, Cluster
from aggregator.task.file import read_task
from tests.fakes.clusters import Processes, world


def main(folder: str, workers: str, store_url: str) -> int:
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s coordinator {os.getpid()} %(message)s"
    )
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    home = AggregatorHome(Path(folder), store_url or None)
    task = read_task(home.task_file)
    cluster = Cluster((Cell("", None, int(workers)),))
    task = dataclasses.replace(task, fleet=dataclasses.replace(task.fleet, cluster=cluster))
    try:
        coordinate(
            home,
            task,
            world(),
            lambda posts: Processes(posts, home.folder),
            stopping.is_set,
            standby=True,
        )
    except Deposed as error:
        logging.error("%s", error)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
