"""``python -m benchmarks.mutual``: mutual learning against its baselines on four domains."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean

from benchmarks.datasets.pictures import PACS_DOMAINS
from benchmarks.harness import BySeed, Cell, Suite, data_folder, mean_of, spread_of, table_of
from benchmarks.mutual.domains import ANGLES
from benchmarks.mutual.experiment import ROWS, TABLES, Experiment, Outcome, Row
from benchmarks.mutual.fleets import ArtifactShelf, execute, load_domains


class MutualSuite(Suite[Experiment, Outcome]):
    name = "mutual"
    description = """\
Four devices, four domains: mutual learning (MAFML), independent training (IND), training on the
pooled public samples (AGG), FedMD and FedAvg, with the real learners, methods, train graphs and
wire encodings. ACC is the mean accuracy of a device's model on all domains' test samples, BWT on
its own, FWT on the others'; validation samples pick the round. Every finished run is stored under
its settings, so a benchmark that was stopped continues where it was, and --table-only prints what
is there.
"""
    examples = """\
examples:
  python -m benchmarks.mutual --table independent --seeds 1
  python -m benchmarks.mutual --table variants --rows "MAFML;top 3 classes"
  python -m benchmarks.mutual --table pacs64 --seeds 1 --validation     (to choose settings)
  python -m benchmarks.mutual --table-only
"""
    outcome = Outcome
    rows = ROWS
    tables = TABLES
    exports = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--validation", action="store_true", help="validation accuracy alone")

    def run_of(self, row: Row, seed: int, options: argparse.Namespace) -> Experiment | None:
        """None where the row that limits its bytes is not there."""
        made: Experiment = row.make(seed)
        if not row.equal_bytes:
            return made
        (other,) = (one for one in ROWS if (one.table, one.name) == (row.table, row.equal_bytes))
        budget = self.outcome_of(other, seed, options)
        return None if budget is None else replace(made, most_bytes=round(budget.bytes))

    def execute(
        self, run: Experiment, options: argparse.Namespace, progress: Callable[[str], None]
    ) -> Outcome:
        domains = load_domains(run, data_folder(options.root, "mnist and pacs64"))
        return execute(run, domains, ArtifactShelf(options.artifacts), progress)

    def shown(self, table: str, outcomes: Outcomes, options: argparse.Namespace) -> Iterator[str]:
        rows = {row.name: row for row in ROWS if row.table == table}
        if options.validation:
            yield validation_table(rows, outcomes)
            return
        yield mean_table(rows, outcomes)
        domains = PACS_DOMAINS if table == "pacs64" else [f"M{angle}" for angle in ANGLES]
        columns = {f"{one}: ACC / BWT / FWT": _device(n) for n, one in enumerate(domains)}
        yield table_of(outcomes, columns, seeds=False)


# The tables.

Outcomes = Mapping[str, BySeed[Outcome]]


def mean_table(rows: Mapping[str, Row], outcomes: Outcomes) -> str:
    """Mean and standard deviation over seeds of the devices' mean ACC, BWT and FWT, in percent,
    the paper's in brackets."""
    columns: Mapping[str, Cell[Outcome]] = {
        **{f"{one.upper()} (paper)": _over_devices(rows, one) for one in ("acc", "bwt", "fwt")},
        "bytes up": lambda name, found: _kilobytes(one.bytes_up for one in found.values()),
        "bytes down": lambda name, found: _kilobytes(one.bytes_down for one in found.values()),
        "conflicts": lambda name, found: _share(one.conflict_share for one in found.values()),
        "rounds": mean_of(lambda one: one.rounds, ".0f"),
        "CPU s": mean_of(lambda one: one.seconds, ".0f"),
    }
    return table_of(outcomes, columns)


def _device(place: int) -> Cell[Outcome]:
    """ACC / BWT / FWT of a device, means over seeds."""

    def cell(name: str, found: BySeed[Outcome]) -> str:
        scores = [one.devices[place] for one in found.values()]
        means = (fmean(getattr(one, what) for one in scores) for what in ("acc", "bwt", "fwt"))
        return " / ".join(f"{mean:.1f}" for mean in means)

    return cell


def validation_table(rows: Mapping[str, Row], outcomes: Outcomes) -> str:
    """The devices' mean best validation accuracy: all that settings may be chosen by."""
    columns: Mapping[str, Cell[Outcome]] = {
        "validation": _over_devices(rows, "validation"),
        "round picked": mean_of(lambda one: fmean(score.round for score in one.devices), ".0f"),
        "CPU s": mean_of(lambda one: one.seconds, ".0f"),
    }
    return table_of(outcomes, columns)


def _over_devices(rows: Mapping[str, Row], what: str) -> Cell[Outcome]:
    """Mean and deviation over seeds, of the devices that count in the row."""

    def cell(name: str, found: BySeed[Outcome]) -> str:
        row = rows[name]
        text = spread_of(lambda one: one.mean(what, row.leave_out), 1)(name, found)
        paper = None if row.paper is None else getattr(row.paper, what, None)
        return text if paper is None else f"{text} ({paper:.1f})"

    return cell


def _kilobytes(values: Iterable[float]) -> str:
    mean = fmean(values)
    return f"{mean / 1000:,.0f} kB" if mean else "-"


def _share(values: Iterable[float]) -> str:
    mean = fmean(values)
    return f"{100 * mean:.0f} %" if mean >= 0 else "-"


main = MutualSuite().main

if __name__ == "__main__":
    raise SystemExit(main())
