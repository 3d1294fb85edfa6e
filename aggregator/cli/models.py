"""``tessera-aggregator models``: the versions of a task's model."""

from __future__ import annotations

import argparse
import json
import time

from tabulate import tabulate

from aggregator.cli.arguments import add_home, add_task, opened
from aggregator.operate.health import Rollback
from aggregator.store.rows import VersionRow
from device_sdk.system.command_line import natural
from device_sdk.system.printable import ago, printable

DESCRIPTION = """\
Lists the versions whose models are kept: the newest, the best by evaluation.best_by, and those that
are pinned (models.keep_last and models.keep_best of the task file say how many). model takes one
out as a file, rollback makes one the next version. evaluations shows the figures in full."""
EXAMPLES = """\
examples:
  tessera-aggregator models --home fleet               what there is
  tessera-aggregator models --home fleet --pin 12      keep version 12 for good; --unpin 12
  tessera-aggregator models --home fleet --all --json  what is known of all, with every figure"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_home(parser)
    add_task(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pin", type=natural, metavar="N", help="keep version N's model for good")
    which.add_argument("--unpin", type=natural, metavar="N", help="no longer")
    parser.add_argument(
        "--all", action="store_true", help="also versions whose models were dropped"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    with opened(arguments) as fleet:
        if arguments.pin is not None:
            fleet.pin(arguments.pin, arguments.task)
            print(f"version {arguments.pin} is kept for good")
            return 0
        if arguments.unpin is not None:
            fleet.unpin(arguments.unpin, arguments.task)
            print(f"version {arguments.unpin} goes with the others, when the next one is made")
            return 0
        found = fleet.versions(arguments.task, dropped=arguments.all)
    best, ranking, rollback = found.best, found.ranking, found.rollback
    if arguments.json:
        print(json.dumps([_as_json(row, best, rollback) for row in found.versions], indent=2))
        return 0
    if found.versions:
        now, by = time.time(), {} if ranking is None else {best: f"best by {ranking.metric}"}
        lines = [_as_line(row, now, by.get(row.version)) for row in found.versions]
        print(tabulate(lines, headers="keys", tablefmt="plain"))
    else:
        print(f"task {found.task} has no version whose model is kept")
    if rollback.said:
        print(rollback.said)
    return 0


def _as_line(row: VersionRow, now: float, best: str | None) -> dict[str, str]:
    figures = ", ".join(
        f"{printable(name)} {value:.4g}" for name, value in sorted(row.metrics.items())
    )
    notes = [printable(row.origin)] if row.origin else []
    notes += [best] if best is not None else []
    notes += ["pinned"] if row.pinned else []
    notes += [] if row.kept else ["no model kept"]
    return {
        "version": str(row.version),
        "round": str(row.round) if row.round else "-",
        "made": ago(row.closed_unix_seconds, now),
        "devices": str(row.devices),
        "metrics": figures or "-",
        "notes": ", ".join(notes) or "-",
    }


def _as_json(row: VersionRow, best: int | None, rollback: Rollback) -> dict[str, object]:
    return {
        "version": row.version,
        "round": row.round,
        "closed_unix_seconds": row.closed_unix_seconds,
        "devices": row.devices,
        "artifact": row.artifact or None,
        "origin": row.origin or None,
        "bytes": row.bytes,
        "metrics": dict(row.metrics),
        "best": row.version == best,
        "pinned": row.pinned,
        "awaited": row.version == rollback.version,
        "kept": row.kept,
    }
