"""``tessera-aggregator evaluations``: how good each version is, as the fleet found out."""

from __future__ import annotations

import argparse
import json

from tabulate import tabulate

from aggregator.cli.arguments import add_home, add_task, home_of, task_file_of, task_of
from aggregator.errors import TaskError
from aggregator.evaluation.figures import FLEET, Figure
from aggregator.evaluation.words import as_json, figure_name, shown
from aggregator.store.evaluations import EvaluatedVersion
from device_sdk.system.command_line import positive_int
from device_sdk.system.printable import printable

DESCRIPTION = """\
Shows what devices found out about the model on data that they hold back, version by version: of the
model as it was sent to them and, with personal., of their own after they trained. A figure is of
all their data together. Beside it: the median device's own, and the worst tenth, which nine devices
in ten do better than, or as well as. [evaluation] in the task file asks for it."""
EXAMPLES = """\
examples:
  tessera-aggregator evaluations --home fleet                the last versions
  tessera-aggregator evaluations --home fleet --parts        by capacity class, too
  tessera-aggregator evaluations --home fleet --json         with deciles and error bounds"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_home(parser)
    add_task(parser)
    parser.add_argument(
        "--versions", type=positive_int, default=10, metavar="N", help="how many (default: 10)"
    )
    parser.add_argument("--parts", action="store_true", help="also by what devices trained")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    home = home_of(arguments)
    store = home.open_store()
    try:
        row = task_of(store, arguments)
        name, own = row.name or "", store.task(row.number)
        found, kept = own.evaluations.latest(arguments.versions), own.versions.kept()
        task = task_file_of(home, store, row)
        ranking, asked = task.ranking, task.evaluation is not None
    except TaskError:
        ranking, asked = None, True  # what was found out is shown whatever the file says now
    finally:
        store.database.close()
    best = ranking.best(kept)[0].version if ranking is not None and ranking.best(kept) else None
    if arguments.json:
        listed = [_as_json(each) for each in found]
        by = None if ranking is None else ranking.metric
        print(json.dumps({"task": name, "best": best, "best_by": by, "versions": listed}, indent=2))
    elif found:
        lines = [
            _as_line(each, figure, best)
            for each in found
            for figure in each.figures
            if arguments.parts or figure.part == FLEET
        ]
        print(tabulate(lines, headers="keys", tablefmt="plain", disable_numparse=True))
    elif asked:
        print(
            f"task {name}: no version has a figure yet. A round that makes the next version makes "
            "those of the one that it began with, where evaluation.least_devices devices have "
            "evaluated it"
        )
    else:
        print(f"task {name} asks its devices for no evaluation: see [evaluation] in its file")
    return 0


def _as_line(of: EvaluatedVersion, figure: Figure, best: int | None) -> dict[str, str]:
    return {
        "version": f"{of.version}{' (best)' if of.version == best else ''}",
        "round": str(of.round),
        "figure": figure_name(figure.stage, figure.metric),
        "of": printable(figure.part) or "fleet",
        "value": shown(figure.value),
        "median": shown(figure.median),
        "worst tenth": shown(figure.worst_tenth),
        "devices": str(figure.devices),
        "samples": f"{figure.samples:.0f}",
        "": f"{figure.capped} capped" if figure.capped else "",
    }


def _as_json(of: EvaluatedVersion) -> dict[str, object]:
    return {
        "version": of.version,
        "round": of.round,
        "figures": [as_json(each) for each in of.figures],
    }
