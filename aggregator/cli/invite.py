"""``tessera-aggregator invite``: enrolment codes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tabulate import tabulate

from aggregator.cli.arguments import (
    add_home,
    add_labels,
    device_name,
    duration_seconds,
    labels_told,
    opened,
)
from aggregator.clock import moment_of
from aggregator.operate.invitations import DAY_SECONDS, UnusedCode
from device_sdk.system.command_line import add_out, positive_int
from device_sdk.system.printable import printable

DESCRIPTION = """\
Prints enrolment codes, one a line, or writes them with --out to a new file that only its owner can
read. Each lets one device join, once. Whoever holds a code can use it, so hand it over as you would
a password; it is shown only here.

--replaces ID is for a device that lost its identity: ID is revoked now, and whoever joins with the
code takes its place from the next round on.

--list shows the codes that can still be used, by ids that let nobody join; --withdraw ID has nobody
join with one any more."""

EXAMPLES = """\
examples:
  tessera-aggregator invite --home fleet --count 3 --expires 24h
  tessera-aggregator invite --home fleet --count 100 --out codes.txt
  tessera-aggregator invite --home fleet --name hall-3 --label site=north --label line=b
                                             named and labelled in devices and status
  tessera-aggregator invite --home fleet --replaces 3f2a
                                             for the device whose id begins with 3f2a
  tessera-aggregator invite --home fleet --withdraw 9c41
                                             the unused code that --list shows by this id

The device then: tessera-device join URL, which asks for the code.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_home(parser)
    parser.add_argument(
        "--count", type=positive_int, default=1, metavar="N", help="how many (default: 1)"
    )
    parser.add_argument(
        "--expires",
        type=duration_seconds,
        default=DAY_SECONDS,
        metavar="DURATION",
        help="usable for this long: 90s, 30m, 24h, 7d (default: 24h)",
    )
    add_out(parser, metavar="FILE", help="a new file, mode 0600, for them")
    parser.add_argument(
        "--replaces",
        metavar="ID",
        help="revoke this device in exchange: its name, or the first digits of its id",
    )
    parser.add_argument(
        "--name", type=device_name, metavar="NAME", help="what to call the device that joins"
    )
    add_labels(parser, "of the device that joins")
    unused = parser.add_mutually_exclusive_group()
    unused.add_argument("--list", action="store_true", help="show the codes that nobody has used")
    unused.add_argument("--withdraw", metavar="ID", help="an unused code, by its id's first digits")


def run(arguments: argparse.Namespace) -> int:
    with opened(arguments) as fleet:
        if arguments.list:
            _print(fleet.unused_codes())
            return 0
        if arguments.withdraw is not None:
            code = fleet.withdraw(arguments.withdraw)
            print(f"code {code.code_id} is withdrawn: nobody joins with it")
            return 0
        codes = fleet.invite(
            arguments.count,
            arguments.expires,
            name=arguments.name,
            labels=dict(arguments.label),
            replaces=arguments.replaces,
            out=arguments.out,
        )
    if arguments.out is None:
        print("\n".join(codes))
    return 0


def _print(codes: Sequence[UnusedCode]) -> None:
    lines = [
        {
            "id": each.code_id,
            "name": printable(each.name or "-"),
            "labels": printable(labels_told(each.labels) or "-"),
            "expires": moment_of(each.expires_unix_seconds),
        }
        for each in codes
    ]
    if lines:
        print(tabulate(lines, headers="keys", tablefmt="plain", disable_numparse=True))
    else:
        print("no code can be used: tessera-aggregator invite makes some")
