"""``tessera-aggregator restored``: begin a new generation after a restore from a backup."""

from __future__ import annotations

import argparse

from aggregator.cli.arguments import add_home, opened

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
        type=int,
        default=0,
        metavar="SECONDS",
        help="begin after this Unix time, whatever the clock says: when the other serve started, "
        "as serve's message names it",
    )


def run(arguments: argparse.Namespace) -> int:
    with opened(arguments) as fleet:
        generation = fleet.restored(after=arguments.after)
    print(
        f"generation {generation} begins; if since the backup was made keys were rotated, run "
        "tessera-aggregator rotate keys now; if the fleet was moved to another broker, run "
        "tessera-aggregator broker move URL again"
    )
    return 0
