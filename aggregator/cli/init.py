"""``tessera-aggregator init``: keys, database and task file."""

from __future__ import annotations

import argparse
import os
import time

from aggregator.cli.arguments import add_home, add_lives, home_of, lives_of
from aggregator.keys.folder import initialise
from aggregator.task.template import TASK_TEMPLATE

DESCRIPTION = """\
Makes a new aggregator in a folder that only its owner can read: the root key that every device will
trust, the keys for serving, the database, and task.toml, which says what the fleet learns.

keys/root.key may be kept elsewhere (a USB stick in a drawer): serve does not need it, only
rotate does. It lets another key, the delegate, renew the descriptor in its place for a year."""

EXAMPLES = """\
examples:
  tessera-aggregator init --home fleet
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    add_lives(parser)


def run(arguments: argparse.Namespace) -> int:
    home = home_of(arguments)
    descriptor = initialise(home, int(time.time()), os.urandom, lives_of(arguments))
    if not home.task_file.exists():
        home.task_file.write_text(TASK_TEMPLATE, encoding="utf-8")
    print(f"made an aggregator in {home.folder}")
    print(f"  root key     {home.root_key} (fingerprint {descriptor.root_fingerprint.hex()})")
    print(f"  task file    {home.task_file}: edit it first (the broker, the catalogue)")
    print(f"  next         tessera-aggregator invite --home {home.folder}")
    print("               a code for a device; --count 3 makes three. Then, for rounds,")
    print(f"               tessera-aggregator serve --home {home.folder}")
    return 0
