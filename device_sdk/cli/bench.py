"""`tessera-device bench`: the largest latent dimension that this device trains in time."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from device_sdk.capability import (
    Choice,
    Machine,
    Measurement,
    Request,
    WorkSizes,
    choose_latent_dimension,
    choose_solved_dimension,
)
from device_sdk.cli.arguments import CommandError, ProgressLine, add_providers
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.scatter.contract import LossName
from device_sdk.system.command_line import fraction, positive_float, positive_int, slowdown
from device_sdk.system.printable import text_table

DESCRIPTION = """\
Times the work that a device would really do in a round, at several latent dimensions k, and picks
the largest k whose 90th percentile fits the deadline with some headroom. Of least squares that is
solving for every user's vector; of BPR, an epoch of the exported train step. Cold starts are
reported apart. The whole measurement stays within its time box."""

EXAMPLES = """\
examples:
  tessera-device bench --deadline 0.5 --items 3706 --interactions 2000
  tessera-device bench --deadline 0.5 --items 3706 --interactions 8000 --users 48
                          a gateway's users
  tessera-device bench --deadline 0.5 --items 3706 --interactions 2000 --loss bpr
  tessera-device bench --deadline 0.5 --items 3706 --interactions 2000 --slowdown 8
                          as if this machine were eight times slower
  tessera-device bench --deadline 0.5 --items 3706 --interactions 2000 --json
                          for programs; the answer is the top-level key "k"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    task = parser.add_argument_group("the task")
    task.add_argument(
        "--deadline",
        type=positive_float,
        required=True,
        metavar="SECONDS",
        help="a round's work (every interaction once) has to end within this",
    )
    task.add_argument(
        "--items", type=positive_int, required=True, metavar="M", help="items in the catalogue"
    )
    task.add_argument(
        "--interactions",
        type=positive_int,
        required=True,
        metavar="N",
        help="interactions on this device, of all its users together",
    )
    task.add_argument(
        "--users", type=positive_int, default=1, help="users of this device (default: 1)"
    )
    task.add_argument(
        "--loss",
        choices=get_args(LossName),
        default="least-squares",
        help="what the task minimises (default: least-squares)",
    )
    step = parser.add_argument_group("the train step of --loss bpr")
    step.add_argument(
        "--batch",
        type=positive_int,
        metavar="TRIPLES",
        help="triples in a step (default: the whole epoch in one step)",
    )
    step.add_argument(
        "--artifact",
        type=Path,
        metavar="DIR",
        help="factorisation artifact (default: built in)",
    )
    step.add_argument("--threads", type=positive_int, help="threads in an operator (default: 1)")
    add_providers(step)
    step.set_defaults(providers=None)  # so that what was not asked for is not refused
    add_search_arguments(parser.add_argument_group("the search"))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_search_arguments(search: argparse._ArgumentGroup) -> None:
    """Options of the measurement itself."""
    search.add_argument(
        "--max-k", type=positive_int, default=128, metavar="K", help="largest k (default: 128)"
    )
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
        help="the measurement's own limit (default: 10)",
    )
    search.add_argument(
        "--slowdown",
        type=slowdown,
        default=1.0,
        metavar="X",
        help="emulate a device X times slower by sleeping (default: 1)",
    )
    search.add_argument(
        "--when-none-fits",
        choices=("one", "decline"),
        default="one",
        help="where even k = 1 misses: take 1, or decline (k is null) (default: one)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Raises CommandError for options of a train step without one."""
    of_step = ("batch", "artifact", "threads", "providers")
    given = [name for name in of_step if getattr(arguments, name) is not None]
    if given and arguments.loss != "bpr":
        raise CommandError(f"--{given[0]} is of the train step, which only --loss bpr takes")
    line = ProgressLine(sys.stderr)
    line.show("loading ...")

    def progress(seen: Measurement) -> None:
        took = "" if seen.p90_seconds is None else f", p90 {seen.p90_seconds * 1e3:.3f} ms"
        line.show(f"measuring: k = {seen.k}, {seen.runs} runs{took}")

    try:
        request = Request(
            arguments.deadline,
            arguments.max_k,
            arguments.headroom,
            arguments.time_box,
            arguments.slowdown,
            arguments.when_none_fits,
        )
        sizes = WorkSizes(arguments.items, arguments.interactions, arguments.users, arguments.batch)
        if arguments.loss == "bpr":
            choice = choose_latent_dimension(
                packaged_artifact() if arguments.artifact is None else arguments.artifact,
                request,
                sizes,
                threads=arguments.threads or 1,
                providers=arguments.providers or "auto",
                progress=progress,
            )
        else:
            choice = choose_solved_dimension(request, sizes, progress=progress)
    except ValueError as error:
        raise CommandError(str(error)) from None
    finally:
        line.clear()
    if arguments.json:
        print(json.dumps(choice_to_json(choice), indent=2))
    else:
        print(choice_to_text(choice))
    return 0


# A choice as JSON and as text for people.


def choice_to_json(choice: Choice) -> dict[str, object]:
    """Plain objects; the choice is the top-level key `k` (null where the device declines)."""
    request = choice.request
    return {
        "k": choice.k,
        "reason": choice.reason,
        "fits": choice.fits,
        "confirmed": choice.confirmed,
        "deadline_seconds": request.deadline_seconds,
        "headroom": request.headroom,
        "limit_seconds": request.limit_seconds,
        "max_k": request.max_k,
        "time_box_seconds": request.time_box_seconds,
        "elapsed_seconds": choice.elapsed_seconds,
        "load_seconds": choice.load_seconds,
        "slowdown": request.slowdown,
        "emulated": request.slowdown > 1.0,
        "measurements": [asdict(entry) for entry in choice.measurements],
        "machine": None if choice.machine is None else asdict(choice.machine),
    }


def choice_to_text(choice: Choice) -> str:
    """The machine, one row per measured k, and the choice with its reason."""
    rows = [
        [
            f"{entry.k} *" if entry.k == choice.k else str(entry.k),
            _milliseconds(entry.cold_start_seconds),
            _milliseconds(entry.median_seconds),
            _milliseconds(entry.p90_seconds),
            str(entry.runs),
            _verdict(entry.p90_seconds, choice.request.limit_seconds),
        ]
        for entry in choice.measurements
    ]
    headers = ["k", "cold start ms", "median ms", "p90 ms", "runs", "within limit"]
    parts = [] if choice.machine is None else [_machine_lines(choice.machine)]
    if choice.request.slowdown > 1.0:
        parts.append(
            f"EMULATED: sleeps make every run {choice.request.slowdown:g} times as long, "
            "as on a device that much slower than this one."
        )
    if rows:
        parts.append(text_table(rows, headers, "rrrrr"))
    chosen = "The device declines." if choice.k is None else f"Chosen: k = {choice.k}."
    parts.append(f"{chosen} {choice.reason}")
    parts.append(
        f"Measured for {choice.elapsed_seconds:.1f} s of {choice.request.time_box_seconds:g} s, "
        f"loading ({choice.load_seconds * 1e3:.0f} ms) included."
    )
    return "\n\n".join(parts)


def _machine_lines(machine: Machine) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    memory = (
        f"{_gibibytes(machine.memory_total_bytes)} total, "
        f"{_gibibytes(machine.memory_available_bytes)} available"
    )
    rows = [
        ("processor", f"{machine.cpu_model} ({machine.architecture})"),
        ("cores used", f"{machine.cores:g} usable, {machine.threads} thread(s)"),
        ("provider", machine.provider),
        ("memory", memory),
        ("versions", versions),
    ]
    return text_table(rows)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def _gibibytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


def _verdict(p90_seconds: float | None, limit_seconds: float) -> str:
    if p90_seconds is None:
        return "not measured"
    return f"{'yes' if p90_seconds <= limit_seconds else 'no'} ({p90_seconds / limit_seconds:.0%})"
