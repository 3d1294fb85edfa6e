"""``tessera-aggregator simulate``: a task tried out on virtual devices, before there is a fleet."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from aggregator.errors import AggregatorError
from device_sdk.system.clock import MonotonicClock
from device_sdk.system.command_line import (
    INTERRUPTED,
    natural,
    positive_float,
    positive_int,
)
from device_sdk.system.printable import printable
from device_sdk.tables.options import add_reading

if TYPE_CHECKING:
    from aggregator.simulate.record import Recorder

DESCRIPTION = """\
Runs a task file's rounds over virtual devices on this machine: the methods and learners of the
product, sampling, deadline and quorum in virtual time, evaluation on what each device holds back.
No broker, no keys, no home. It prints a table and writes runs/NAME.json, and runs/NAME.png where
matplotlib is installed; tessera-aggregator compare lays such runs over each other. No record is
replaced: where NAME is taken, a number follows it. Ctrl-C keeps the rounds that were played.

--data names a function of yours, function(devices, rng), that returns the data of each device: for
a method on arrays a device_sdk.LocalData, for a method with a catalogue the items of the device's
user, oldest first; or a table of interactions, of whose users each has a device. The same seed
gives the same model, bit for bit."""
EXAMPLES = """\
examples:
  tessera-aggregator simulate --example films     write films/ with a task and made-up data
  tessera-aggregator simulate films/task.toml --data films/data.py:devices --devices 500
  tessera-aggregator simulate films/task.toml --data films/data.py:devices --devices 500 \\
      --rounds 50 --seeds 5 --speeds k:4,8,16 --dropout 0.2 --name weak
  tessera-aggregator simulate films/task.toml --data ratings.csv --devices 600
  tessera-aggregator compare runs/films.json runs/weak.json

a file of classes for --speeds:
  [[class]]
  name = "sensor"       # for people
  share = 3             # of the fleet, relative to the other classes
  speed = 0.05          # times a device of speed 1, which decides k or the artifact
  k = 8                 # or say the columns (scatter), or the artifact = "small", yourself
  dropout = 0.3         # at least so many of them are away in a round"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def chance(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to 1 (0.2 is 20 %)")
    return value


def run_name(text: str) -> str:
    """A name that is a file's."""
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text[:70]!r} is no name: a-z A-Z 0-9 . _ -")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("task", nargs="?", type=Path, metavar="TASK.toml", help="as serve reads it")
    parser.set_defaults(spare="task")
    parser.add_argument("--example", type=Path, metavar="DIR", help="write one, and run nothing")
    parser.add_argument(
        "--data",
        metavar="MODULE:FUNCTION",
        help="what the devices have, or FILE.py:FUNCTION, or the FILE of a table of interactions",
    )
    parser.add_argument(
        "--devices", type=positive_int, default=100, metavar="N", help="how many (default: 100)"
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=20, metavar="R", help="how many (default: 20)"
    )
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="S", help="of the (first) run (default: 0)"
    )
    parser.add_argument(
        "--seeds", type=positive_int, default=1, metavar="N", help="runs, of seeds S, S+1, ..."
    )
    virtual = parser.add_argument_group("the virtual devices")
    virtual.add_argument(
        "--speeds",
        default="",
        metavar="SAID",
        help="lognormal:0.5 (the spread of the logarithm), k:8,16,32,64 (equal classes that train "
        "so many columns), or a file of classes (default: all of speed 1)",
    )
    virtual.add_argument(
        "--pace",
        type=positive_float,
        default=1.0,
        metavar="SECONDS",
        help="virtual seconds for 1,000 samples of the whole model at speed 1 (default: 1)",
    )
    for name, does in (
        ("dropout", "it is away"),
        ("crash", "it dies in its training"),
        ("late", "its update comes after the deadline"),
        ("nan", "its update holds NaN"),
    ):
        virtual.add_argument(
            f"--{name}", type=chance, default=0.0, metavar="P", help=f"how likely in a round {does}"
        )
    parser.add_argument(
        "--name",
        type=run_name,
        help="of the run (default: the task's), and a number where it is taken",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="DIR", help="for files (default: runs)"
    )
    parser.add_argument(
        "--cluster",
        metavar="ray[:ADDRESS]",
        help="spread the devices over Ray's workers: of a Ray of its own on this machine, or of "
        "the cluster at ADDRESS; its processes must find --data too",
    )
    parser.add_argument(
        "--workers", type=positive_int, metavar="N", help="with --cluster (default: its CPU cores)"
    )

    add_reading(parser, "a table of --data")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.example is not None:
        from aggregator.simulate.example import write_example

        command = write_example(arguments.example)
        print(f"wrote {printable(str(arguments.example))}; now try\n\n  {printable(command)}\n")
        return 0
    for name, wanted in (("TASK.toml", arguments.task), ("--data", arguments.data)):
        if wanted is None:
            raise AggregatorError(
                f"simulate needs {name}; simulate --example DIR writes something to begin with"
            )
    if importlib.util.find_spec("onnxruntime") is None:
        raise AggregatorError(
            "onnxruntime is not installed, which devices train with: pip install tessera-edge"
        )
    # It needs what trains on a device, which no other command loads.
    from aggregator.simulate.run import prepare
    from aggregator.simulate.shown import rounds_table, runs_table

    simulated = prepare(arguments, MonotonicClock())
    recorder, interrupted = simulated.recorder, False
    try:
        with _progress() as show:
            simulated.play(show)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        path = recorder.write()
    if path is None:
        print("interrupted before a round was over: nothing is recorded", file=sys.stderr)
        return INTERRUPTED
    record = recorder.made()
    print(rounds_table(record))
    print()
    print(runs_table([record]))
    for line in simulated.remarks():
        print(f"\n{printable(line)}", end="")
    print(f"\n{printable(str(path))} {_pictured(recorder, path)}")
    return INTERRUPTED if interrupted else 0


def _pictured(recorder: Recorder, path: Path) -> str:
    from aggregator.simulate.shown import draw

    picture = path.with_suffix(".png")
    try:
        draw([recorder.made()], picture)
    except ImportError:
        return f"holds the run. {NO_PICTURE}"
    return f"holds the run, {printable(picture.name)} shows it"


NO_PICTURE = (
    "For a picture install matplotlib: pip install 'tessera-edge[aggregator,simulate]', and see "
    "tessera-aggregator compare"
)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """One line on standard error, rewritten on a terminal; nothing elsewhere."""
    live = sys.stderr.isatty()

    def show(text: str) -> None:
        if live:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")
