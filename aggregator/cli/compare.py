"""``tessera-aggregator compare``: simulated runs beside each other."""

from __future__ import annotations

import argparse
from pathlib import Path

from device_sdk.system.command_line import add_out
from device_sdk.system.printable import printable

DESCRIPTION = """\
Shows what tessera-aggregator simulate recorded of several runs, a line each, and draws their
figures over each other. last is the newest version's figure, best the best one's, by what the task
compares versions by (evaluation.best_by): figures of what devices hold back from training. With
several seeds: their mean, and half the width of its 95 % interval; popular is what the most popular
items alone reach. Below: every setting, option and version in which the runs differ, with the
defaults of what a task file leaves out."""
EXAMPLES = """\
examples:
  tessera-aggregator compare runs/films.json runs/weak.json
  tessera-aggregator compare runs/*.json --out runs/all.png"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="files of simulate")
    add_out(parser, metavar="FILE.png", help="the picture (default: compared.png beside the first)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from aggregator.simulate.record import SimulationRecord
    from aggregator.simulate.shown import differences, draw, runs_table

    records = [SimulationRecord.read(path) for path in arguments.runs]
    print(runs_table(records))
    if len(records) > 1:
        print(f"\n{differences(records)}")
    metrics = {each.ranking.metric for each in records if each.ranking is not None}
    if len(metrics) > 1:
        print("\nThese runs are compared by different figures, each by its own.")
    picture: Path = arguments.out or arguments.runs[0].parent / "compared.png"
    try:
        draw(records, picture)
    except ImportError:
        print("\nFor a picture install matplotlib: pip install 'tessera-edge[aggregator,simulate]'")
    else:
        print(f"\n{printable(str(picture))} shows them")
    return 0
