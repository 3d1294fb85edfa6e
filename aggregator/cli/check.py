"""``tessera-aggregator check``: what would keep ``serve`` from working, before it starts."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from aggregator.cli.arguments import add_home, home_of
from aggregator.operate.checking import Looking
from aggregator.operate.preflight import Preflight
from aggregator.operate.soundness import Soundness
from aggregator.operate.tasks import STEP_SECONDS

DESCRIPTION = """\
Says what would keep serve from working, without starting it and without changing anything: whether
the task file can be read, the store used, the keys trusted, the metrics' port had; how much room is
on the disk; whether the clock lies before what the store has seen; TLS, and how long certificates
hold; whether the broker lets serve in, and lets it subscribe and publish; and what task check says
of each task: a rehearsal, and its messages' sizes against the broker's largest packet.

It needs no home, takes the place of nobody at the broker and leaves nothing there: serve may run.
A line a finding: ok, warning or wrong; what was found; what to do. The exit status is 1 where
something is wrong."""

EXAMPLES = """\
examples:
  tessera-aggregator check --home fleet       the home, with its own task files
  tessera-aggregator check task.toml          a file, before there is a home
  tessera-aggregator check new.toml --home fleet --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_home(parser)
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="a task file (default: the home's)"
    )
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=STEP_SECONDS,
        metavar="SECONDS",
        help=f"how long one step of an artifact may take (default: {STEP_SECONDS:g})",
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    preflight = Preflight(
        home_of(arguments),
        arguments.file,
        Looking(arguments.step_seconds),
        time.monotonic,
        time.time,
        np.random.default_rng(),
        os.urandom,
    )
    found = []
    for each in preflight.look():
        found.append(each)
        if not arguments.json:
            print(each.line, flush=True)
    if arguments.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    return 1 if any(each.soundness is Soundness.WRONG for each in found) else 0
