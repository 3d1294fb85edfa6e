"""`tessera-device bench`: the largest latent dimension that this device trains in time."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from device_sdk.capability.choice import choose_latent_dimension
from device_sdk.capability.report import choice_to_json, choice_to_text
from device_sdk.capability.stopwatch import Measurement
from device_sdk.cli.arguments import ProgressLine
from device_sdk.factorisation import packaged_artifact
from device_sdk.system.command_line import fraction, positive_float, positive_int, slowdown

DESCRIPTION = """\
Times the train step that would really run, at several latent dimensions k, and picks the largest k
whose 90th percentile fits the deadline with some headroom. Cold starts are reported apart. The
whole measurement stays within its time box."""

EXAMPLES = """\
examples:
  tessera-device bench --deadline 0.5 --items 3706 --interactions 2000
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
        help="one epoch (every interaction once) has to end within this",
    )
    task.add_argument(
        "--items", type=positive_int, required=True, metavar="M", help="items in the catalogue"
    )
    task.add_argument(
        "--interactions",
        type=positive_int,
        required=True,
        metavar="N",
        help="interactions on this device; each gives one triple an epoch",
    )
    task.add_argument(
        "--users", type=positive_int, default=1, help="users of this device (default: 1)"
    )
    task.add_argument(
        "--batch",
        type=positive_int,
        metavar="TRIPLES",
        help="triples in a step (default: the whole epoch in one step)",
    )
    task.add_argument(
        "--artifact",
        type=Path,
        metavar="DIR",
        help="factorisation artifact (default: built in)",
    )
    add_search_arguments(parser.add_argument_group("the search"))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_search_arguments(search: argparse._ArgumentGroup) -> None:
    """Options of the measurement itself."""
    search.add_argument(
        "--max-k", type=positive_int, default=64, metavar="K", help="largest k (default: 64)"
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
    search.add_argument(
        "--method",
        choices=("train_step", "matmul"),
        default="train_step",
        help="what to time: the artifact's train step, or a quick matrix product that says less",
    )
    search.add_argument(
        "--threads", type=positive_int, default=1, help="threads in an operator (default: 1)"
    )
    search.add_argument(
        "--providers",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to run: CUDA if it is there, else the CPU (default: auto)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    line = ProgressLine(sys.stderr)
    line.show("loading ...")

    def progress(seen: Measurement) -> None:
        took = "" if seen.p90_seconds is None else f", p90 {seen.p90_seconds * 1e3:.3f} ms"
        line.show(f"measuring: k = {seen.k}, {seen.runs} runs{took}")

    artifact = arguments.artifact
    if artifact is None and arguments.method == "train_step":
        artifact = packaged_artifact()
    try:
        choice = choose_latent_dimension(
            artifact or Path(),
            deadline_seconds=arguments.deadline,
            items=arguments.items,
            interactions=arguments.interactions,
            users=arguments.users,
            batch=arguments.batch,
            max_k=arguments.max_k,
            headroom=arguments.headroom,
            time_box_seconds=arguments.time_box,
            method=arguments.method,
            slowdown=arguments.slowdown,
            when_none_fits=arguments.when_none_fits,
            threads=arguments.threads,
            providers=arguments.providers,
            progress=progress,
        )
    finally:
        line.clear()
    if arguments.json:
        print(json.dumps(choice_to_json(choice), indent=2))
    else:
        print(choice_to_text(choice))
    return 0
