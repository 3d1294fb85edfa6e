"""``tessera-aggregator rotate``: new keys."""

from __future__ import annotations

import argparse
import time

from aggregator.cli.arguments import add_home, add_lives, duration_seconds, lives_of, opened
from aggregator.errors import AggregatorError

DESCRIPTION = """\
rotate keys   makes a new delegate, and new signing and HPKE keys under a new descriptor. The root
              key signs the delegation: it has to be in keys/root.key for this. The old keys are
              honoured for a grace period, and then erased.
rotate root   makes a new root key and lets the old one, which has to be in keys/root.key, sign that
              it takes its place; then as rotate keys. Devices that trust the old root follow, up to
              8 rotations later. The old root key is erased here; destroy its copies.
rotate group  replaces the key that broadcasts are encrypted with, from the next round on. A
              revocation does this by itself.

A running serve takes up all of them without a restart. It renews descriptors by itself: rotate keys
when a key may have leaked, and before the delegation ends."""

EXAMPLES = """\
examples:
  tessera-aggregator rotate keys --home fleet --grace 2d
  tessera-aggregator rotate group --home fleet
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    parser.add_argument("what", choices=("keys", "root", "group"), help="what to replace")
    add_lives(parser)
    parser.add_argument(
        "--grace",
        type=duration_seconds,
        metavar="DURATION",
        help="how long the old keys are honoured, 30d at most (default: 7d, and never longer than "
        "their descriptor)",
    )
    parser.add_argument(
        "--after",
        type=int,
        metavar="SERIAL",
        help="for keys, after a restore: above this serial, whatever the clock says, as serve's "
        "message, or a device's status, names it",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.what == "group":
        _refuse_lives(arguments)
    if arguments.what != "keys" and arguments.after is not None:
        raise AggregatorError("--after is for rotate keys: leave it out")
    lives = lives_of(arguments, arguments.grace)
    with opened(arguments) as fleet:
        if arguments.what == "group":
            fleet.rotate_group()
            print("the next round is published under a new group key")
            return 0
        if arguments.what == "root":
            new = fleet.rotate_root(lives)
            print(
                "the root key is another one now (fingerprint "
                f"{new.root_fingerprint.hex()}): keep a copy of {fleet.home.root_key}, and destroy "
                "the copies of the old one"
            )
        else:
            new = fleet.rotate_keys(lives, after=arguments.after or 0)
    until = time.strftime("%Y-%m-%d", time.gmtime(new.delegation.expires_unix_seconds))
    print(f"descriptor {new.serial} is in force; serve can renew it until {until}")
    return 0


def _refuse_lives(arguments: argparse.Namespace) -> None:
    given = {
        "--descriptor-expires": arguments.descriptor_expires,
        "--delegation-expires": arguments.delegation_expires,
        "--grace": arguments.grace,
    }
    for option, value in given.items():
        if value is not None:
            raise AggregatorError(f"{option} is for rotate keys and rotate root: leave it out")
