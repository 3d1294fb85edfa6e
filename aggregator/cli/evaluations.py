"""``tessera-aggregator evaluations``: how good each version is, as the fleet found out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from aggregator.cli.arguments import add_home, add_task, opened, task_of
from aggregator.errors import AggregatorError
from aggregator.evaluation import (
    FLEET,
    Figure,
    as_json,
    figure_name,
    part_name,
    serves,
    shown,
    what_it_brings,
    what_serves,
)
from aggregator.operate.names import readable_task_of
from aggregator.store.evaluations import EvaluatedVersion
from aggregator.task.evaluation import metric_of
from device_sdk.system.command_line import positive_int
from device_sdk.system.printable import printable

DESCRIPTION = """\
Shows what devices found out about the model on data that they hold back, version by version: of the
model as it was sent to them and, with personal., of their own after they trained. A figure is of
all their data together. Beside it: the median device's own, and the worst tenth, which nine devices
in ten do better than, or as well as. Where some devices also train a model alone (control), a
sentence says what federation brings. [evaluation] in the task file asks for all of it."""
EXAMPLES = """\
examples:
  tessera-aggregator evaluations --home fleet                the last versions
  tessera-aggregator evaluations --home fleet --parts        by capacity class, too
  tessera-aggregator evaluations --home fleet --json         with deciles and error bounds
  tessera-aggregator evaluations --home fleet --versions 100 --picture figures.png"""


_NO_CONTROL = (
    "whether federation brings anything is not known: with control = 0.2 under [evaluation], say, "
    "a fifth of the devices trains a second model alone, to compare with"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_home(parser)
    add_task(parser)
    parser.add_argument(
        "--versions", type=positive_int, default=10, metavar="N", help="how many (default: 10)"
    )
    parser.add_argument("--parts", action="store_true", help="also by what devices trained")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw them, such as figures.png or .svg"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    with opened(arguments) as (home, store):
        row = task_of(store, arguments)
        name, own = row.name or "", store.task(row.number)
        found, task = own.evaluations.latest(arguments.versions), readable_task_of(home, store, row)
        ranking = None if task is None else task.ranking
        best = own.versions.best(ranking)
        joined = sum(each.revoked_unix_seconds is None for each in store.devices.all())
    metric = metric_of(ranking)
    if arguments.picture is not None and found:
        _draw(found, metric or found[0].figures[0].metric, arguments.picture)
    if arguments.json:
        listed = [_as_json(each, metric) for each in found]
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
        no_control = _NO_CONTROL if task is not None and task.may_have_control else ""
        for say, otherwise in ((what_it_brings, no_control), (what_serves, "")):
            said = ((each.version, say(each.figures, metric)) for each in found)
            told = (f"version {version}: {sentence}" for version, sentence in said if sentence)
            if sentence := next(told, otherwise):
                print(f"\n{sentence}")
    elif task is not None and task.evaluation is not None:
        print(_none_yet(name, task.evaluation.least_devices, joined))
    else:
        print(f"task {name} has no figures: its file has no table [evaluation] that can be read")
    return 0


def _draw(found: Sequence[EvaluatedVersion], metric: str, path: Path) -> None:
    from aggregator.evaluation_picture import draw

    try:
        draw(found, metric, path)
    except ImportError:
        raise AggregatorError(
            "--picture needs matplotlib: pip install 'tessera-edge[aggregator,simulate]'"
        ) from None
    except (OSError, ValueError) as error:
        raise AggregatorError(f"--picture {path}: {error}") from None


def _none_yet(name: str, least: int, joined: int) -> str:
    fewer = (
        f"; only {joined} have joined: least_devices = {joined} under [evaluation] shows figures "
        "of as few, which say what single devices found"
    )
    return (
        f"task {name}: no version has a figure yet. A round that makes the next version makes "
        f"those of the one that it began with, where {least} devices (evaluation.least_devices) "
        f"have evaluated it{fewer if 0 < joined < least else ''}"
    )


def _as_line(of: EvaluatedVersion, figure: Figure, best: int | None) -> dict[str, str]:
    return {
        "version": f"{of.version}{' (best)' if of.version == best else ''}",
        "round": str(of.round),
        "figure": figure_name(figure.stage, figure.metric),
        "of": printable(part_name(figure.part)),
        "value": shown(figure.value),
        "median": shown(figure.median),
        "worst tenth": shown(figure.worst_tenth),
        "devices": str(figure.devices),
        "samples": f"{figure.samples:.0f}",
        "capped": str(figure.capped or "-"),
    }


def _as_json(of: EvaluatedVersion, metric: str) -> dict[str, object]:
    return {
        "version": of.version,
        "round": of.round,
        "brings": what_it_brings(of.figures, metric) or None,
        "serves": serves(of.figures, metric) or None,
        "figures": [as_json(each) for each in of.figures],
    }
