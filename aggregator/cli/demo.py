"""``tessera-aggregator demo``: unequal devices learn one model over MQTT on this machine."""

from __future__ import annotations

import argparse
import os

from device_sdk.system.command_line import add_out, natural, positive_int

DESCRIPTION = """\
Starts an MQTT broker, an aggregator and 48 devices of 4 classes on this machine. Each device holds
30 handwritten digits (scikit-learn's: nothing is downloaded), times the four rungs of one
convolutional network on itself, and trains the largest that it affords, in 12 rounds. Ends with
tables and a report.html that compare the fleet with the same devices alone, with all at the
smallest rung, and with only the strongest taking part. Takes a minute or two."""
EXAMPLES = """\
examples:
  tessera-aggregator demo                  everything in a temporary folder
  tessera-aggregator demo --out out/demo   keep homes, logs and the database for a look
  tessera-aggregator demo --seed 1         other pictures on other devices"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--devices", type=positive_int, default=48, help="at most 48, a multiple of 4 (%(default)s)"
    )
    add_run_options(parser, rounds=12)


def add_run_options(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """What all demos over a broker ask for; ``rounds``: unless told otherwise."""
    add_out(parser, metavar="DIR", help="all files go here (default: a temporary folder)")
    parser.add_argument("--rounds", type=positive_int, default=rounds, help="(%(default)s)")
    parser.add_argument(
        "--broker",
        choices=("auto", "mosquitto", "amqtt"),
        default="auto",
        help="auto: Mosquitto where it is installed, else amqtt (%(default)s)",
    )
    parser.add_argument("--seed", type=natural, default=0, help="of what is drawn (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 1 where a part failed, 130 when stopped."""
    # Many devices share the cores: one thread each. NumPy reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from aggregator.demo.program import DemoOptions, show

    return show(
        DemoOptions(
            arguments.devices, arguments.rounds, arguments.seed, arguments.broker, arguments.out
        )
    )
