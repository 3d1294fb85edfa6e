"""`tessera-device trust`: believe another root key, on the operator's word."""

from __future__ import annotations

import argparse
import sys

from device_sdk.cli.arguments import add_code, add_home, code_of
from device_sdk.enrol import trust
from device_sdk.home.home import Home

DESCRIPTION = """\
Makes an enrolled device trust the root key that a fresh enrolment code names, where it cannot
follow by itself: the old root key was lost or stolen, or the device slept through too many
rotations. Identity, data and updates that wait stay. Stop the device first. The code is not used
up; it is asked for, or read as join reads one."""

EXAMPLES = """\
examples:
  tessera-device trust --home ./device-1          (asks for the code)
  tessera-device trust --home ./device-1 --code-file code.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_code(parser)
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
        code = code_of(arguments, sys.stdin, sys.stderr)
        trust(home, code, set_clock_back=arguments.set_clock_back)
    finally:
        home.close()
    print("this device trusts the code's root key from now on")
    print(f"next: tessera-device run --home {arguments.home}")
    return 0
