"""`tessera-device bench`: what this device trains, how fast, and the largest of it in time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from device_sdk.capability import Request, TimedOption, WorkSizes, bench_solved, bench_stepped
from device_sdk.capability.bench import WhenNoneFits
from device_sdk.capability.report import (
    BenchResult,
    NoResult,
    compared,
    device_names,
    shown,
    to_csv,
)
from device_sdk.cli.arguments import CommandError, ProgressLine, add_providers
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.scatter.contract import LossName
from device_sdk.system.command_line import (
    add_out,
    fraction,
    positive_float,
    positive_int,
    slowdown,
)
from device_sdk.system.printable import printable
from device_sdk.wire.publish.task_messages import BROADCAST_CODECS

DESCRIPTION = """\
Times what this device would really do in a round, and says how large a model it can train in time.

--artifact: the train step of any exported model, on batches made up for it; of a ladder (what
export.submodels wrote), of all its rungs. For each it shows milliseconds, samples a second, memory,
bytes of a round, and energy where the machine tells; with --deadline also which of them a device
takes, by the code that a device runs in a round, and whether that holds when it is run again.
--items: the latent dimension k of the factorisation that is installed with the device, for a round
of least squares or BPR with so many items and interactions.
--compare: results of several devices, kept with --out, in one table.

taskset and a container's limits hold, and are shown. Nothing leaves the machine."""

