"""``tessera-aggregator store``: where the store is, and to move it into a database."""

from __future__ import annotations

import argparse

from aggregator.cli.arguments import add_home, elsewhere, opened
from aggregator.errors import AggregatorError
from aggregator.store.roles import grant_worker
from device_sdk.system.printable import printable

DESCRIPTION = """\
Says where everything is kept that the aggregator must not lose: a file in the home, or a PostgreSQL
database, which processes on several machines need (serve --cluster ray --address).

--move copies all of it from the file into the database that the task file names, as store under
[cluster]. The database must be empty, and no serve may run. Then the file is erased, with the keys
and updates that it holds: make a backup first, to keep a copy of before.
--move-back copies it from there into the home's file again, and deletes it in the database.
--worker-role gives a role of that database what a cluster's workers need, and nothing else: name it
in worker_store under [cluster]. To be run again after an update of this program."""

EXAMPLES = """\
examples:
  tessera-aggregator store --home fleet
  tessera-aggregator store --home fleet --move
  tessera-aggregator store --home fleet --move-back
  tessera-aggregator store --home fleet --worker-role tessera_worker
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    move = parser.add_mutually_exclusive_group()
    move.add_argument(
        "--move", action="store_true", help="into the database that [cluster] of task.toml names"
    )
    move.add_argument("--move-back", action="store_true", help="into a file of the home again")
    move.add_argument(
        "--worker-role", metavar="ROLE", help="give it what workers need of the database"
    )


def run(arguments: argparse.Namespace) -> int:
    with opened(arguments) as fleet:
        if arguments.move or arguments.move_back:
            fleet.move_store(back=arguments.move_back)
        health, home = fleet.health(), fleet.home
        if arguments.worker_role is not None:
            if home.store_url is None:
                raise AggregatorError("roles are a database's, and this home's store is a file")
            grant_worker(health.store.database, arguments.worker_role)
            print(f"workers      {printable(arguments.worker_role)} has what they need, no more")
        print(f"store        {printable(health.store.database.where)}")
        print(f"devices      {len(health.devices)}")
    if note := elsewhere(home):
        print(f"note         {note}")
    return 0
