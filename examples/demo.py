"""48 unequal devices learn one model over MQTT on this machine, in about a minute.

Run it with `make demo`, or `python -m examples.demo --help`.
"""

from __future__ import annotations

import os
import sys

# Official onnxruntime wheels write to the user's cache folder unless this is set before the import.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
# Many devices share the cores: one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from device_sdk.errors import DeviceError
from device_sdk.system.command_line import add_out, natural, positive_int, print_any_text
from device_sdk.system.files import write_atomically
from examples.digits.baselines import all_small, alone, only_strong
from examples.digits.data import MOST_DEVICES, DealtDigits, deal_digits
from examples.digits.plan import CLASSES, Pace, round_seconds
from examples.digits.report import class_rows, findings, report_html, scheme_rows
from examples.digits.run import DigitsResults, run_fleet
from examples.fleet.broker import mosquitto_path
from examples.fleet.errors import FleetError
from examples.fleet.interrupts import interrupted_once
from examples.fleet.progress import milliseconds
from examples.fleet.work_clock import WorkClock, yardstick_seconds
from examples.program import round_bar

_DESCRIPTION = """\
Starts an MQTT broker, a tessera-aggregator and 48 devices of 4 classes. Each holds 30 handwritten
digits (scikit-learn's: nothing is downloaded), times the four rungs of one convolutional network on
itself, and trains the largest that it affords, in 12 rounds. Ends with tables and a report.html
that compare the fleet with the same devices alone, with all at the smallest rung, and with only the
strongest taking part."""

_EXAMPLES = """\
examples:
  make demo                                everything in a temporary folder
  make demo ARGS="--out out/demo"          keep homes, logs and the database for a look
  make demo ARGS=--recommender             films instead, on MovieLens 100K (--recommender --help)
  make demo ARGS=--local                   no fleet: export, measure and train on this machine alone
                                           (exports from torch: make venv first)
"""
BASELINES = {
    "alone": alone,
    "all at the smallest rung": all_small,
    "only the desktops": only_strong,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns 0 on success, 1 where a part failed, 2 for a wrong command line, 130 when stopped.
    """
    print_any_text()
    told = list(sys.argv[1:] if argv is None else argv)
    for flag in ("--recommender", "--local"):
        if flag in told:
            told.remove(flag)
            return _other(flag, told)
    parser = _parser()
    arguments = parser.parse_args(told)
    if arguments.devices % len(CLASSES) or arguments.devices > MOST_DEVICES:
        parser.error(
            f"--devices is {arguments.devices}; expected a multiple of {len(CLASSES)}, at most "
            f"{MOST_DEVICES}"
        )
    console = Console()
    if arguments.broker == "mosquitto" and mosquitto_path() is None:
        console.print("demo: Mosquitto is not installed; leave out --broker", style="red")
        return 1
    temporary = arguments.out is None
    output: Path = Path(tempfile.mkdtemp(prefix="tessera-demo-")) if temporary else arguments.out
    working = output / "fleet"
    try:
        working.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        console.print(
            f"demo: {working} holds an earlier run; delete it, or give another --out",
            style="red",
            markup=False,
        )
        return 1
    status = 0
    try:
        with interrupted_once():
            _run(arguments, output, working, console)
    except (FleetError, DeviceError, OSError, ValueError) as error:
        console.print(f"demo: {error}", style="red", markup=False)
        status = 1
    except KeyboardInterrupt:
        console.print("\nStopped; every child process has ended.")
        status = 130
    if temporary and status != 1:
        shutil.rmtree(working, ignore_errors=True)
    else:
        console.print(f"Homes, logs and the aggregator's database: {working}", soft_wrap=True)
    return status


def _other(flag: str, told: Sequence[str]) -> int:
    if flag == "--recommender":
        from examples import recommender_demo

        return recommender_demo.main(told)
    from examples import local_story

    return local_story.main(told)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="examples.demo",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recommender", action="store_true", help="the recommender's demo")
    parser.add_argument("--local", action="store_true", help="the story of one machine")
    add_out(parser, metavar="DIR", help="all files go here (default: a temporary folder)")
    parser.add_argument("--devices", type=positive_int, default=48, help="(%(default)s)")
    parser.add_argument("--rounds", type=positive_int, default=12, help="(%(default)s)")
    parser.add_argument(
        "--broker",
        choices=("auto", "mosquitto", "amqtt"),
        default="auto",
        help="auto: Mosquitto where it is installed, else amqtt (%(default)s)",
    )
    parser.add_argument("--seed", type=natural, default=0, help="of what is drawn (%(default)s)")
    return parser


def _run(arguments: argparse.Namespace, output: Path, working: Path, console: Console) -> None:
    dealt = deal_digits(arguments.devices, np.random.default_rng(arguments.seed))
    yardstick = yardstick_seconds()
    with console.status("timing a round of each rung ..."):
        seconds = round_seconds(
            dealt.train[0], WorkClock(yardstick), np.random.default_rng(arguments.seed)
        )
    pace = Pace.of(seconds)
    results = DigitsResults(arguments.devices, arguments.rounds, arguments.seed, pace)
    shown = ", ".join(f"{rung} {milliseconds(each)}" for rung, each in seconds.items())
    console.print(f"A round's training here: {shown}.", highlight=False)
    broker = None if arguments.broker != "amqtt" else "amqtt"
    with round_bar(console, arguments.rounds, "devices enrol and time themselves") as show:
        run_fleet(dealt, results, yardstick, working, broker, show)
    _compare(dealt, results, console)
    _print(results, console)
    report = output / "report.html"
    write_atomically(report, report_html(results).encode())
    console.print(f"\nThe report, with pictures: {report.resolve()}", style="bold", soft_wrap=True)
    console.print("Films instead: make demo ARGS=--recommender", highlight=False)


def _compare(dealt: DealtDigits, results: DigitsResults, console: Console) -> None:
    for name, play in BASELINES.items():
        with console.status(f"beside it: {name} ..."):
            results.baselines[name] = play(dealt, results.held, results.rounds, results.seed)


def _print(results: DigitsResults, console: Console) -> None:
    limit = milliseconds(results.pace.limit_seconds)
    titles = f"What each class affords within {limit}", "Accuracy on 357 unseen pictures"
    for title, (head, rows) in zip(
        titles, (class_rows(results), scheme_rows(results)), strict=True
    ):
        table = Table(*head, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for each in findings(results):
        console.print(each, highlight=False)
    console.print(
        f"{results.rounds} rounds, {results.updates:,} updates counted, in "
        f"{results.seconds:.0f} s. Broker: {results.broker}.",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
