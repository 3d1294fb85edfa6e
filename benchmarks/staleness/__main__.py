"""``python -m benchmarks.staleness``: rounds that wait for all, that close early, and staleness."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping

from benchmarks.harness import (
    Artifacts,
    BySeed,
    Cell,
    TunedSuite,
    against,
    data_folder,
    mean_of,
    spread_of,
    table_of,
)
from benchmarks.staleness.experiment import ALL, ROWS, Experiment, Outcome, Tuned, execute

_QUARTERS = ("slowest quarter", "slower quarter", "quicker quarter", "quickest quarter")


class StalenessSuite(TunedSuite[Experiment, Outcome]):
    name = "staleness"
    description = """\
A fleet of 100 devices whose round times are log-normal, so that the middle 95 % lie within a factor
30, learns Fashion-MNIST by federated averaging in virtual time, a tenth of it away in each round,
with the real learners, method and train graph. A round waits for all who are likely to come, closes
at so many updates and loses the others, or closes and counts them later (round.late). Prints how
long it takes to a fixed accuracy (in minutes, 1 being the median device's round time), the accuracy
after as many updates, and of how many of the devices asked updates counted, by quarter of the fleet
by speed. Where rounds close early and lose updates, devices drop what they do at the next round's
opening: that is kind to them. Finished runs are stored."""
    examples = """\
examples:
  python -m benchmarks.staleness --quality 0.76
  python -m benchmarks.staleness --table-only
"""
    outcome = Outcome
    rows = ROWS
    tables: Mapping[str, str] = {"": "Fashion-MNIST, 100 devices, Dirichlet 0.3"}
    exports = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument(
            "--quality", type=float, default=0.75, help="accuracy to be reached (0.75)"
        )

    def judged_by(self, row: Tuned, outcome: Outcome) -> float:
        return outcome.chosen_by

    def execute(
        self, run: Experiment, options: argparse.Namespace, progress: Callable[[str], None]
    ) -> Outcome:
        root = data_folder(options.root, "fashion-mnist")
        return execute(run, root, Artifacts(options.artifacts), progress)

    def shown(
        self, table: str, outcomes: Mapping[str, BySeed[Outcome]], options: argparse.Namespace
    ) -> Iterator[str]:
        base, wanted = outcomes.get(ALL, {}), options.quality
        rows = {row.name: row for row in self.asked(options)}
        if options.settings:
            yield self.settings_table(rows.values(), options)
            return
        columns: dict[str, Cell[Outcome]] = {
            f"minutes to {wanted:g}": mean_of(lambda one: _minutes(one, wanted), ".1f"),
            f"times sooner than {ALL}": lambda name, found: _sooner(found, base, wanted),
            "accuracy in the end": spread_of(lambda one: one.final),
            f"against {ALL}": against(base, lambda one: one.final),
            "minutes in all": mean_of(lambda one: one.seconds[-1] / 60, ".1f"),
            "rate": lambda name, found: f"{self.best(rows[name], options):g}",
        }
        yield table_of(outcomes, columns)
        yield "updates that counted of 100 that were asked for, by quarter of the fleet by speed"
        yield table_of(outcomes, _by_quarter(lambda one: one.selected), seeds=False)
        yield "of 100 updates that counted, whose they are, and how many are of earlier rounds"
        who = _by_quarter(lambda one: dict.fromkeys(_QUARTERS, sum(one.counted.values())))
        who["later"] = mean_of(lambda one: 100 * one.stale / sum(one.counted.values()), ".1f")
        yield table_of(outcomes, who, seeds=False)


def _by_quarter(of: Callable[[Outcome], Mapping[str, int]]) -> dict[str, Cell[Outcome]]:
    """What counted, in per cent of that."""

    def cell(name: str) -> Cell[Outcome]:
        return mean_of(lambda one: 100 * one.counted[name] / of(one)[name], ".1f")

    return {name: cell(name) for name in _QUARTERS}


def _minutes(one: Outcome, quality: float) -> float:
    return one.seconds_to(quality) / 60


def _sooner(found: BySeed[Outcome], base: BySeed[Outcome], quality: float) -> str:
    shared = sorted(found.keys() & base.keys())
    if found is base or not shared:
        return ""
    ratios = [_minutes(base[seed], quality) / _minutes(found[seed], quality) for seed in shared]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if all(ratios) else 0.0
    return f"{mean:.1f} ({min(ratios):.1f} to {max(ratios):.1f})"


main = StalenessSuite().main

if __name__ == "__main__":
    raise SystemExit(main())
