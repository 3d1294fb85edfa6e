"""`tessera-device recommend`: the best items for a local user, offline."""

from __future__ import annotations

import argparse
import json

from device_sdk.cli.arguments import CommandError, add_home
from device_sdk.device import Device
from device_sdk.errors import UnknownUser
from device_sdk.system.command_line import positive_int
from device_sdk.system.printable import printable, text_table

DESCRIPTION = """\
Recommends what a local user has not touched yet, from the last round that this device trained.
Needs no network, and works while the device runs in another process."""

EXAMPLES = """\
examples:
  tessera-device recommend --home ./device-1
  tessera-device recommend --home ./device-1 --user anna -n 5 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_home(parser)
    parser.add_argument(
        "--user",
        metavar="NAME",
        help="local user (default: the only one, or the one named default)",
    )
    parser.add_argument(
        "-n", type=positive_int, default=10, metavar="N", help="how many (default: 10)"
    )
    parser.add_argument("--task", metavar="NAME", help="of a device with several, this one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Rank and print."""
    with Device.open(arguments.home, read_only=True) as device:
        task = arguments.task
        try:
            best = device.recommend(arguments.n, user=arguments.user, task=task)
            titles = [device.title(item, task=task) for item, _ in best]
        except ValueError as error:
            raise CommandError(str(error)) from error
        except UnknownUser as error:
            raise CommandError(f"{error} (--user NAME)") from None
    if arguments.json:
        found = [
            {"item": item, "score": score, "title": title}
            for (item, score), title in zip(best, titles, strict=True)
        ]
        print(json.dumps(found, indent=2))
        return 0
    rows = [
        (str(place), printable(item), printable(title), f"{score:.3f}")
        for place, ((item, score), title) in enumerate(zip(best, titles, strict=True), 1)
    ]
    print(text_table(rows, ("", "item", "title", "score")))
    return 0
