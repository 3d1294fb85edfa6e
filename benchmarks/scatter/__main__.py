"""``python -m benchmarks.scatter``: quality and cost of scatter aggregation on MovieLens."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.harness import (
    BySeed,
    Cell,
    Row,
    Suite,
    against,
    data_folder,
    markdown_table,
    mean_of,
    spread_of,
    spread_text,
    table_of,
)
from benchmarks.recommendation.central import Line, central_lines
from benchmarks.recommendation.split import DATA_SETS, load_split_of
from benchmarks.scatter.experiment import (
    BASELINE,
    ROWS,
    Experiment,
    Outcome,
    execute,
    open_step,
    published_bytes,
)


class ScatterSuite(Suite[Experiment, Outcome]):
    name = "scatter"
    description = """\
Trains virtual fleets on MovieLens with the real learners and method, one device a user, updates in
int8, and prints HR@10 and NDCG@10 among all items and among 99 given negatives, beside recommenders
that see everybody's data in one place; and what a device sends and computes. Least squares has
untouched defaults. Every finished run is stored under its settings, so a benchmark that was stopped
continues where it was, and --table-only prints what is there.
"""
    examples = """\
examples:
  python -m benchmarks.scatter --data ml-100k --seeds 3
  python -m benchmarks.scatter --data ml-1m --rows "least squares;unequal" --seeds 1
  python -m benchmarks.scatter --split validation --data ml-100k --seeds 2   (to choose settings)
  python -m benchmarks.scatter --data ml-100k --seeds 1 --curve    (quality on the way)
