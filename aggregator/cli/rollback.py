"""``tessera-aggregator rollback``: an older version's model becomes the next version."""

from __future__ import annotations

import argparse

from aggregator.cli.arguments import add_home, add_task, opened
from aggregator.cli.task import tell
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
    with opened(arguments) as fleet:
        if not arguments.cancel:
            return tell(fleet, fleet.rollback(arguments.to, arguments.task))
        task = fleet.versions(arguments.task).task
        seen = fleet.cancel_rollback(arguments.task)
    if seen.version is None:
        print(f"task {task} no longer says that {seen.dropped}")
    else:
        print(f"task {task} does not go back to version {seen.version}")
    return 0
