"""`tessera-device leave`: leave the fleet for good."""

from __future__ import annotations

import argparse

from device_sdk.cli.arguments import add_home, add_proxy, link_settings, log_to_stderr
from device_sdk.device import Device
from device_sdk.system.command_line import positive_float

DESCRIPTION = """\
Tells the aggregator that this device leaves, and waits until it has answered. From then on the
aggregator treats it as revoked: it drops what it would tell others of this device, and its reports;
what was counted stays in the sums. Data and what was learnt stay in the home, and recommend goes
on. Stop the device first. To join again takes a new code and a new home."""

EXAMPLES = """\
examples:
  tessera-device leave --home ./device-1
  rm -r ./device-1                          if its data and model are not wanted either
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_home(parser)
    add_proxy(parser)
    parser.add_argument(
        "--timeout",
        type=positive_float,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for the aggregator's answer (default: 30)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Leave, and say so."""
    log_to_stderr()
    with Device.open(arguments.home, link_settings=link_settings(arguments)) as device:
        device.leave(arguments.timeout)
    print("this device has left its fleet and joins no more rounds; what it learnt stays here")
    return 0
