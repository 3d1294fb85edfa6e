"""``tessera-aggregator store``: where the store is, and to move it into a database."""

from __future__ import annotations

import argparse

from aggregator.cli.arguments import add_home, home_of, named_store
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome

DESCRIPTION = """\
Says where everything is kept that the aggregator must not lose: a file in the home, or a PostgreSQL
database, which processes on several machines need (serve --cluster ray --address).

--move copies all of it from the file into the database that the task file names, as store under
[cluster]. The database must be empty, and no serve may run. The file stays as a copy of before."""

EXAMPLES = """\
examples:
  tessera-aggregator store --home fleet
  tessera-aggregator store --home fleet --move
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    parser.add_argument(
        "--move", action="store_true", help="into the database that [cluster] of task.toml names"
    )


def run(arguments: argparse.Namespace) -> int:
    home = home_of(arguments)
    if arguments.move:
        url = named_store(home)
        if url is None:
            raise AggregatorError(
                f'{home.task_file} names no database: write store = "postgresql://..." under '
                "[cluster] first"
            )
        home = AggregatorHome(home.folder, url)
        home.move_store()
    store = home.open_store()
    where = home.database if home.store_url is None else store.database
    print(f"store        {where}")
    print(f"devices      {sum(1 for _ in store.devices.all())}")
    store.database.close()
    return 0
