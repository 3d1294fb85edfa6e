"""`tessera-device`: what this device can do, and learning on it, from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from device_sdk.artifact.errors import ArtifactError
from device_sdk.cli import bench, join, recommend, run, status, train, trust
from device_sdk.cli.arguments import CommandError
from device_sdk.errors import DeviceError
from device_sdk.system.printable import printable

_DESCRIPTION = """\
Runs on the device. join, run, status, recommend and trust belong to a fleet: the device learns with
others and sends them sealed updates, never its data. bench and train work alone: nothing leaves the
machine."""

_EXAMPLES = """\
examples:
  tessera-device join mqtts://broker.example --home ./device-1
  tessera-device run --home ./device-1 --interactions views.csv
                                  join a fleet with its operator's code, and take part in its rounds
  tessera-device bench --deadline 0.5 --items 3706 --interactions 2000
                                  the largest model that trains an epoch within half a second
  tessera-device train --interactions views.csv --recommend 10 --user anna
                                  learn from a file of user,item lines and recommend
  tessera-device bench --help     all options of a command
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main_parser = argparse.ArgumentParser(
        prog="tessera-device",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (join, run, status, recommend, trust, bench, train):
        module.add_to(commands)
    return main_parser


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with CODE behind options too.

    argparse takes an argument that may be left out for left out as soon as options follow URL.
    """
    whole = parser()
    arguments, left = whole.parse_known_args(argv)
    if len(left) == 1 and not left[0].startswith("-") and getattr(arguments, "code", None) == "-":
        arguments.code = left.pop()
    if left:
        whole.error(f"unrecognized arguments: {' '.join(left)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 where it failed, 2 for a wrong command line."""
    arguments = _parsed(argv)
    try:
        run = arguments.run
        return int(run(arguments))
    except (ArtifactError, CommandError, DeviceError) as error:
        print(f"tessera-device: {printable(str(error))}", file=sys.stderr)
        return 1
    except MemoryError:
        print("tessera-device: out of memory; try smaller sizes", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tessera-device: interrupted", file=sys.stderr)
        return 130
