"""How far the estimates that a device chooses by are from its rounds.

For each ladder and slow-down a choice is made as in a round; then whole rounds are run and slowed.
`choice` is the chosen rung's p90 as it was estimated against the p90 of those rounds; `line` what a
line through the two smallest rungs says of the largest one, which decides what is measured next.
`best` says whether the rung chosen is the largest whose rounds fit. Time is this process's on the
processor, so that whatever else the machine does counts little.

    python -m benchmarks.choices                  the six ladders of benchmarks.submodels
    python -m benchmarks.choices artifacts/net    others
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import Artifacts
from benchmarks.submodels.experiment import Data, Kind
from benchmarks.submodels.tasks import TASKS
from device_sdk.capability.fit import Request, choose
from device_sdk.capability.rungs import OpenArtifact, RoundOfSteps, RungRequest, open_artifacts
from device_sdk.system.clock import Clock
from device_sdk.system.printable import text_table

LADDERS: tuple[tuple[Data, Kind], ...] = (
    ("fashion", "ranks"),
    ("fashion", "widths"),
    ("digits", "ranks"),
    ("clicks", "ranks"),
    ("air", "ranks"),
    ("next-item", "widths"),
)
SLOWDOWNS = (1.0, 2.0, 4.0, 8.0)
STEPS = 5
ROUNDS = 20


class ProcessorClock:
    """Seconds that this process has worked, plus what it slept."""

    def __init__(self) -> None:
        self._slept = 0.0

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return time.process_time() + self._slept

    def sleep(self, seconds: float) -> None:
        """Count them, without waiting."""
        self._slept += seconds


def exported(artifacts: Artifacts) -> list[Path]:
    """The ladders of :data:`LADDERS`, written where they are not yet."""
    found = []
    for data, kind in LADDERS:
        described = {"choices": data, "kind": kind}
        found.append(artifacts.path(described, partial(TASKS[data].write, kind, 0)))
        print(f"{data} by {kind}", flush=True)
    return found


def true_seconds(rung: OpenArtifact, clock: Clock) -> list[float]:
    """What whole rounds take here."""
    work = RoundOfSteps(rung, STEPS, clock)
    return [work.run(np.inf).seconds for _ in range(ROUNDS)]


def p90(seconds: list[float]) -> float:
    """Of rounds."""
    return float(np.quantile(seconds, 0.9, method="lower"))


def off(estimate: float, truth: float) -> float:
    """The estimate's relative error."""
    return estimate / truth - 1.0


def errors_of(name: str, folder: Path) -> tuple[list[list[str]], list[float], list[float]]:
    """Rows to show, and the errors of choices and lines."""
    clock, rows = ProcessorClock(), []
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
            truth = slowdown * p90(took)
            fits = [
                slowdown * p90(true_seconds(each, clock)) <= asked.limit_seconds for each in rungs
            ]
            best = max((each for each, fit_ in enumerate(fits) if fit_), default=None)
            if fit.p90_seconds is not None:
                of_choices.append(off(fit.p90_seconds, truth))
            medians = [float(np.median(true_seconds(rungs[each], clock))) for each in (0, 1, -1)]
            x = [works[each].size for each in (0, 1, -1)]
            slope = (medians[1] - medians[0]) / max(x[1] - x[0], 1.0)
            of_lines.append(off(medians[0] + slope * (x[2] - x[0]), medians[2]))
            rows.append(
                [
                    name,
                    f"{slowdown:g}",
                    "none" if fit.place is None else works[place].name,
                    "-" if fit.p90_seconds is None else f"{1e3 * fit.p90_seconds:.1f}",
                    f"{1e3 * truth:.1f}",
                    "-" if fit.p90_seconds is None else f"{of_choices[-1]:+.0%}",
                    f"{of_lines[-1]:+.0%}",
                    "yes" if best == fit.place else "none" if best is None else works[best].name,
                ]
            )
    return rows, of_choices, of_lines


def main() -> None:
    """Print a row a ladder and slow-down, and the errors' median and worst."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ladders", nargs="*", type=Path, metavar="DIR")
    parser.add_argument("--artifacts", type=Path, default=Path("out/artifacts"))
    asked = parser.parse_args()
    names = [" by ".join(each) for each in LADDERS]
    folders = asked.ladders or exported(Artifacts(asked.artifacts))
    names = [folder.name for folder in asked.ladders] or names
    found = [errors_of(*each) for each in zip(names, folders, strict=True)]
    rows = [row for each, _, _ in found for row in each]
    of_choices = [error for _, each, _ in found for error in each]
    of_lines = [error for _, _, each in found for error in each]
    headers = ["ladder", "slower", "chosen", "p90 ms", "true ms", "choice", "line", "best"]
    print(text_table(rows, headers, "lrlrrrrl"))
    right = sum(
        row[-1] in ("yes", "none") and (row[-1] == "yes") == (row[2] != "none") for row in rows
    )
    print(f"the largest rung that fits was chosen in {right} of {len(rows)}")
    for name, errors in (("choice", of_choices), ("line", of_lines)):
        if errors:
            sizes = np.abs(errors)
            print(f"{name}: median {np.median(sizes):.0%}, worst {sizes.max():.0%} off")


if __name__ == "__main__":
    main()
