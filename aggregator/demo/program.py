"""The demo from its first line to its last: what it prints, and where its files go."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from aggregator.demo.baselines import all_small, alone, only_strong
from aggregator.demo.broker import mosquitto_path
from aggregator.demo.child import FleetError, interrupted_once
from aggregator.demo.digits import DealtDigits, deal_digits
from aggregator.demo.fleet import round_bar
from aggregator.demo.plan import CLASSES, ClassPace, round_seconds
from aggregator.demo.report import class_rows, findings, report_html, scheme_rows, shown
from aggregator.demo.run import DigitsResults, run_fleet
from aggregator.demo.work_clock import WorkClock, yardstick_seconds
from aggregator.look.page import milliseconds
from device_sdk.errors import DeviceError
from device_sdk.system.files import write_atomically

BASELINES = {
    "alone": alone,
    "all at the smallest rung": all_small,
    "only the desktops": only_strong,
}


@dataclass(frozen=True)
class DemoOptions:
    """``broker``: "auto", "mosquitto" or "amqtt". ``out``: None for a temporary folder."""

    devices: int
    rounds: int
    seed: int
    broker: str = "auto"
    out: Path | None = None


def show(options: DemoOptions) -> int:
    """Play it and print what came of it; 1 where a part failed, 130 when stopped, else 0."""
    console = Console()
    if options.broker == "mosquitto" and mosquitto_path() is None:
        console.print("demo: Mosquitto is not installed; leave out --broker", style="red")
        return 1

    def play(output: Path, working: Path) -> int:
        _play(options, output, working, console)
        return 0

    return in_folder(options.out, console, play, "\nStopped; every child process has ended.")


def in_folder(
    out: Path | None, console: Console, play: Callable[[Path, Path], int], stopped: str
) -> int:
    """Play a demo in a folder; its exit status, 1 where a part failed, 130 when stopped.

    Args:
        out: None for a temporary one, of which nothing but a report is left unless a part failed.
        play: is given the folder, and ``fleet`` in it, for homes, logs and the database.
        stopped: what is said of an interrupt that ``play`` does not take.
    """
    output = Path(tempfile.mkdtemp(prefix="tessera-demo-")) if out is None else out
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
    try:
        with interrupted_once():
            status = play(output, working)
    except (FleetError, DeviceError, OSError, ValueError) as error:
        console.print(f"demo: {error}", style="red", markup=False)
        status = 1
    except KeyboardInterrupt:
        console.print(stopped)
        status = 130
    if out is None and status != 1:
        shutil.rmtree(working, ignore_errors=True)
        with contextlib.suppress(OSError):  # a report is in it
            output.rmdir()
    else:
        console.print(f"Homes, logs and the aggregator's database: {working}", soft_wrap=True)
    return status


def _play(options: DemoOptions, output: Path, working: Path, console: Console) -> None:
    if options.devices % len(CLASSES):
        raise ValueError(
            f"there are {options.devices} devices; expected a multiple of {len(CLASSES)}, so that "
            "the classes are of one size"
        )
    dealt = deal_digits(options.devices, np.random.default_rng(options.seed))
    yardstick = yardstick_seconds()
    with console.status("timing a round of each rung ..."):
        seconds = round_seconds(
            dealt.train[0], WorkClock(yardstick), np.random.default_rng(options.seed)
        )
    pace = ClassPace.of(seconds)
    results = DigitsResults(options.devices, options.rounds, options.seed, pace)
    times = ", ".join(f"{shown(rung)} {milliseconds(each)}" for rung, each in seconds.items())
    console.print(f"A round's training here: {times}.", highlight=False)
    broker = None if options.broker != "amqtt" else "amqtt"
    with round_bar(console, options.rounds, "devices enrol and time themselves") as show:
        run_fleet(dealt, results, yardstick, working, broker, show)
    _compare(dealt, results, console)
    _print(results, console)
    report = output / "report.html"
    write_atomically(report, report_html(results).encode())
    console.print(f"\nThe report, with pictures: {report.resolve()}", style="bold", soft_wrap=True)


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
