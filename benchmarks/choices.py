"""How far the estimates that a device chooses by are from its rounds.

For each ladder and slow-down a choice is made as in a round; then whole rounds are run and slowed.
`choice` is the chosen rung's p90 as it was estimated against the p90 of those rounds; `line` what a
line through the two smallest rungs says of the largest one, which decides what is measured next.

    python -m benchmarks.choices artifacts/net artifacts/other
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from device_sdk.capability.fit import Request, choose
from device_sdk.capability.rungs import OpenArtifact, RoundOfSteps, RungRequest, open_artifacts
from device_sdk.system.clock import MonotonicClock
from device_sdk.system.printable import text_table

SLOWDOWNS = (1.0, 2.0, 4.0, 8.0)
STEPS = 5
ROUNDS = 5


def true_seconds(rung: OpenArtifact, clock: MonotonicClock) -> list[float]:
    """What whole rounds take here."""
    work = RoundOfSteps(rung, STEPS, clock)
    return [work.run(np.inf).seconds for _ in range(ROUNDS)]


def off(estimate: float, truth: float) -> float:
    """The estimate's relative error."""
    return estimate / truth - 1.0


def errors_of(folder: Path) -> tuple[list[list[str]], list[float], list[float]]:
    """Rows to show, and the errors of choices and lines."""
    clock, rows = MonotonicClock(), []
    of_choices: list[float] = []
    of_lines: list[float] = []
    with ExitStack() as stack:
        request, rng = RungRequest(), np.random.default_rng(0)
        rungs = open_artifacts([folder], request, "cpu", clock, rng, stack)
        works = [RoundOfSteps(rung, STEPS, clock) for rung in rungs]
        # Within it at a slow-down of 2 all rungs fit, or nearly; at 8 few.
        deadline = 3.0 * float(np.median(true_seconds(rungs[-1], clock)))
        for slowdown in SLOWDOWNS:
            asked = Request(deadline, time_box_seconds=1.0, slowdown=slowdown)
            fit = choose(works, asked, clock)
            place = 0 if fit.place is None else fit.place
            took = true_seconds(rungs[place], clock)
            truth = slowdown * float(np.quantile(took, 0.9, method="lower"))
            if fit.p90_seconds is not None:
                of_choices.append(off(fit.p90_seconds, truth))
            medians = [float(np.median(true_seconds(rungs[each], clock))) for each in (0, 1, -1)]
            x = [works[each].size for each in (0, 1, -1)]
            slope = (medians[1] - medians[0]) / max(x[1] - x[0], 1.0)
            of_lines.append(off(medians[0] + slope * (x[2] - x[0]), medians[2]))
            rows.append(
                [
                    folder.name,
                    f"{slowdown:g}",
                    "none" if fit.place is None else works[place].name,
                    "-" if fit.p90_seconds is None else f"{1e3 * fit.p90_seconds:.1f}",
                    f"{1e3 * truth:.1f}",
                    "-" if fit.p90_seconds is None else f"{of_choices[-1]:+.0%}",
                    f"{of_lines[-1]:+.0%}",
                ]
            )
    return rows, of_choices, of_lines


def main() -> None:
    """Print a row a ladder and slow-down, and the errors' median and worst."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ladders", nargs="+", type=Path, metavar="DIR")
    found = [errors_of(folder) for folder in parser.parse_args().ladders]
    rows = [row for each, _, _ in found for row in each]
    of_choices = [error for _, each, _ in found for error in each]
    of_lines = [error for _, _, each in found for error in each]
    headers = ["ladder", "slower", "chosen", "p90 ms", "true ms", "choice", "line"]
    print(text_table(rows, headers, "lrlrrrr"))
    for name, errors in (("choice", of_choices), ("line", of_lines)):
        if errors:
            sizes = np.abs(errors)
            print(f"{name}: median {np.median(sizes):.0%}, worst {sizes.max():.0%} off")


if __name__ == "__main__":
    main()
