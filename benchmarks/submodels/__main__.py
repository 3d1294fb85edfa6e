"""``python -m benchmarks.submodels``: devices train parts of one model, beside equal fleets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping

from benchmarks.harness import (
    Artifacts,
    BySeed,
    Cell,
    Suite,
    against,
    data_folder,
    markdown_table,
    mean_of,
    spread_of,
    table_of,
)
from benchmarks.submodels.experiment import (
    BASELINE,
    ROWS,
    SHARES,
    TABLES,
    Experiment,
    Outcome,
    Setting,
    Tuned,
)
from benchmarks.submodels.fleet import execute


class SubmodelSuite(Suite[Experiment, Outcome]):
    name = "submodels"
    description = """\
A fleet of which a quarter each affords 1/8, 1/4, 1/2 and all of one model, beside fleets that are
equal, with the real learners, methods and train graphs (float16 both ways). Each class is judged by
the model that it holds. Validation samples pick the round, and of the settings that are tried for
every row the one that is best on seed 0. Every finished run is stored under its settings, so a
benchmark that was stopped continues where it was, and --table-only prints what is there."""
    examples = """\
examples:
  python -m benchmarks.submodels --table air --seeds 5
  python -m benchmarks.submodels --table air --rows "low rank;all full" --settings
  python -m benchmarks.submodels --table-only
"""
    outcome = Outcome
    rows = ROWS
    tables = TABLES
    exports = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--settings", action="store_true", help="what was tried, on validation samples alone"
        )

    def run_of(self, row: Tuned, seed: int, options: argparse.Namespace) -> Experiment | None:
        """With the best of the row's settings; None where one was not tried yet."""
        tried = self._tried(row, options)
        best = max(tried, key=lambda one: tried[one], default=None)
        return row.tried(seed)[best] if best and len(tried) == len(row.settings) else None

    def _tried(self, row: Tuned, options: argparse.Namespace) -> dict[Setting, float]:
        """Quality on validation samples of seed 0, by setting."""
        found = {
            setting: self.carried_out(run, row, 0, options) for setting, run in row.tried(0).items()
        }
        return {one: outcome.chosen_by for one, outcome in found.items() if outcome is not None}

    def execute(
        self, run: Experiment, options: argparse.Namespace, progress: Callable[[str], None]
    ) -> Outcome:
        root = data_folder(options.root, "beijing-air, ml-1m, ml-100k, mnist and fashion-mnist")
        return execute(run, root, Artifacts(options.artifacts), progress)

    def shown(
        self, table: str, outcomes: Mapping[str, BySeed[Outcome]], options: argparse.Namespace
    ) -> Iterator[str]:
        if options.settings:
            tried = {
                row.name: self._tried(row, options)
                for row in self.asked(options)
                if row.table == table
            }
            lines = [
                (name, str(one), f"{value:.4f}")
                for name, found in tried.items()
                for one, value in found.items()
            ]
            yield markdown_table(lines, ("", "rate", "validation"))
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
