"""``python -m benchmarks.recommendation``: MovieLens by who sees everybody's data."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from aggregator.intervals import interval, spread
from benchmarks.harness import add_store_options, markdown_table, suite_parser
from benchmarks.recommendation.central import Line, central_lines
from benchmarks.recommendation.split import DATA_SETS

_DESCRIPTION = """\
HR@10 and NDCG@10 of three recommenders that see everybody's data in one place: popularity, EASE
(Steck 2019, a closed form) and iALS (Hu et al. 2008, K = 64, 15 sweeps, 3 seeds), with the split,
the 99 given negatives and the metrics that benchmarks.scatter reports. Settings are those with the
best NDCG@10 among all items on validation items; the test items are looked at with these alone.
Every figure is stored under its settings; --table-only prints what is there.
"""
_MEASURES = {
    "full_hit_ratio": "HR@10 of all",
    "full_ndcg": "NDCG@10 of all",
    "hit_ratio": "HR@10 of 99",
    "ndcg": "NDCG@10 of 99",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    options = _parse(arguments)
    headers = ["", "seeds"]
    for told in _MEASURES.values():
        headers += [told, "95 % interval"]
    for data in DATA_SETS if options.data == "all" else (options.data,):
        tried, tested = central_lines(data, options)
        for items, lines in (("validation", tried), ("test", tested)):
            print(f"\n{data}, {items} items\n")
            print(markdown_table([_cells(line) for line in lines], headers))
    return 0


def _cells(line: Line) -> list[str]:
    cells = [line.name, line.seeds]
    for measure in _MEASURES:
        values = [getattr(one, measure) for one in line.outcomes]
        found = spread(values)
        more = "" if math.isnan(found.deviation) else f" ± {found.deviation:.4f}"
        cells += [f"{found.mean:.4f}{more}", _interval(values)]
    return cells


def _interval(values: Sequence[float]) -> str:
    """Of the mean over seeds; blank for one value."""
    found = interval(values)
    if math.isnan(found.half_width):
        return ""
    return f"{found.mean - found.half_width:.4f} to {found.mean + found.half_width:.4f}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = suite_parser("recommendation", _DESCRIPTION, "")
    parser.add_argument("--data", choices=(*DATA_SETS, "all"), default="all")
    add_store_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
