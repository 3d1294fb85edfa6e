"""``tessera-aggregator audit``: who did what with the fleet."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from tabulate import tabulate

from aggregator.cli.arguments import add_home, opened
from aggregator.clock import moment_of
from device_sdk.system.command_line import positive_int
from device_sdk.system.printable import printable

DESCRIPTION = """\
Shows what was done with the fleet last, by commands, a console or a program: when, by whom, with
what, and what came of it. Of commands the user of the operating system did it. It stands in the
home's audit.jsonl, a line of JSON each; codes, keys and texts of task files are not in it."""

EXAMPLES = """\
examples:
  tessera-aggregator audit --home fleet
  tessera-aggregator audit --home fleet --count 1000 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_home(parser)
    parser.add_argument(
        "--count", type=positive_int, default=20, metavar="N", help="how many (default: 20)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    with opened(arguments) as fleet:
        entries = fleet.audit(arguments.count)
    if arguments.json:
        print(json.dumps([asdict(each) for each in entries], indent=2))
        return 0
    lines = [
        {
            "when": moment_of(each.unix_seconds),
            "who": printable(each.actor),
            "what": printable(each.action),
            "with": printable(" ".join(f"{key}={of}" for key, of in each.arguments.items()) or "-"),
            "outcome": printable(each.outcome),
        }
        for each in entries
    ]
    if lines:
        print(tabulate(lines, headers="keys", tablefmt="plain", disable_numparse=True))
    else:
        print("nothing was done yet")
    return 0
