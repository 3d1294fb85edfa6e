"""``tessera-aggregator revoke``: send a device away."""

from __future__ import annotations

import argparse
import time

from aggregator.cli.arguments import add_home, device_of, opened
from aggregator.keys.registry import revoke

DESCRIPTION = """\
Ends a device's sessions at once and refuses it from now on. The group key, which it knows, is
replaced before the next round is published. Updates that were counted stay counted."""

EXAMPLES = """\
examples:
  tessera-aggregator revoke --home fleet hall-3    by its name
  tessera-aggregator revoke --home fleet 3f2a      by the first digits of its id, as devices has it
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    parser.add_argument(
        "id", metavar="ID", help="the device's name, or the first digits of its id; see devices"
    )


def run(arguments: argparse.Namespace) -> int:
    with opened(arguments) as (_, store), store.database.transaction():
        device = device_of(store, arguments.id)
        done = revoke(store, device.device_id, int(time.time()))
    print(f"{device.device_id.hex()} {'is revoked' if done else 'was revoked before'}")
    return 0
