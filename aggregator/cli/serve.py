"""``tessera-aggregator serve``: run rounds until told to stop."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from aggregator.cli.arguments import add_home, home_of
from aggregator.home import serve_lock
from aggregator.serve.assembly import World, assemble
from aggregator.serve.live import LiveView, PlainView, View
from aggregator.serve.metrics import serve_metrics
from aggregator.serve.service import Service
from aggregator.task.file import read_task

# Python's garbage collector in a process that serves: less often, and past what stays for good.

_YOUNG_OBJECTS = 20_000


def ease_collector() -> None:
    """To be called once by a server's process, when everything long-lived has been made.

    The registry of a large fleet is never garbage; looking through it again and again costs a
    twentieth of the rate of ingestion. Nothing in the path of an update makes cycles, so the
    collector need not run several times a group either.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


DESCRIPTION = """\
Runs rounds with the devices that enrolled. On a terminal it shows a live view, otherwise it logs a
line for whatever happens. Ctrl-C or SIGTERM stop it cleanly; after a crash, or kill -9, start it
again: the round goes on where it was, and nothing is counted twice."""

EXAMPLES = """\
examples:
  tessera-aggregator serve --home fleet
  tessera-aggregator serve --home fleet --plain >> fleet.log
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    parser.add_argument(
        "--task", type=Path, metavar="FILE", help="the task file (default: task.toml in the home)"
    )
    parser.add_argument("--plain", action="store_true", help="log lines, on a terminal too")


def run(arguments: argparse.Namespace) -> int:
    home = home_of(arguments)
    live = sys.stdout.isatty() and not arguments.plain
    view: View = LiveView() if live else PlainView(time.monotonic)
    stopping = _stop_on_signals()
    with ExitStack() as stack:
        stack.enter_context(serve_lock(home))
        task = read_task(arguments.task or home.task_file)
        stack.enter_context(view)
        world = World(time.monotonic, time.time, np.random.default_rng(), os.urandom)
        parts = assemble(home, home.open_store(), task, world)
        service = Service(parts, view.round_event)
        ease_collector()
        if task.fleet.metrics_port:
            stack.enter_context(serve_metrics(task.fleet.metrics_port, service.last_snapshot))
        parts.link.start()
        try:
            service.run(stopping.is_set, lambda: view.show(service))
        finally:
            service.stop()
    logging.getLogger(__name__).info("stopped")
    return 0


class _Flag:
    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self, number: int, frame: object) -> None:
        if self._set:
            raise KeyboardInterrupt  # asked twice: at once
        self._set = True


def _stop_on_signals() -> _Flag:
    flag = _Flag()
    signal.signal(signal.SIGTERM, flag.set)
    signal.signal(signal.SIGINT, flag.set)
    return flag
