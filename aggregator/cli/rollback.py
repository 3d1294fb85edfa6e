"""``tessera-aggregator rollback``: an older version's model becomes the next version."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from aggregator.cli.arguments import add_home, add_task, home_of, served_task_of, task_of
from aggregator.errors import AggregatorError
from aggregator.rounds.replacement import require_return
from aggregator.store import TaskStore
from aggregator.store.tasks import TaskRow
from device_sdk.system.command_line import natural
from device_sdk.system.printable import printable

DESCRIPTION = """\
Asks serve to make an older version's model the next version, between two rounds: at once where none
is open, else when the open one has closed and its updates are part of a version. Devices notice
nothing but one more version. What is kept on the server beside the model, an optimizer's momenta
and how far its rate has decayed, begins anew; devices keep what is theirs. A version of before
another model took the task over (task replace) is refused where it does not fit the present one."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """What became of the version that was asked for last. ``version``: the one that waits;
    ``dropped``: why it did not become the next one."""

    version: int | None
    dropped: str | None

    @classmethod
    def of(cls, store: TaskStore) -> Rollback:
        """A task's."""
        return cls(store.versions.awaited(), store.facts.dropped_rollback)

    @property
    def said(self) -> str | None:
        """For people; None where there is nothing to say."""
        if self.version is not None:
            return f"version {self.version}'s model becomes the next version between two rounds"
        return None if self.dropped is None else printable(self.dropped)


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
    home = home_of(arguments)
    store = home.open_store()
    try:
        number = task_of(store, arguments).number
        own = store.task(number)
        # What serve does at the same time comes before all of this, or after it.
        with store.database.transaction():
            task = store.tasks.find(number)
            if arguments.cancel:
                print(_cancel(own, task))
                return 0
            row = own.versions.named(str(arguments.to), None)
            if task.request is not None:
                raise AggregatorError(f"task {task.name} waits to be replaced: go back after that")
            if row.version < own.facts.judged_from:
                require_return(own, served_task_of(home, store, task), row.version)
            own.versions.ask_for(row.version)
    finally:
        store.database.close()
    print(
        f"version {row.version}'s model becomes the next version of task {task.name} when serve is "
        "between two rounds"
    )
    return 0


def _cancel(store: TaskStore, task: TaskRow) -> str:
    awaited, dropped = store.versions.awaited(), store.facts.dropped_rollback
    if awaited is None and dropped is None:
        raise AggregatorError("no rollback waits for its turn")
    store.versions.ask_for(None)
    if awaited is None:
        return f"task {task.name} no longer says that {dropped}"
    return f"task {task.name} does not go back to version {awaited}"
