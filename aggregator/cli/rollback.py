"""``tessera-aggregator rollback``: an older version's model becomes the next version."""

from __future__ import annotations

import argparse

from aggregator.cli.arguments import add_home, add_task, home_of, task_of
from aggregator.errors import AggregatorError
from device_sdk.system.command_line import natural

DESCRIPTION = """\
Asks serve to make an older version's model the next version, between two rounds: at once where none
is open, else when the open one has closed and its updates are part of a version. Devices notice
nothing but one more version. What is kept on the server beside the model, an optimizer's momenta
and how far its rate has decayed, begins anew; devices keep what is theirs."""


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
    store = home_of(arguments).open_store()
    try:
        task = task_of(store, arguments)
        versions = store.task(task.number).versions
        if arguments.cancel:
            awaited = versions.awaited()
            if awaited is None:
                raise AggregatorError("no rollback waits for its turn")
            versions.ask_for(None)
            print(f"task {task.name} does not go back to version {awaited}")
            return 0
        with store.database.transaction():
            row = versions.named(str(arguments.to), None)
            versions.ask_for(row.version)
    finally:
        store.database.close()
    print(
        f"version {row.version}'s model becomes the next version of task {task.name} when serve is "
        "between two rounds"
    )
    return 0
