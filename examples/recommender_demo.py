"""A fleet of unequal devices learns over MQTT on this machine, in about two minutes.

Run it with `make demo ARGS=--recommender`, or `python -m examples.recommender_demo --help`.
"""

from __future__ import annotations

import os
import sys

# Official onnxruntime wheels write to the user's cache folder unless this is set before the import.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
# The times that throttles are set by are those of one thread, as on the devices.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from aggregator.cli.demo import add_run_options
from aggregator.demo.broker import mosquitto_path
from aggregator.demo.child import FleetError
from aggregator.demo.program import in_folder
from device_sdk.system.command_line import positive_int, print_any_text
from examples.datasets.movielens import DatasetError, data_root
from examples.download_bar import download_with_bar
from examples.fleet.data import FleetData, load_fleet_data
from examples.fleet.fleet import Fleet, FleetOptions
from examples.fleet.plan import CLASSES
from examples.fleet.progress import live_view
from examples.fleet.report import write_report
from examples.fleet.summary import print_summary, print_synthetic_warning

_DESCRIPTION = """\
Starts an MQTT broker, a tessera-aggregator and 48 devices in 4 processes. Each device has a folder,
an identity and some of MovieLens 100K's 943 users of its own, is slowed down to one of 4 capacity
classes, and takes part in 10 rounds. Six devices of each class time their training and pick how
many of the model's columns they can afford. Ends with tables and a report.html. Ctrl-C stops
everything and shows what is known."""

_EXAMPLES = """\
data: --data, else the folder in TESSERA_DATA, else ../shared/data, else downloaded from GroupLens
(5 MB, checksum checked), else, without a network, synthetic data that are labelled as such.

examples:
  make demo ARGS=--recommender                       everything in a temporary folder
  make demo ARGS="--recommender --out out/films"     keep homes, logs and the database for a look
  make demo ARGS="--recommender --rounds 4"          a shorter one
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns 0 on success, 1 where a part failed, 2 for a wrong command line, 130 when stopped.
    """
    print_any_text()
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.devices < arguments.processes * len(CLASSES):
        parser.error(
            f"--devices is {arguments.devices}; {arguments.processes} processes with every class "
            f"of {len(CLASSES)} take at least {arguments.processes * len(CLASSES)}"
        )
    console = Console()

    def play(output: Path, working: Path) -> int:
        try:
            return _run(arguments, output, working, console)
        except DatasetError as error:
            raise FleetError(str(error)) from error

    return in_folder(arguments.out, console, play, "stopped before the fleet had started")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="examples.recommender_demo",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder that holds ml-100k")
    parser.add_argument("--devices", type=positive_int, default=48, help="identities (%(default)s)")
    parser.add_argument(
        "--processes", type=positive_int, default=4, help="that hold them (%(default)s)"
    )
    add_run_options(parser, rounds=10)
    return parser


def _run(arguments: argparse.Namespace, output: Path, working: Path, console: Console) -> int:
    data = _load(arguments, output, console)
    mosquitto = None if arguments.broker == "amqtt" else mosquitto_path()
    if arguments.broker == "mosquitto" and mosquitto is None:
        raise FleetError("Mosquitto is not installed; leave out --broker, or install it")
    options = FleetOptions(
        mosquitto,
        devices=arguments.devices,
        processes=arguments.processes,
        rounds=arguments.rounds,
        seed=arguments.seed,
    )
    with console.status("timing a round's training, and recommenders that see all data ..."):
        fleet = Fleet(data, options, working)
    status = _run_fleet(fleet, console)
    console.print()
    print_summary(console, fleet.results)
    report = output / "report.html"
    write_report(report, fleet.results)
    console.print(f"\nThe report, with pictures: {report.resolve()}", style="bold", soft_wrap=True)
    return status


def _run_fleet(fleet: Fleet, console: Console) -> int:
    try:
        with live_view(console, time.monotonic) as show:
            fleet.run(show, lambda name: console.print(f"Broker: {name}.", highlight=False))
    except KeyboardInterrupt:
        fleet.results.stopped_early = "it was interrupted."
        console.print("\nStopped; every child process has ended. What is known so far:")
        return 130
    except FleetError as error:
        fleet.results.stopped_early = f"{error}."
        console.print(f"\ndemo: {error}", style="red", markup=False)
        return 1
    return 0


def _load(arguments: argparse.Namespace, output: Path, console: Console) -> FleetData:
    data = load_fleet_data(
        data_root() if arguments.data is None else arguments.data,
        output / "data",
        download=lambda folder: download_with_bar(folder, console),
        rng=np.random.default_rng(arguments.seed),
    )
    if data.synthetic:
        print_synthetic_warning(console, data.origin)
    console.print(
        f"{data.name}: {data.interactions:,} training interactions of {len(data.user_ids):,} users "
        f"with {len(data.item_ids):,} items, {'drawn' if data.synthetic else data.origin}.\n"
        "Each user's latest item is held out; it is on no device but for the test.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return data


if __name__ == "__main__":
    sys.exit(main())
