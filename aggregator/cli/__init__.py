"""``tessera-aggregator``: the server of a fleet, and what its operator does with it."""

from __future__ import annotations

import argparse
import sqlite3
import sys
from collections.abc import Sequence

from aggregator.errors import AggregatorError
from device_sdk.system.printable import printable

try:
    from aggregator.cli import (
        devices,
        init,
        invite,
        release,
        restored,
        revoke,
        rotate,
        serve,
        status,
    )
except ModuleNotFoundError as error:  # the light install has this command too
    sys.exit(
        f"tessera-aggregator: {error.name} is not installed, which a device does without: "
        "pip install 'tessera-edge[aggregator]'"
    )

_DESCRIPTION = """\
The server of a fleet: enrols devices, runs rounds, keeps the model. Everything lies in one folder,
the home, which only its owner can read. The commands may be used while serve runs,
but for restored."""

_EXAMPLES = """\
examples: a fleet in five steps
  tessera-aggregator init --home fleet       make keys, database and fleet/task.toml
  nano fleet/task.toml                       say which broker, which catalogue, which rounds
  tessera-aggregator invite --home fleet --count 3 --expires 24h
                                             enrolment codes, for tessera-device join URL
  tessera-aggregator serve --home fleet      run rounds, with a live view on a terminal
  tessera-aggregator devices --home fleet    who takes part; revoke ID sends one away

  tessera-aggregator invite --help           all options of a command
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main_parser = argparse.ArgumentParser(
        prog="tessera-aggregator",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (init, invite, serve, status, devices, revoke, rotate, release, restored):
        module.add_to(commands)
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 where it failed, 2 for a wrong command line."""
    arguments = parser().parse_args(argv)
    try:
        run = arguments.run
        return int(run(arguments))
    except AggregatorError as error:
        print(f"tessera-aggregator: {printable(str(error))}", file=sys.stderr)
        return 1
    except sqlite3.Error as error:
        print(
            f"tessera-aggregator: the database cannot be used: {error}. Nothing that was receipted "
            "is lost; mend the disk and start again",
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        print(f"tessera-aggregator: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tessera-aggregator: interrupted", file=sys.stderr)
        return 130
