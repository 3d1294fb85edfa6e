"""`tessera-device trust`: believe another root key, on the operator's word."""

from __future__ import annotations

import argparse

from device_sdk.cli.home_option import add_home
from device_sdk.home.home import Home
from device_sdk.trust import trust

_DESCRIPTION = """\
Makes an enrolled device trust the root key that a fresh enrolment code names, where it cannot
follow by itself: the old root key was lost or stolen, or the device slept through too many
rotations. Identity, data and updates that wait stay. Stop the device first. The code is not used
up."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "trust",
        help="believe another root key, on the operator's word",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("code", metavar="CODE", help="a fresh code, as the operator gave it")
    add_home(parser)
    parser.add_argument(
        "--set-clock-back",
        action="store_true",
        help="also where this device believes that it is later than when the code was made",
    )


def run(arguments: argparse.Namespace) -> int:
    """Store what the code says."""
    home = Home(arguments.home.expanduser())
    try:
        trust(home, arguments.code, set_clock_back=arguments.set_clock_back)
    finally:
        home.close()
    print("this device trusts the code's root key from now on")
    print(f"next: tessera-device run --home {arguments.home}")
    return 0
