"""``python -m benchmarks.submodels``: devices train parts of one model, beside equal fleets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

from benchmarks.harness import (
    Artifacts,
    BySeed,
    Cell,
    Found,
    TunedSuite,
    against,
    data_folder,
    mean_of,
    spread_of,
    table_of,
)
from benchmarks.submodels.experiment import (
    BASELINE,
    ROWS,
    TABLES,
    Experiment,
    Outcome,
    Tuned,
)
from benchmarks.submodels.fleet import execute

_CLASSES = ("1/8", "1/4", "1/2", "full")
_UNEQUAL = ("low rank", "slices", "adapters")


class SubmodelSuite(TunedSuite[Experiment, Outcome]):
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
  python -m benchmarks.submodels --table-only --picture submodels.png
"""
    outcome = Outcome
    rows = ROWS
    tables = TABLES
    exports = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument(
            "--picture", type=Path, help="draw quality over a device's bytes and processor time"
        )

    def judged_by(self, row: Tuned, outcome: Outcome) -> float:
        return outcome.chosen_by

    def execute(
        self, run: Experiment, options: argparse.Namespace, progress: Callable[[str], None]
    ) -> Outcome:
        root = data_folder(options.root, "beijing-air, ml-1m, ml-100k, mnist and fashion-mnist")
        return execute(run, root, Artifacts(options.artifacts), progress)

    def shown(
        self, table: str, outcomes: Mapping[str, BySeed[Outcome]], options: argparse.Namespace
    ) -> Iterator[str]:
        rows = {row.name: row for row in self.asked(options) if row.table == table}
        if options.settings:
            yield self.settings_table(rows.values(), options)
            return
        if table == "levers":
            best = {name: str(self.best(rows[name], options)) for name in outcomes}
            yield _levers_table(outcomes, best)
            return
        columns: dict[str, Cell[Outcome]] = {
            "mean of the classes": spread_of(lambda one: one.mean),
            f"against {BASELINE}, %": _in_percent(outcomes.get(BASELINE, {})),
            **{
                f"{name} ahead of it, %": _in_percent(outcomes[name], ahead=True)
                for name in _UNEQUAL
                if outcomes.get(name)
            },
            "round": mean_of(lambda one: one.round, ".0f"),
            "rate": lambda name, found: str(self.best(rows[name], options)),
            "failed": mean_of(lambda one: one.failed, ".1f"),
        }
        yield table_of(outcomes, columns)
        by_class = {f"at {name}": _at(place) for place, name in enumerate(_CLASSES)}
        yield table_of(outcomes, by_class, seeds=False)
        costs = {f"kB up, ms a step at {name}": _cost(place) for place, name in enumerate(_CLASSES)}
        yield table_of(outcomes, costs, seeds=False)

    def finish(self, options: argparse.Namespace, found: Found[Outcome]) -> None:
        if options.picture is not None:
            shown = {table: of for table, of in found.items() if table != "levers"}
            draw(options.picture, {self.tables[table]: of for table, of in shown.items()})


def _levers_table(outcomes: Mapping[str, BySeed[Outcome]], rates: Mapping[str, str]) -> str:
    """On validation samples: test samples are not for choosing among what was tried."""
    base = outcomes.get("low rank", {})
    chosen_by: Callable[[Outcome], float] = lambda one: one.chosen_by  # noqa: E731
    points: Callable[[Outcome], float] = lambda one: 100 * one.chosen_by  # noqa: E731
    columns: dict[str, Cell[Outcome]] = {
        "mean of the classes": spread_of(chosen_by),
        "points from low rank": against(base, points, 1),
        **{
            f"at {name}": spread_of(lambda one, k=place: one.validation[k], 3)  # type: ignore[misc]
            for place, name in enumerate(_CLASSES)
        },
        "rate": lambda name, found: rates[name],
        "failed": mean_of(lambda one: one.failed, ".1f"),
    }
    return table_of(outcomes, columns)


def _in_percent(base: BySeed[Outcome], *, ahead: bool = False) -> Cell[Outcome]:
    """The difference from ``base`` in per cent of it; or how far it is ahead, in per cent of the
    row."""

    def cell(name: str, found: BySeed[Outcome]) -> str:
        whole = fmean(one.mean for one in (found if ahead else base).values())
        read: Callable[[Outcome], float] = lambda one: 100 * one.mean / whole  # noqa: E731
        return against(base, read, 1, ahead=ahead)(name, found)

    return lambda name, found: cell(name, found) if base else ""


def _at(place: int) -> Cell[Outcome]:
    return spread_of(lambda one: one.test[place], 3)


def _cost(place: int) -> Cell[Outcome]:
    size: Cell[Outcome] = mean_of(lambda one: one.up_bytes[place] / 1000, ",.0f")
    time: Cell[Outcome] = mean_of(lambda one: one.milliseconds[place], ".2f")
    return lambda name, found: f"{size(name, found)}, {time(name, found)}"


def draw(file: Path, outcomes: Mapping[str, Mapping[str, BySeed[Outcome]]]) -> None:
    """Quality by class over what a class's device sends a round, and over its processor time a
    step, means over seeds, a column a table, into ``file``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = dict.fromkeys(row.name for row in ROWS)
    strong_first = [*range(0, 20, 2), *range(1, 20, 2)]
    colours = {n: pyplot.get_cmap("tab20")(c) for n, c in zip(names, strong_first, strict=False)}
    shown = {title: rows for title, rows in outcomes.items() if any(rows.values())}
    size = (3.4 * max(1, len(shown)), 5.4)
    figure, grid = pyplot.subplots(
        2, max(1, len(shown)), figsize=size, layout="constrained", squeeze=False, sharey="col"
    )
    for column, (title, rows) in enumerate(shown.items()):
        for name, by_seed in rows.items():
            found = [*by_seed.values()]
            if not found or not any(found[0].up_bytes):
                continue
            quality = _by_class(found, lambda one: one.test)
            costs = (
                _by_class(found, lambda one: [size / 1000 for size in one.up_bytes]),
                _by_class(found, lambda one: one.milliseconds),
            )
            for axes, cost in zip(grid[:, column], costs, strict=True):
                known = [pair for pair in zip(cost, quality, strict=True) if pair[0] > 0]
                axes.plot(
                    *zip(*known, strict=True),
                    marker="o",
                    markersize=3,
                    label=name,
                    color=colours[name],
                )
        grid[0, column].set_title(title.split(":")[0], fontsize=7)
        grid[0, column].set(xlim=(0, None), xlabel="kB up a round")
        grid[1, column].set(xlim=(0, None), xlabel="ms a step")
        grid[0, column].set_ylabel(title.rpartition(": ")[2], fontsize=7)
    told = {
        name: line
        for axes in grid.flat
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        [*told.values()], [*told], loc="outside upper center", ncols=7, fontsize=8, frameon=False
    )
    figure.savefig(file, dpi=74)
    pyplot.close(figure)


def _by_class(
    found: list[Outcome], read: Callable[[Outcome], tuple[float, ...] | list[float]]
) -> list[float]:
    return [fmean(each) for each in zip(*map(read, found), strict=True)]


main = SubmodelSuite().main

if __name__ == "__main__":
    raise SystemExit(main())
