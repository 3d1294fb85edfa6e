"""``python -m benchmarks.personalisation``: models of devices' own on PFLlib's Fashion-MNIST."""

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
    table_of,
)
from benchmarks.personalisation.experiment import (
    ALONE,
    PRINTED,
    ROUNDS,
    ROWS,
    USUAL,
    Experiment,
    Judged,
    Outcome,
    Tuned,
)
from benchmarks.personalisation.fleet import execute


class PersonalisationSuite(TunedSuite[Experiment, Outcome]):
    name = "personalisation"
    description = f"""\
PFLlib's split of Fashion-MNIST (20 devices, Dirichlet 0.1), every device in each of {ROUNDS}
rounds, one local epoch of batches of ten, with the real learners, methods and train graphs
(float16 both ways). Pictures that each device holds back of its training data pick the round and,
of the settings that are tried for every row, the one that is best on seed 0; test pictures only
judge. Every finished run is stored under its settings, so a benchmark that was stopped continues
where it was, and --table-only prints what is there."""
    examples = """\
examples:
  python -m benchmarks.personalisation --seeds 5
  python -m benchmarks.personalisation --rows "alone;Ditto" --settings
  python -m benchmarks.personalisation --table-only
"""
    outcome = Outcome
    rows = ROWS
    tables: Mapping[str, str] = {
        "": "Accuracy in %: of all devices' test pictures together, and mean over the devices"
    }
    exports = True

    def judged_by(self, row: Tuned, outcome: Outcome) -> float:
        return outcome.judged[row.model].validation

    def execute(
        self, run: Experiment, options: argparse.Namespace, progress: Callable[[str], None]
    ) -> Outcome:
        root = data_folder(options.root, "fashion-mnist")
        return execute(run, root, Artifacts(options.artifacts), progress)

    def shown(
        self, table: str, outcomes: Mapping[str, BySeed[Outcome]], options: argparse.Namespace
    ) -> Iterator[str]:
        rows = {row.name: row for row in self.asked(options)}
        if options.settings:
            yield self.settings_table(rows.values(), options)
            return
        judged: dict[str, dict[int, Judged]] = {
            name: {seed: one.judged[rows[name].model] for seed, one in found.items()}
            for name, found in outcomes.items()
        }
        together: Callable[[Judged], float] = lambda one: 100 * one.test  # noqa: E731
        each: Callable[[Judged], float] = lambda one: 100 * one.mean  # noqa: E731
        yield table_of(
            judged,
            {
                "together": _interval(together),
                "device": _interval(each),
                f"together, less {ALONE}": against(judged.get(ALONE, {}), together, 2),
                f"less {USUAL}": against(judged.get(USUAL, {}), together, 2),
                "printed": lambda name, _: f"{100 * PRINTED[name]:.2f}" if name in PRINTED else "",
            },
        )
        yield table_of(
            judged,
            {
                f"a device, less {ALONE}": against(judged.get(ALONE, {}), each, 2),
                f"less {USUAL}": against(judged.get(USUAL, {}), each, 2),
                "worst device": mean_of(lambda one: 100 * min(one.by_device), ".1f"),
                "round": mean_of(lambda one: one.round, ".0f"),
                "rate, strength": lambda name, _: str(self.best(rows[name], options)),
            },
            seeds=False,
        )
        yield table_of(
            outcomes,
            {
                "kB up": mean_of(lambda one: one.up_bytes / 1000, ".1f"),
                "kB down": mean_of(lambda one: one.down_bytes / 1000, ".1f"),
                "ms a round": mean_of(lambda one: one.milliseconds, ".0f"),
            },
            seeds=False,
        )


def _interval(read: Callable[[Judged], float]) -> Cell[Judged]:
    """The mean over seeds with its 95 % interval."""

    def cell(name: str, found: BySeed[Judged]) -> str:
        from aggregator.intervals import paired_difference

        values = [read(one) for one in found.values()]
        over = paired_difference(values, [0.0] * len(values))
        text = f"{over.mean:.2f}"
        if math.isnan(over.half_width):
            return text
        return f"{text} [{over.mean - over.half_width:.2f}, {over.mean + over.half_width:.2f}]"

    return cell


main = PersonalisationSuite().main

if __name__ == "__main__":
    raise SystemExit(main())
