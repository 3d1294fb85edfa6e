"""``python -m benchmarks.robust``: what hostile devices do to a model, and what helps."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import BySeed, Row, Suite, named
from benchmarks.robust import clicks, scatter
from benchmarks.robust.suite import ATTACKS, SHARES, SINGLE, Case, Method, Outcome, Trial

METHODS: Mapping[str, Method[Any]] = {"scatter": scatter.METHOD, **clicks.METHODS}


class RobustSuite(Suite[Trial[Any], Outcome]):
    name = "robust"
    description = """\
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
    examples = """\
examples:
  python -m benchmarks.robust --seeds 3
  python -m benchmarks.robust --method fedavg
  python -m benchmarks.robust --options "none;guarded" --attacks promotion --shares 0.05
  python -m benchmarks.robust --one-device --split validation --epochs 10
  python -m benchmarks.robust --split validation --epochs 20   (a quick look, to choose settings)

options:
""" + "\n".join(
        f"  {name + ', ' + one.name:27} {one.shows}"
        for name, method in METHODS.items()
        for one in method.options
    )
    outcome = Outcome
    choice = "--method"
    tables: Mapping[str, str] = {
        name: f"ML-100K, {method.title}, {{split}} samples" for name, method in METHODS.items()
    }
    seeds = 1
    exports = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--one-device",
            action="store_true",
            help="one device in every round sends any value: what a task's default limits leave",
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
        parser.add_argument("--epochs", type=int, default=0, help="fewer passes, for a quick look")
        parser.add_argument("--artifact", type=Path, help="another factorisation artifact's folder")

    def asked(self, options: argparse.Namespace) -> list[Row[Trial[Any]]]:
        methods = {name: METHODS[name] for name in self.asked_tables(options)}
        if options.one_device:
            methods.pop("logits", None)
        known = [one.name for method in methods.values() for one in method.options]
        options.options = named(options.options, known, "--options")
        return [
            Row(case, "", method.trial, name)
            for name, method in methods.items()
            for case in method.cases(options)
        ]

    def run_of(
        self, row: Row[Trial[Any]], seed: int, options: argparse.Namespace
    ) -> Trial[Any] | None:
        return row.make(row.name, seed, options)

    def execute(
        self, run: Trial[Any], options: argparse.Namespace, progress: Callable[[str], None]
    ) -> Outcome:
        method = next(one for one in METHODS.values() if isinstance(run.experiment, one.kind))
        return method.execute(run, options, progress)

    def shown(
        self, table: str, outcomes: Mapping[Case, BySeed[Outcome]], options: argparse.Namespace
    ) -> Iterator[str]:
        yield from METHODS[table].tables(outcomes, options)


main = RobustSuite().main

if __name__ == "__main__":
    raise SystemExit(main())