"""
    outcome = Outcome
    choice = "--data"
    tables: Mapping[str, str] = {data: f"{data}, {{split}} items" for data in DATA_SETS}
    rows = tuple(replace(row, table=data) for data in DATA_SETS for row in ROWS)
    seeds: Mapping[str, int] = {"ml-100k": 10, "ml-1m": 3}

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--split", choices=("test", "validation"), default="test")
        parser.add_argument("--curve", action="store_true", help="quality after each pass too")
        parser.add_argument(
            "--picture", type=Path, metavar="FILE", help="draw quality over bytes (of one --data)"
        )
        parser.add_argument(
            "--epochs", type=int, default=0, help="passes of every row, on validation items alone"
        )
        parser.add_argument("--artifact", type=Path, help="another factorisation artifact's folder")

    def contradiction(self, options: argparse.Namespace) -> str:
        if options.picture is not None and options.data == "all":
            return "--picture draws one data set: add --data ml-100k or --data ml-1m"
        if options.epochs and options.split != "validation":
            return "--epochs chooses passes, which test items must not: add --split validation"
        return ""

    def run_of(
        self, row: Row[Experiment], seed: int, options: argparse.Namespace
    ) -> Experiment | None:
        made = row.make(row.table, options.split, seed)
        return replace(made, epochs=options.epochs) if options.epochs else made

    def execute(
        self, run: Experiment, options: argparse.Namespace, progress: Callable[[str], None]
    ) -> Outcome:
        root = data_folder(options.root, "ml-100k/leave_one_out and ml-1m/ncf")
        held = load_split_of(root, run.data, run.split)
        return execute(run, held, open_step(options.artifact), progress)

    def shown(self, table: str, outcomes: Outcomes, options: argparse.Namespace) -> Iterator[str]:
        _, central = central_lines(table, options)
        rows = [row for row in ROWS if outcomes.get(row.name)]
        down = {row.name: published_bytes(row.make(table, "test", 0)) for row in rows}
        yield quality_table(outcomes, central if options.split == "test" else [], down)
        yield by_class_table(outcomes)
        if options.picture is not None:
            draw_bytes(options.picture, outcomes, central)
        if options.curve:
            yield curve_table(outcomes)


# The tables: a line a row.

Outcomes = Mapping[str, BySeed[Outcome]]
_MEASURES = {
    "HR@10 of all": "full_hit_ratio",
    "NDCG@10 of all": "full_ndcg",
    "HR@10 of 99": "hit_ratio",
    "NDCG@10 of 99": "ndcg",
}


def quality_table(
    outcomes: Outcomes, central: Sequence[Line], down_bytes: Mapping[str, int]
) -> str:
    """Mean and standard deviation over seeds; the paired difference of NDCG@10 among all items to
    the baseline; what a device sends, fetches and computes in a round that it is in, and on the way
    to 95 % of the quality at the end.

    Args:
        outcomes: by row's name, by seed.
        central: recommenders that see everybody's data.
        down_bytes: what a device fetches a round, by row's name.
    """

    def last(measure: str) -> Callable[[Outcome], float]:
        return lambda one: float(getattr(one.last, measure))

    def took_part(found: BySeed[Outcome]) -> float:
        return fmean(one.enough.rounds * one.share for one in found.values())

    def up(found: BySeed[Outcome]) -> float:
        return fmean(one.update_bytes for one in found.values())

    def milliseconds(found: BySeed[Outcome]) -> float:
        return 1000 * fmean(one.device_seconds for one in found.values())

    quality: dict[str, Cell[Outcome]] = {
        heading: spread_of(last(measure)) for heading, measure in _MEASURES.items()
    }
    difference = against(outcomes.get(BASELINE, {}), last("full_ndcg"), relative=True)
    headings = list(quality)
    columns: dict[str, Cell[Outcome]] = {
        **{heading: quality[heading] for heading in headings[:2]},
        f"against {BASELINE!r}": difference,
        **{heading: quality[heading] for heading in headings[2:]},
        "bytes up": lambda name, found: f"{up(found):,.0f}",
        "bytes down": lambda name, found: f"{down_bytes[name]:,}",
        "ms": lambda name, found: f"{milliseconds(found):.2f}",
        "rounds to 95 %": mean_of(lambda one: one.enough.rounds, ".0f"),
        "KB up to 95 %": lambda name, found: f"{took_part(found) * up(found) / 1000:.0f}",
        "ms to 95 %": lambda name, found: f"{took_part(found) * milliseconds(found):.1f}",
    }
    more = []
    for line in central:
        found = [spread_text([getattr(o, m) for o in line.outcomes]) for m in _MEASURES.values()]
        more.append([line.name, line.seeds, *found[:2], "", *found[2:], *[""] * 6])
    return table_of(outcomes, columns, more=more)


def by_class_table(outcomes: Outcomes) -> str:
    """NDCG@10 among all items of the users on devices of each k_i, mean over seeds."""
    classes = sorted({int(k) for by in outcomes.values() for o in by.values() for k in o.by_class})
    lines = []
    for name, by_seed in outcomes.items():
        found = [outcome.by_class for outcome in by_seed.values()]
        if not found or len(found[0]) < 2:
            continue
        means = [[one[str(k)] for one in found if str(k) in one] for k in classes]
        lines.append([name, *(f"{fmean(each):.4f}" if each else "" for each in means)])
    return markdown_table(lines, ("NDCG@10 of all, of users by k_i", *map(str, classes)))


def curve_table(outcomes: Outcomes) -> str:
    """NDCG@10 among all items on the way, mean over seeds; rows apart, as their rounds are."""
    lines = []
    for name, by_seed in outcomes.items():
        for points in zip(*(outcome.curve for outcome in by_seed.values()), strict=True):
            mean = fmean(point.full_ndcg for point in points)
            lines.append([name, points[0].rounds, f"{mean:.4f}"])
    return markdown_table(lines, ("", "rounds", "NDCG@10 of all"))


def draw_bytes(file: Path, outcomes: Outcomes, central: Sequence[Line]) -> None:
    """NDCG@10 among all items over a device's kilobytes up, means over seeds, into ``file``.

    ``central``: recommenders that see everybody's data, as levels.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for name, by_seed in outcomes.items():
        curves = [one for one in by_seed.values() if one.update_bytes]
        if curves:
            points = list(zip(*(one.curve for one in curves), strict=True))
            sent = fmean(one.share * one.update_bytes for one in curves) / 1000
            kilobytes = [sent * at[0].rounds for at in points]
            quality = [fmean(each.full_ndcg for each in at) for at in points]
            axes.plot(kilobytes, quality, label=name, marker="o", markersize=2.5, linewidth=1.2)
    for place, line in enumerate(central):
        level = line.mean("full_ndcg")
        axes.axhline(level, color="0.6", linestyle="--", linewidth=0.8)
        axes.annotate(
            line.name,
            (1 - 0.3 * place, level),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=7,
        )
    axes.set(
        xscale="log", xlabel="kilobytes that a device has sent", ylabel="NDCG@10 among all items"
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


main = ScatterSuite().main

if __name__ == "__main__":
    raise SystemExit(main())
