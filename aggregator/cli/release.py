"""``tessera-aggregator release``: let a held round go on."""

from __future__ import annotations

import argparse

from aggregator.cli.arguments import add_home, add_task, opened

DESCRIPTION = """\
A round is held when an update that passed its check could not be absorbed (it is then in
quarantine, and refused), when the method could not make a version that can be published (a learning
rate that is too high, say), when the method's own code failed in any other way, or before it opens:
when it could not be published, or when what the last round sent out did harm to a share of its
devices (round.abort_share). status shows why.
release drops what is in quarantine and lets the round go on; where the method or the publication
failed, change the task file, or the method's package, and restart serve first. What the method's
own code failed at is tried again when serve starts, without release too."""

EXAMPLES = """\
examples:
  tessera-aggregator status --home fleet              why a round is held
  tessera-aggregator release --home fleet --task air  of one task; without --task of all
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    add_task(parser, "of this task only (default: of all)")


def run(arguments: argparse.Namespace) -> int:
    with opened(arguments) as fleet:
        released = fleet.release(arguments.task)
    for each in released:
        line = f"round {each.round} is published once more"
        if each.dropped is not None:
            line = f"round {each.round} goes on; {each.dropped} updates in quarantine were dropped"
        print(f"{each.task}: {line}")
    return 0
