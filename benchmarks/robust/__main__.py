"""``python -m benchmarks.robust``: what hostile devices do to a model, and what helps."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import add_run_options, named, seeds_of, suite_parser
from benchmarks.robust import clicks, scatter
from benchmarks.robust.attacks import ATTACKS, SHARES, SINGLE
from benchmarks.robust.suite import Option, Selection, Suite

_METHODS: Mapping[str, tuple[str, Sequence[Option]]] = {
    "scatter": ("scatter aggregation: 943 devices of unequal size", scatter.OPTIONS),
    "fedavg": (
        "federated averaging: 40 devices, Wide & Deep predicts clicks",
        clicks.OPTIONS["fedavg"],
    ),
    "logits": ("teacher logits: 40 devices, three networks", clicks.OPTIONS["logits"]),
}

_DESCRIPTION = """\
Trains on ML-100K with the real learners, methods and train graphs, with 0, 5 and 20 % of the
devices hostile: they send ten times the opposite of what they found (flip), noise of ten times its
norm (noise), or push one unpopular item into everybody's recommendations, ten times as hard as an
honest device could (promotion) or just as hard (patient). Teachers, who send mean outputs by label,
send the opposite, random outputs, and that everything is clicked. Prints the accuracy of the honest
devices for each defence, and how many of their users are recommended the promoted item.

A run takes about 100 s of a free core with scatter, 7 s with fedavg and 4 s with logits; a defence
has a clean run and eight (logits: six) attacked ones a seed. Every finished run is stored under its
settings, so a benchmark that was stopped continues where it was, and --table-only only prints what
is there.
"""
_EXAMPLES = """\
examples:
  python -m benchmarks.robust --seeds 3
  python -m benchmarks.robust --method fedavg --method logits
  python -m benchmarks.robust --options "none;guarded" --attacks promotion --shares 0.05
  python -m benchmarks.robust --one-device --split validation --epochs 10
  python -m benchmarks.robust --split validation --epochs 20   (a quick look, to choose settings)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    options = _parse(arguments)
    methods = options.method or list(_METHODS)
    if options.one_device:
        methods = [one for one in methods if one != "logits"]
    known = [one.name for method in methods for one in _METHODS[method][1]]
    selection = Selection(
        split=options.split,
        seeds=seeds_of(options),
        options=list(dict.fromkeys(named(options.options, known, "--options"))),
        attacks=ATTACKS
        if options.one_device
        else [one for one in ATTACKS if one in named(options.attacks, ATTACKS, "--attacks")],
        shares=options.shares,
        rounds=options.epochs,
        single=[one for one in SINGLE if one in named(options.attacks, SINGLE, "--attacks")]
        if options.one_device
        else SINGLE,
    )
    with tempfile.TemporaryDirectory(prefix="tessera-robust-") as folder:
        for method in methods:
            suite = _suite(method, options, Path(folder))
            found = suite.found(
                selection,
                options.results,
                single=options.one_device,
                table_only=options.table_only,
            )
            print(f"\nML-100K, {_METHODS[method][0]}, {selection.split} samples")
            if options.one_device:
                print(f"one device sends any value in every round\n\n{suite.single_table(found)}")
                continue
            shown = [one.name for one in suite.options if one.name in selection.options]
            for table in suite.tables(found, shown):
                print(f"\n{table}")
    return 0


def _suite(method: str, options: argparse.Namespace, folder: Path) -> Suite[Any, Any]:
    if method == "scatter":
        return scatter.ScatterSuite(options.root, options.artifact)
    return clicks.ClickSuite("fedavg" if method == "fedavg" else "logits", options.root, folder)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    lines = [
        f"  {one.name:16} {one.shows}"
        for method, (_, options) in _METHODS.items()
        for one in (Option(f"\n{method}:", "", lambda base: base), *options)
    ]
    parser = suite_parser("robust", _DESCRIPTION, _EXAMPLES + "\noptions:\n" + "\n".join(lines))
    parser.add_argument(
        "--method", action="append", choices=tuple(_METHODS), help="may be repeated (default: all)"
    )
    parser.add_argument(
        "--one-device",
        action="store_true",
        help="one device in every round sends any value: what a task's default limits leave of it",
    )
    parser.add_argument("--split", choices=("test", "validation"), default="test")
    parser.add_argument("--options", help="names of defences, separated by semicolons")
    parser.add_argument(
        "--attacks",
        help=f"of {', '.join(ATTACKS)}, separated by semicolons; "
        f"with --one-device of {', '.join(SINGLE)}",
    )
    parser.add_argument(
        "--shares", type=float, nargs="+", choices=SHARES, default=SHARES, metavar="SHARE"
    )
    add_run_options(parser, seeds=1)
    parser.add_argument("--epochs", type=int, default=0, help="fewer passes, for a quick look")
    parser.add_argument("--artifact", type=Path, help="another factorisation artifact's folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
