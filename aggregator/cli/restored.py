"""``tessera-aggregator restored``: begin a new generation after a restore from a backup."""

from __future__ import annotations

import argparse
import os
import time

from aggregator.cli.arguments import add_home, home_of
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome, serve_lock
from aggregator.keys.folder import USUAL_LIVES, renew_descriptor
from device_sdk.wire.seal.broadcast import new_group_key

DESCRIPTION = """\
Run this once, while serve is stopped, after the home was restored from a backup. Devices have seen
rounds that the backup does not know: they accept them again only in a new generation. The open
round is given up; what was counted in it stays counted. The group key is replaced, and the
descriptor is renewed: devices may have seen newer ones than the backup's. Where the clock was ahead
when the home that this one replaces was served, serve says so and names the time to give as
--after."""

EXAMPLES = """\
examples:
  tessera-aggregator restored --home fleet    then serve
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    parser.add_argument(
        "--after",
        type=_unix_seconds,
        default=0,
        metavar="SECONDS",
        help="begin after this Unix time, whatever the clock says: when the other serve started, "
        "as serve's message names it",
    )


def run(arguments: argparse.Namespace) -> int:
    home = home_of(arguments)
    # A serve that runs would go on with the round that is given up here, in the old generation.
    with serve_lock(home):
        _begin_generation(home, arguments.after)
    return 0


def _begin_generation(home: AggregatorHome, after: int) -> None:
    store = home.open_store()
    now = int(time.time())
    tasks = [store.task(each.number) for each in store.tasks.all()]
    newest = max(task.facts.generation for task in tasks)
    if not after and now < newest:
        raise AggregatorError(
            f"this machine's clock is behind the backup's generation, {newest}: "
            "set it first or, if it is right and the other was not, give that number as --after"
        )
    # A fleet that is less than a second old has this second's number already; and so may a group
    # key that took the place of the last generation's.
    epoch = max((key.epoch for key in store.secrets.group_keys()), default=0)
    generation = max(now, after + 1, newest + 1, epoch + 1)
    with store.database.transaction():
        store.end_cluster()
        store.facts.generation = generation
        # Lives of the home that this one replaces began before: see aggregator/keys/fence.py.
        begun = max(now, after, store.facts.started_unix_seconds or 0)
        store.facts.started_unix_seconds = store.facts.announced_unix_seconds = begun
        # Another epoch than any that was used after the backup was made.
        store.secrets.add_group_key(new_group_key(generation, os.urandom))
        store.facts.rotation_due = True
        for task in tasks:
            for row in task.rounds.latest():
                if row.unfinished:
                    task.rounds.give_up(row.round, now)
            task.checkpoints.drop_partial()
    print(
        f"generation {generation} begins; if since the backup was made keys were rotated, run "
        "tessera-aggregator rotate keys now; if the fleet was moved to another broker, run "
        "tessera-aggregator broker move URL again"
    )
    try:
        renew_descriptor(home, store, now, os.urandom, USUAL_LIVES.descriptor_seconds)
    finally:
        store.database.close()


def _unix_seconds(text: str) -> int:
    seconds = int(text)
    if not 0 <= seconds < 2**40:
        raise ValueError(text)
    return seconds