EXAMPLES = """\
examples:
  tessera-device bench --artifact artifacts/net
                          every rung of a ladder, or one artifact alone
  tessera-device bench --artifact artifacts/net --deadline 10 --samples 2000 --epochs 2
                          which of them trains 2,000 samples twice within 10 s
  tessera-device bench --artifact artifacts/small artifacts/large --batch 64
  taskset -c 0 tessera-device bench --artifact artifacts/net --deadline 10 --out one-core
                          on one core; writes one-core/bench.json, .csv and, where matplotlib is
                          installed, .png
  tessera-device bench --compare one-core/bench.json phone/bench.json --out both
                          devices over each other
  tessera-device bench --deadline 0.5 --items 3706 --interactions 2000
                          the largest k of least squares
  tessera-device bench --deadline 0.5 --items 3706 --interactions 8000 --users 48 --loss bpr
                          a gateway's users, by BPR
  tessera-device bench --artifact artifacts/net --deadline 10 --slowdown 8 --json
                          as if this machine were eight times slower; for programs, which find the
                          answer under "chosen" (null: none fits)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--artifact", type=Path, nargs="+", metavar="DIR", help="artifacts, and folders of ladders"
    )
    what.add_argument(
        "--items", type=positive_int, metavar="M", help="items in the factorisation's catalogue"
    )
    what.add_argument(
        "--compare", type=Path, nargs="+", metavar="JSON", help="results of bench --out"
    )
    parser.add_argument(
        "--deadline",
        type=positive_float,
        metavar="SECONDS",
        help="a round's work has to end within this (--items needs it)",
    )
    parser.add_argument("--threads", type=positive_int, help="threads in an operator (default: 1)")
    add_providers(parser)
    parser.set_defaults(providers=None)  # so that what was not asked for is not refused
    step = parser.add_argument_group("a round with --artifact")
    step.add_argument("--samples", type=positive_int, metavar="N", help="default: 1000")
    step.add_argument("--epochs", type=positive_int, help="passes over them (default: 1)")
    step.add_argument(
        "--batch",
        type=positive_int,
        metavar="N",
        help="samples, or triples, in a step (default: the export's; of BPR all in one)",
    )
    step.add_argument(
        "--most-memory", type=positive_int, metavar="BYTES", help="do not choose what takes more"
    )
    step.add_argument(
        "--most-bytes",
        type=positive_int,
        metavar="BYTES",
        help="do not choose what takes more down and up in a round",
    )
    for way, default in (("broadcast", "float16"), ("update", "int8")):
        step.add_argument(
            f"--{way}-codec",
            choices=tuple(BROADCAST_CODECS),
            help=f"as in the task file (default: {default})",
        )
    task = parser.add_argument_group("a round with --items")
    task.add_argument(
        "--interactions",
        type=positive_int,
        metavar="N",
        help="on this device, of all its users together (needed)",
    )
    task.add_argument("--users", type=positive_int, help="of this device (default: 1)")
    task.add_argument(
        "--loss",
        choices=get_args(LossName),
        help="what the task minimises (default: least-squares)",
    )
    task.add_argument("--max-k", type=positive_int, metavar="K", help="largest k (default: 128)")
    task.add_argument(
        "--when-none-fits",
        choices=("one", "decline"),
        help="where even k = 1 misses: take 1, or decline (default: one)",
    )
    search = parser.add_argument_group("the measurement")
    search.add_argument(
        "--headroom",
        type=fraction,
        default=0.2,
        metavar="SHARE",
        help="share of the deadline to keep free (default: 0.2)",
    )
    search.add_argument(
        "--time-box",
        type=positive_float,
        default=10.0,
        metavar="SECONDS",
        help="the measurement's own limit, beside opening the artifacts (default: 10)",
    )
    search.add_argument(
        "--slowdown",
        type=slowdown,
        default=1.0,
        metavar="X",
        help="emulate a device X times slower (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_out(
        parser, metavar="DIR", help="write bench.json, bench.csv and a picture, bench.png, here"
    )


# Options that only one of the ways to bench has a use for.
_OF_ARTIFACTS = (
    "samples", "epochs", "most_memory", "most_bytes", "broadcast_codec", "update_codec",
)  # fmt: skip
_OF_ITEMS = ("interactions", "users", "loss", "max_k", "when_none_fits")
_OF_STEPS = ("batch", "threads", "providers")


def run(arguments: argparse.Namespace) -> int:
    """Measure, or read what was measured, and show it. Raises CommandError."""
    if arguments.compare is not None:
        return _compare(arguments)
    line = ProgressLine(sys.stderr)
    line.show("loading ...")
    try:
        result = _artifacts(arguments, line) if arguments.artifact else _items(arguments, line)
    except ValueError as error:
        raise CommandError(str(error)) from None
    finally:
        line.clear()
    print(result.to_json() if arguments.json else shown(result))
    if arguments.out is not None:
        names = device_names([arguments.out / "bench.json"])
        _write(arguments.out, [result], names, quiet=arguments.json)
    return 0


def _refuse(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise CommandError(f"--{name.replace('_', '-')} {why}")


def _compare(arguments: argparse.Namespace) -> int:
    of_others = ("deadline", *_OF_ARTIFACTS, *_OF_ITEMS, *_OF_STEPS)
    _refuse(arguments, of_others, "is of a measurement, which --compare does not make")
    try:
        results = [BenchResult.read(path) for path in arguments.compare]
    except NoResult as error:
        raise CommandError(str(error)) from None
    if len({each.kind == "k" for each in results}) > 1:
        raise CommandError("--compare: some of these are of --artifact and some of --items")
    names = device_names(arguments.compare)
    if arguments.json:
        raise CommandError("--compare prints a table; its files are JSON already")
    print(compared(results, names))
    if arguments.out is not None:
        _write(arguments.out, results, names, quiet=False)
    return 0


def _write(
    folder: Path, results: Sequence[BenchResult], names: Sequence[str], *, quiet: bool
) -> None:
    from device_sdk.capability.picture import draw

    written = ["bench.csv"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.csv").write_text(to_csv(results, names), encoding="utf-8")
        if len(results) == 1:
            (folder / "bench.json").write_text(results[0].to_json() + "\n", encoding="utf-8")
            written.insert(0, "bench.json")
        try:
            draw(results, names, folder / "bench.png")
            written.append("bench.png")
        except ImportError:
            written.append("no picture, for want of matplotlib")
    except OSError as error:
        raise CommandError(f"--out: {folder} cannot be written: {error.strerror}") from None
    if not quiet:
        print(f"\n{printable(str(folder))}: {', '.join(written)}")


def _artifacts(arguments: argparse.Namespace, line: ProgressLine) -> BenchResult:
    from device_sdk.capability.rungs import RungRequest, bench_artifacts

    _refuse(arguments, _OF_ITEMS, "is of a choice of k, which goes with --items")
    given = {
        "batch": arguments.batch,
        "threads": arguments.threads,
        "most_memory_bytes": arguments.most_memory,
        **{name: getattr(arguments, name) for name in _OF_ARTIFACTS if name != "most_memory"},
    }
    request = RungRequest(
        deadline_seconds=arguments.deadline,
        headroom=arguments.headroom,
        # Half for the steps, half for the choice.
        time_box_seconds=arguments.time_box / (1 if arguments.deadline is None else 2),
        slowdown=arguments.slowdown,
        **{name: value for name, value in given.items() if value is not None},
    )
    return bench_artifacts(
        arguments.artifact,
        request,
        providers=arguments.providers or "auto",
        progress=lambda text: line.show(f"{text} ..."),
    )


# The factorisation's k.


def _items(arguments: argparse.Namespace, line: ProgressLine) -> BenchResult:
    _refuse(arguments, _OF_ARTIFACTS, "is of a round with --artifact")
    for name in ("deadline", "interactions"):
        if getattr(arguments, name) is None:
            raise CommandError(f"--items needs --{name} too")
    if arguments.loss != "bpr":
        _refuse(arguments, _OF_STEPS, "is of the train step, which only --loss bpr takes")

    def progress(seen: TimedOption) -> None:
        line.show(
            f"measuring: {seen.name}, {len(seen.seconds)} runs, p90 {seen.p90_seconds * 1e3:.3f} ms"
        )

    request = Request(
        arguments.deadline, arguments.headroom, arguments.time_box, arguments.slowdown
    )
    sizes = WorkSizes(
        arguments.items, arguments.interactions, arguments.users or 1, arguments.batch
    )
    most = arguments.max_k or 128
    none_fits: WhenNoneFits = arguments.when_none_fits or "one"
    if arguments.loss != "bpr":
        return bench_solved(request, sizes, most, when_none_fits=none_fits, progress=progress)
    return bench_stepped(
        packaged_artifact(), request, sizes, most, when_none_fits=none_fits,
        threads=arguments.threads or 1, providers=arguments.providers or "auto", progress=progress,
    )  # fmt: skip
