"""``tessera-aggregator rotate``: new keys."""

from __future__ import annotations

import argparse
import os
import time

from aggregator.cli.arguments import add_home, duration_seconds, home_of
from aggregator.key_folder import DESCRIPTOR_SECONDS, GRACE_SECONDS, rotate_keys

_HELP = "replace the serving keys or the group key"
_DESCRIPTION = """\
rotate keys   makes new signing and HPKE keys under a new descriptor, signed by the root key, which
              has to be in keys/root.key for this. The old keys are honoured for a grace period.
rotate group  replaces the key that broadcasts are encrypted with, from the next round on. A
              revocation does this by itself.

A running serve takes up both without a restart."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "rotate",
        help=_HELP,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_home(parser)
    parser.add_argument("what", choices=("keys", "group"), help="what to replace")
    parser.add_argument(
        "--expires",
        type=duration_seconds,
        default=DESCRIPTOR_SECONDS,
        metavar="DURATION",
        help="of the new descriptor (default: 365d)",
    )
    parser.add_argument(
        "--grace",
        type=duration_seconds,
        default=GRACE_SECONDS,
        metavar="DURATION",
        help="how long the old keys are honoured (default: 7d)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    home = home_of(arguments)
    store = home.open_store()
    if arguments.what == "group":
        with store.database.transaction():
            store.facts.rotation_due = True
        print("the next round is published under a new group key")
    else:
        now = int(time.time())
        new = rotate_keys(home, store, now, os.urandom, arguments.expires, arguments.grace)
        print(f"descriptor {new.serial} is in force")
    store.database.close()
    return 0
