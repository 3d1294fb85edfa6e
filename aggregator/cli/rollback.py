"""``tessera-aggregator rollback``: an older version's model becomes the next version."""

from __future__ import annotations

import argparse

from aggregator.cli.arguments import add_home, add_task, opened, task_of
from aggregator.cli.task import go_back
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.operate.health import Rollback
from aggregator.operate.names import served_task_of
from aggregator.rounds.replacement import misfit
from aggregator.store import TaskStore
from device_sdk.system.command_line import natural

DESCRIPTION = """\
Asks serve to make an older version's model the next version, between two rounds: at once where none
is open, else when the open one has closed and its updates are part of a version. Devices notice
nothing but one more version. What is kept on the server beside the model, an optimizer's momenta
and how far its rate has decayed, begins anew; devices keep what is theirs. With a version of before
another model took the task over (task replace), which does not fit the present one, the task file
of that time is used again: it is kept (task show NAME --version N)."""


EXAMPLES = """\
examples:
  tessera-aggregator models --home fleet              which versions there are
  tessera-aggregator rollback --home fleet --to 12    --cancel takes it back before its turn
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_home(parser)
    add_task(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--to", type=natural, metavar="N", help="a version that models lists")
    which.add_argument(
        "--cancel", action="store_true", help="leave out one that waits for its turn"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    with opened(arguments) as (home, store):
        own = store.task(task_of(store, arguments).number)
        if arguments.cancel:
            print(_cancel(own))
        else:
            _ask(home, own, arguments.to)
    return 0


def _ask(home: AggregatorHome, store: TaskStore, version: int) -> None:
    tasks, versions = store.fleet.tasks, store.versions
    # What serve does at the same time comes before all of this, or after it.
    with store.database.transaction():
        task = tasks.find(store.number)
        versions.named(str(version), None)
        if task.request is not None:
            raise AggregatorError(f"task {task.name} waits to be replaced: go back after that")
        fits = version >= store.facts.judged_from or not misfit(
            store, served_task_of(home, store.fleet, task), version
        )
        if fits:
            versions.ask_for(version)
    if fits:
        print(
            f"version {version}'s model becomes the next version of task {task.name} when serve is "
            "between two rounds"
        )
    else:
        go_back(home, store.fleet, task, version)


def _cancel(store: TaskStore) -> str:
    tasks = store.fleet.tasks
    with store.database.transaction():
        task, seen = tasks.find(store.number), Rollback.of(store)
        if seen.version is None and seen.dropped is None:
            raise AggregatorError("no rollback waits for its turn")
        if store.versions.awaited() is None and seen.version is not None:
            tasks.change(store.number, request=None)
        store.versions.ask_for(None)
    if seen.version is None:
        return f"task {task.name} no longer says that {seen.dropped}"
    return f"task {task.name} does not go back to version {seen.version}"
