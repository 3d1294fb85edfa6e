"""``tessera-aggregator runs``: what ``simulate`` has left, listed, shown and compared."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aggregator.errors import AggregatorError
from aggregator.operate.runs import (
    DAMAGED,
    USUAL_FOLDER,
    RunSummary,
    SimulationRecord,
    differing,
    finite,
    run_path,
    runs_in,
)
from device_sdk.system.printable import printable

DESCRIPTION = """\
What tessera-aggregator simulate recorded, each run a file DIR/NAME.json.

runs, runs list       a line a run, the latest first: last is the newest version's figure, best the
                      best one's, by what the task compares versions by (evaluation.best_by), and
                      which version that was, by seed. A file that is damaged, or none of
                      simulate's, is listed with the reason
runs show RUN         its rounds, as simulate showed them at its end, and all settings in force
runs compare RUN...   figures side by side, and below them every setting, option and version in
                      which the runs differ, with the defaults of what a task file leaves out

RUN is a name as runs lists it, or a file. With several seeds figures are means, and half the width
of their 95 % interval; popular is what the most popular items alone reach. Figures are of what
devices hold back from training; the best of many flatters."""
EXAMPLES = """\
examples:
  tessera-aggregator runs
  tessera-aggregator runs show films
  tessera-aggregator runs compare films weak --picture both.png
  tessera-aggregator runs compare runs/*.json --csv rounds.csv
  tessera-aggregator runs list --folder elsewhere --json"""

_ACTIONS = ("list", "show", "compare")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "action", nargs="?", choices=_ACTIONS, default="list", metavar="ACTION",
        help="list, show or compare (default: list)",
    )  # fmt: skip
    parser.add_argument("runs", nargs="*", metavar="RUN", help="of show and compare")
    parser.add_argument(
        "--folder",
        type=Path,
        default=USUAL_FOLDER,
        metavar="DIR",
        help=f"where they are: --out of simulate (default: {USUAL_FOLDER})",
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE",
        help="also a line a run; of show and compare, for each round of each run and seed",
    )  # fmt: skip
    parser.add_argument(
        "--picture", type=Path, metavar="FILE",
        help="of show and compare: draw figures and costs by round, such as both.png or .svg",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="for programs, in place of tables")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    action: str = arguments.action
    named: Sequence[str] = arguments.runs
    if action == "list" and (named or arguments.picture is not None):
        raise AggregatorError("runs list takes no RUN and draws none; see runs show and compare")
    if action == "show" and len(named) != 1:
        raise AggregatorError("runs show needs one RUN; runs lists them")
    if action == "compare" and not named:
        raise AggregatorError("runs compare needs RUNs, two or more; runs lists them")
    if action == "list":
        _list(arguments)
        return 0
    paths = [run_path(each, arguments.folder) for each in named]
    records = [SimulationRecord.read(path) for path in paths]
    if arguments.csv is not None:
        from aggregator.simulate.shown import write_csv

        write_csv(arguments.csv, records)
    if arguments.picture is not None:
        _draw(records, arguments.picture)
    summaries = [
        record.summary(path, path.stat().st_mtime)
        for record, path in zip(records, paths, strict=True)
    ]
    tell = _show if action == "show" else _compare
    tell(summaries, records, as_json=arguments.json)
    return 0


def _list(arguments: argparse.Namespace) -> None:
    from aggregator.simulate.shown import summaries_table

    found = runs_in(arguments.folder)
    listed = [_plain(each) for each in found]
    if arguments.csv is not None and listed:
        with arguments.csv.open("w", newline="", encoding="utf-8") as file:
            lines = csv.DictWriter(file, listed[0])
            lines.writeheader()
            lines.writerows({key: _cell(value) for key, value in each.items()} for each in listed)
    if arguments.json:
        print(json.dumps(listed, indent=2))
    elif found:
        print(summaries_table(found))
        if any(each.state == DAMAGED for each in found):
            print("\nA damaged file is no run any more: remove it, or write it again by simulate")
    else:
        print(f"no runs in {printable(str(arguments.folder))}; see tessera-aggregator simulate")


def _show(
    summaries: Sequence[RunSummary], records: Sequence[SimulationRecord], *, as_json: bool
) -> None:
    from aggregator.simulate.shown import parts_table, rounds_table, runs_table, settings_table

    (record,), (summary,) = records, summaries
    if as_json:
        print(json.dumps(finite({**_plain(summary), **_whole(record)}), indent=2))
        return
    tables = (rounds_table(record), parts_table(record), runs_table(records))
    print("\n\n".join(filter(None, (*tables, settings_table(record)))))


def _compare(
    summaries: Sequence[RunSummary], records: Sequence[SimulationRecord], *, as_json: bool
) -> None:
    from aggregator.simulate.shown import differences, runs_table

    if as_json:
        runs = [{**_plain(s), **_whole(r)} for s, r in zip(summaries, records, strict=True)]
        print(json.dumps(finite({"runs": runs, "differ": differing(records)}), indent=2))
        return
    print(runs_table(records))
    if len(records) > 1:
        print(f"\n{differences(records)}")
    if len({each.metric for each in summaries if each.metric}) > 1:
        print("\nThese runs are compared by different figures, each by its own.")


def _plain(summary: RunSummary) -> dict[str, Any]:
    """As JSON has it."""
    found: dict[str, Any] = finite({**asdict(summary), "path": str(summary.path)})
    return found


def _whole(record: SimulationRecord) -> dict[str, Any]:
    """Settings in force, and by figure and seed each version's."""
    figures = {
        metric: {
            str(run["seed"]): [each._asdict() for each in record.points(place, metric)]
            for place, run in enumerate(record.runs)
        }
        for metric in record.metrics
    }
    return {"settings": record.settings, "figures": figures}


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list, tuple)) else value


def _draw(records: Sequence[SimulationRecord], path: Path) -> None:
    from aggregator.simulate.shown import draw

    try:
        draw(records, path)
    except ImportError:
        raise AggregatorError(
            "--picture needs matplotlib: pip install 'tessera-edge[aggregator,simulate]'"
        ) from None
    except (OSError, ValueError) as error:
        raise AggregatorError(f"--picture {path}: {error}") from None
