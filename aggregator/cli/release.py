"""``tessera-aggregator release``: let a held round go on."""

from __future__ import annotations

import argparse

from aggregator.cli.arguments import add_home, home_of
from aggregator.errors import AggregatorError

_HELP = "let a round go on that is held"
_DESCRIPTION = """\
A round is held when an update that passed its check could not be absorbed (it is then in
quarantine, and refused), or when the method could not make a version (a learning rate that is too
high, say). status shows why. release drops what is in quarantine and lets the round go on; where
the method failed, change the task file and restart serve first."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("release", help=_HELP, description=_DESCRIPTION)
    add_home(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    store = home_of(arguments).open_store()
    latest = store.rounds.latest()
    if not latest or latest[0].held is None:
        raise AggregatorError("no round is held")
    with store.database.transaction():
        dropped = store.log.drop_quarantined()
        store.rounds.hold(latest[0].round, None)
    store.database.close()
    print(f"round {latest[0].round} goes on; {dropped} updates in quarantine were dropped")
    return 0
