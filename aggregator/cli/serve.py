"""``tessera-aggregator serve``: run rounds until told to stop."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from aggregator.cli.arguments import add_home, elsewhere, home_of
from aggregator.errors import AggregatorError
from aggregator.events import LogEvent
from aggregator.home import AggregatorHome, serve_lock
from aggregator.logs import LogForm, LogLevel, LogSettings
from aggregator.operate.health import ProblemWatch
from aggregator.serve.alone import Hooks, serve_alone
from aggregator.serve.assembly import World
from aggregator.serve.beside import Beside, console_command
from aggregator.serve.live import LiveView, PlainView, View, log_round
from aggregator.serve.metrics import Snapshot, Told, serve_metrics
from aggregator.serve.service import Service
from aggregator.task.file import Task, read_task
from device_sdk.system.clock import awake_clock
from device_sdk.system.version import __version__

# Python's garbage collector in a process that serves: less often, and past what stays for good.

_YOUNG_OBJECTS = 20_000


def ease_collector() -> None:
    """To be called by a server's process when everything long-lived has been made.

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
again: the round goes on where it was, and nothing is counted twice.

A fleet that one process is too small for: --cluster ray has several take in what devices send (the
table [cluster] of the task file says how many), while this one coordinates them. With --local all
of them run on this machine, under a Ray that is started for them and ends with them; with
--address they run in a Ray cluster, on its machines, and the store has to be in PostgreSQL. A
second one with --standby takes over within ten seconds of the first one's end. See
docs/cluster.md."""

EXAMPLES = """\
examples:
  tessera-aggregator serve --home fleet
  tessera-aggregator serve --home fleet --log text >> fleet.log
  tessera-aggregator serve --home fleet --log json --log-level warning
  tessera-aggregator serve --home fleet --cluster ray --local
  tessera-aggregator serve --home fleet --cluster ray --address 10.0.0.5:6379
  tessera-aggregator serve --home fleet --cluster ray --address 10.0.0.5:6379 --standby
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    parser.add_argument(
        "--task", type=Path, metavar="FILE", help="the task file (default: task.toml in the home)"
    )
    log = parser.add_mutually_exclusive_group()
    log.add_argument(
        "--log",
        type=LogForm,
        choices=tuple(LogForm),
        metavar="text|json",
        help="log lines, on a terminal too: for people, or JSON objects (docs/operating/logs.md)",
    )
    log.add_argument(
        "--plain", dest="log", action="store_const", const=LogForm.TEXT, help="as --log text"
    )
    parser.add_argument(
        "--log-level",
        type=LogLevel,
        choices=tuple(LogLevel),
        default=LogLevel.INFO,
        metavar="LEVEL",
        help="log what is at least debug, info, warning or error (default: info)",
    )
    cluster = parser.add_argument_group("a fleet on several processes or machines")
    cluster.add_argument(
        "--cluster", choices=("ray",), help="workers take updates in; Ray places and restarts them"
    )
    where = cluster.add_mutually_exclusive_group()
    where.add_argument(
        "--local", action="store_true", help="on this machine, under a Ray of their own (default)"
    )
    where.add_argument(
        "--address", metavar="HOST:PORT", help="in the Ray cluster whose head is there"
    )
    cluster.add_argument(
        "--standby",
        action="store_true",
        help="with --address: wait while another serve coordinates, and take over when it is gone",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.cluster is None:
        for name in ("local", "address", "standby"):
            if getattr(arguments, name):
                raise AggregatorError(f"--{name} goes with --cluster ray")
    if arguments.standby and arguments.address is None:
        raise AggregatorError("--standby goes with --address: what --local runs ends with it")
    home = home_of(arguments)
    log = LogSettings(arguments.log or LogForm.TEXT, arguments.log_level)
    live = sys.stdout.isatty() and arguments.log is None
    view: View = LiveView(log) if live else PlainView(log, time.monotonic)
    stopping = _stop_on_signals()
    with ExitStack() as stack:
        stack.enter_context(view)
        if arguments.cluster is None:
            stack.enter_context(serve_lock(home))
        task = read_task(arguments.task or home.task_file)
        if arguments.address is not None and home.store_url is None:
            raise AggregatorError(
                "with --address the store has to be where all machines reach it: name a PostgreSQL "
                "database as store under [cluster] in the task file, and run tessera-aggregator "
                "store --move (see docs/store.md)"
            )
        if note := elsewhere(home):
            LogEvent.STORE_UNUSED.log(problem=note)
        world = World(awake_clock, time.time, np.random.default_rng(), os.urandom)
        ready = _Ready(stack, home, task)

        def turned(service: Service) -> None:
            ready.turn()
            view.show(service)

        console = Beside(console_command(home.folder, task.path))
        if task.fleet.console.address is not None:
            stack.enter_context(console)
        hooks = Hooks(log_round, turned, ready, console.problem)
        if arguments.cluster is None:
            serve_alone(home, task, world, stopping.is_set, hooks)
        else:
            from aggregator.cluster.joined_ray import JoinedRay
            from aggregator.cluster.ray_runtime import RayRuntime
            from aggregator.cluster.serve import coordinate

            cores = max(os.cpu_count() or 1, len(task.fleet.cluster.slots()))
            joined = JoinedRay(arguments.address, cores, log_to_driver=log.form is LogForm.TEXT)
            stack.callback(joined.leave)
            coordinate(
                home,
                task,
                world,
                lambda posts: RayRuntime(posts, joined, log),
                stopping.is_set,
                standby=arguments.standby,
                join=joined.join,
                hooks=hooks,
            )
    LogEvent.STOPPED.log()
    return 0


_HANGS_SECONDS = 60.0


class _Ready:
    """Called when a service has been made: with the first one, and with each that follows where the
    store was away."""

    def __init__(self, stack: ExitStack, home: AggregatorHome, task: Task) -> None:
        self._stack, self._home, self._task = stack, home, task
        self._service: Service | None = None
        self._problems = ProblemWatch(home)
        self._turned_seconds = time.monotonic()

    def __call__(self, service: Service) -> None:
        is_first, self._service = self._service is None, service
        ease_collector()
        if is_first:
            LogEvent.STARTED.log(
                release=__version__,
                home=self._home.folder.resolve(),
                broker=service.link.broker,
                tasks=service.task_names,
            )
        metrics = self._task.fleet.metrics
        if is_first and metrics.port:
            told = Told(self._last, self._problems, self._works)
            self._stack.enter_context(serve_metrics(metrics, told))

    def turn(self) -> None:
        """The service goes on with its work."""
        self._turned_seconds = time.monotonic()

    def _works(self) -> bool:
        """Whether it does, or waits for its store, which no restart would bring back."""
        hangs = time.monotonic() - self._turned_seconds > _HANGS_SECONDS
        return not hangs or any(each.code == "store-away" for each in self._problems())

    def _last(self) -> Snapshot | None:
        return None if self._service is None else self._service.last_snapshot()


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
