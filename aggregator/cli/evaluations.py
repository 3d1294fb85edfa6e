"""``tessera-aggregator evaluations``: how good each version is, as the fleet found out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tabulate import tabulate

from aggregator.cli.arguments import add_home, add_task, opened
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
from aggregator.operate.versions import FleetEvaluations
from aggregator.store.evaluations import EvaluatedVersion
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
    with opened(arguments) as fleet:
        of = fleet.evaluations(arguments.task, arguments.versions)
    found, metric, best = of.versions, of.metric, of.best
    asked = partial(what_it_brings, asked=of.control)
    brings = _told(of, what_it_brings) or _told(of, asked) or of.note
    if arguments.picture is not None and found:
        _draw(found, metric or found[0].figures[0].metric, brings, arguments.picture)
    if arguments.json:
        listed = [_as_json(each, metric, asked(each.figures, metric)) for each in found]
        by = None if of.ranking is None else of.ranking.metric
        said = {"task": of.task, "best": best, "best_by": by, "versions": listed}
        print(json.dumps(said, indent=2))
    elif found:
        lines = [
            _as_line(each, figure, best)
            for each in found
            for figure in each.figures
            if arguments.parts or figure.part == FLEET
        ]
        print(tabulate(lines, headers="keys", tablefmt="plain", disable_numparse=True))
        for sentence in filter(None, (brings, _told(of, what_serves))):
            print(f"\n{sentence}")
    else:
        print(of.note)
    return 0


def _told(of: FleetEvaluations, say: Callable[[Sequence[Figure], str], str]) -> str:
    """What the newest version says of which there is anything to say."""
    each_said = ((each.version, say(each.figures, of.metric)) for each in of.versions)
    return next((f"version {version}: {said}" for version, said in each_said if said), "")


def _draw(found: Sequence[EvaluatedVersion], metric: str, brings: str, path: Path) -> None:
    from aggregator.evaluation_picture import draw

    try:
        draw(found, metric, brings, path)
    except ImportError:
        raise AggregatorError(
            "--picture needs matplotlib: pip install 'tessera-edge[aggregator,simulate]'"
        ) from None
    except (OSError, ValueError) as error:
        raise AggregatorError(f"--picture {path}: {error}") from None


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


def _as_json(of: EvaluatedVersion, metric: str, brings: str) -> dict[str, object]:
    return {
        "version": of.version,
        "round": of.round,
        "brings": brings or None,
        "serves": serves(of.figures, metric) or None,
        "figures": [as_json(each) for each in of.figures],
    }
