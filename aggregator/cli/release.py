"""``tessera-aggregator release``: let a held round go on."""

from __future__ import annotations

import argparse

from aggregator.cli.arguments import add_home, add_task, opened, tasks_of
from aggregator.errors import AggregatorError
from aggregator.rounds.machine import held, let_go
from aggregator.store import TaskStore

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
    with opened(arguments) as (_, store):
        chosen, several = tasks_of(store, arguments), len(store.tasks.all()) > 1
        said = {row.name or "": _release(store.task(row.number)) for row in chosen}
    if not any(said.values()):
        raise AggregatorError("no round is held")
    for name, line in said.items():
        if line is not None:
            print(f"{name}: {line}" if several else line)
    return 0


def _release(store: TaskStore) -> str | None:
    """What became of a task's held round; None where none is held."""
    if held(store) is None:
        return None
    latest = store.rounds.latest()
    number = latest[0].round if latest else 0
    unpublished = store.facts.unpublished is not None
    with store.database.transaction():
        dropped = let_go(store)
    if unpublished:
        return f"round {number + 1} is published once more"
    return f"round {number} goes on; {dropped} updates in quarantine were dropped"
