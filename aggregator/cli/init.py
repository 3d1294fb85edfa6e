"""``tessera-aggregator init``: keys, database and task file."""

from __future__ import annotations

import argparse
import os
import time

from aggregator.cli.arguments import add_home, add_lives, home_of, lives_of
from aggregator.errors import AggregatorError
from aggregator.keys.folder import initialise
from aggregator.task.template import task_template
from device_sdk.methods.registry import METHODS, MethodError, method_names

DESCRIPTION = """\
Makes a new aggregator in a folder that only its owner can read: the root key that every device will
trust, the keys for serving, the database, and task.toml, which says what the fleet learns.

keys/root.key may be kept elsewhere (a USB stick in a drawer): serve does not need it, only
rotate does. It lets another key, the delegate, renew the descriptor in its place for a year."""

EXAMPLES = """\
examples:
  tessera-aggregator init --home fleet                    # a task that recommends: scatter
  tessera-aggregator init --home fleet --method fedavg    # one on the devices' own arrays
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    parser.add_argument(
        "--method",
        default="scatter",
        metavar="NAME",
        help="what task.toml is written for (default: scatter); there is "
        + ", ".join(method_names(METHODS)),
    )
    add_lives(parser)


def run(arguments: argparse.Namespace) -> int:
    home = home_of(arguments)
    try:
        template = task_template(arguments.method)
    except MethodError as error:
        raise AggregatorError(str(error)) from None
    descriptor = initialise(home, int(time.time()), os.urandom, lives_of(arguments))
    written = not home.task_file.exists()
    if written:
        home.task_file.write_text(template, encoding="utf-8")
    first = "edit it first (the broker, what it learns)" if written else "as it was"
    print(f"made an aggregator in {home.folder}")
    print(f"  root key     {home.root_key} (fingerprint {descriptor.root_fingerprint.hex()})")
    print(f"  task file    {home.task_file}: {first}")
    print(f"               tessera-aggregator check --home {home.folder}")
    print(f"  next         tessera-aggregator invite --home {home.folder}")
    print("               a code for a device; --count 3 makes three. Then, for rounds,")
    print(f"               tessera-aggregator serve --home {home.folder}")
    return 0
