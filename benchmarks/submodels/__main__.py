"""``python -m benchmarks.submodels``: devices train parts of one model, beside equal fleets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from benchmarks.harness import (
    Artifacts,
    BySeed,
    Cell,
    Row,
    Suite,
    against,
    data_folder,
    mean_of,
    spread_of,
    table_of,
)
from benchmarks.submodels.experiment import BASELINE, ROWS, SHARES, TABLES, Experiment, Outcome
from benchmarks.submodels.fleet import execute


class SubmodelSuite(Suite[Experiment, Outcome]):
    name = "submodels"
    description = """\
A fleet of which a quarter each affords 1/8, 1/4, 1/2 and all of one model, beside fleets that are
equal, with the real learners, methods and train graphs (float16 both ways). Each class is judged by
the model that it holds. The round is picked by validation pictures every ten rounds, and so was
each row's rate (0.05 to 0.8, at --rate). Every finished run is stored under its settings, so a
benchmark that was stopped continues where it was, and --table-only prints what is there. A run
takes some two minutes of one core."""
    examples = """\
examples:
  python -m benchmarks.submodels --table fashion-0.3 --seeds 3
  python -m benchmarks.submodels --rows "low rank;all full" --rate 0.2 --validation
  python -m benchmarks.submodels --table-only
"""
    outcome = Outcome
    rows = ROWS
    tables = TABLES
    exports = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rate", type=float, help="another learning rate than the row's own")
        parser.add_argument("--validation", action="store_true", help="validation accuracy alone")

    def run_of(self, row: Row[Experiment], seed: int, options: argparse.Namespace) -> Experiment:
        run = row.make(seed)
        return run if options.rate is None else replace(run, learning_rate=options.rate)

    def execute(
        self, run: Experiment, options: argparse.Namespace, progress: Callable[[str], None]
    ) -> Outcome:
        root = data_folder(options.root, "fashion-mnist and ml-100k")
        return execute(run, root, Artifacts(options.artifacts), progress)

    def shown(
        self, table: str, outcomes: Mapping[str, BySeed[Outcome]], options: argparse.Namespace
    ) -> Iterator[str]:
        if options.validation:
            yield table_of(outcomes, {"validation": spread_of(lambda one: one.chosen_by)})
            return
        base = outcomes.get(BASELINE, {})
        yield table_of(
            outcomes,
            {
                "mean of the classes": spread_of(lambda one: one.mean),
                f"against {BASELINE}": against(base, lambda one: one.mean, relative=True),
                "round": mean_of(lambda one: one.round, ".0f"),
                "failed": mean_of(lambda one: one.failed, ".1f"),
            },
        )
        names = ["1/8", "1/4", "1/2", "full"]
        by_class: dict[str, Cell[Outcome]] = {
            f"at {name}": _at(place) for place, name in enumerate(names)
        }
        yield table_of(outcomes, by_class, seeds=False)
        yield table_of(
            outcomes,
            {
                f"kB up, ms a step at {name}": _cost(place)
                for place, name in enumerate(names[: len(SHARES)])
            },
            seeds=False,
        )


def _at(place: int) -> Cell[Outcome]:
    return spread_of(lambda one: one.test[place], 3)


def _cost(place: int) -> Cell[Outcome]:
    size = mean_of(lambda one: one.up_bytes[place] / 1000, ",.0f")
    time = mean_of(lambda one: one.milliseconds[place], ".1f")
    return lambda name, found: f"{size(name, found)}, {time(name, found)}"


main = SubmodelSuite().main

if __name__ == "__main__":
    raise SystemExit(main())
