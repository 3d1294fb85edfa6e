"""``tessera-aggregator revoke``: send a device away."""

from __future__ import annotations

import argparse

from aggregator.cli.arguments import add_home, opened

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
    with opened(arguments) as fleet:
        device = fleet.revoke(arguments.id)
    print(f"{device.device_id} {'was revoked before' if device.before else 'is revoked'}")
    return 0
