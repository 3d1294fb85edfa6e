"""``python -m benchmarks.mutual``: mutual learning against its baselines on four domains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

from benchmarks.datasets.pictures import PACS_DOMAINS
from benchmarks.harness import (
    BySeed,
    Cell,
    StoredRuns,
    add_rows,
    add_run_options,
    chosen,
    data_folder,
    finished,
    mean_of,
    seeds_of,
    spread_of,
    suite_parser,
    table_of,
)
from benchmarks.mutual.domains import ANGLES
from benchmarks.mutual.experiment import ROWS, TABLES, Experiment, Outcome, Row
from benchmarks.mutual.fleets import ArtifactCache, execute, load_domains

_ROOT = Path(__file__).resolve().parents[2]
_ARTIFACTS = _ROOT / "out" / "artifacts"

_DESCRIPTION = """\
Four devices, four domains: mutual learning (MAFML), independent training (IND), training on the
pooled public samples (AGG), FedMD and FedAvg, with the real learners, methods, train graphs and
wire encodings. ACC is the mean accuracy of a device's model on all domains' test samples, BWT on
its own, FWT on the others'; validation samples pick the round. Every finished run is stored under
its settings, so a benchmark that was stopped continues where it was, and --table-only prints what
is there.
"""
_EXAMPLES = """\
examples:
  python -m benchmarks.mutual --table independent --seeds 1
  python -m benchmarks.mutual --table variants --rows "MAFML;top 3 classes"
  python -m benchmarks.mutual --table pacs64 --seeds 1 --validation     (to choose settings)
  python -m benchmarks.mutual --table-only
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    told = "\n".join(f"  {name:14} {shows}" for name, shows in TABLES.items())
    parser = suite_parser("mutual", _DESCRIPTION, f"{_EXAMPLES}\ntables:\n{told}")
    parser.add_argument("--table", choices=(*TABLES, "all"), default="all")
    add_rows(parser)
    add_run_options(parser)
    parser.add_argument("--validation", action="store_true", help="show validation accuracy alone")
    parser.add_argument("--artifacts", type=Path, default=_ARTIFACTS, help="where exports are kept")
    options = parser.parse_args(arguments)
    tables = list(TABLES) if options.table == "all" else [options.table]
    rows = chosen(options.rows, [row for row in ROWS if row.table in tables])
    artifacts = ArtifactCache(options.artifacts)
    store = StoredRuns[Experiment, Outcome](options.results, "mutual", Outcome)

    def run(experiment: Experiment, progress: Callable[[str], None]) -> Outcome:
        domains = load_domains(experiment, data_folder(options.root, "mnist and pacs64"))
        return execute(experiment, domains, artifacts, progress)

    carry_out = None if options.table_only else run

    def experiment(row: Row, seed: int) -> Experiment | None:
        """None where the row that limits its bytes is not there."""
        made = row.make(seed)
        if not row.equal_bytes:
            return made
        (other,) = (one for one in ROWS if (one.table, one.name) == (row.table, row.equal_bytes))
        limit = finished([(other.name, seed, other.make(seed))], store, carry_out, other.table)
        budget = limit[other.name].get(seed)
        return None if budget is None else replace(made, most_bytes=round(budget.bytes))

    def asked() -> Iterator[tuple[str, int, Experiment | None]]:
        for seed, row in product(seeds_of(options), rows):
            yield f"{row.table}: {row.name}", seed, experiment(row, seed)

    found = finished(asked(), store, carry_out)
    for table in tables:
        shown = [row for row in rows if row.table == table]
        outcomes = {row.name: found[f"{table}: {row.name}"] for row in shown}
        if not any(outcomes.values()):
            continue
        print(f"\n{TABLES[table]}\n")
        if options.validation:
            print(validation_table(shown, outcomes))
            continue
        print(mean_table(shown, outcomes))
        print()
        domains = PACS_DOMAINS if table == "pacs64" else [f"M{angle}" for angle in ANGLES]
        print(by_domain_table(outcomes, domains))
    return 0


# The tables.

Outcomes = Mapping[str, BySeed[Outcome]]


def mean_table(rows: Sequence[Row], outcomes: Outcomes) -> str:
    """Mean and standard deviation over seeds of the devices' mean ACC, BWT and FWT, in percent,
    the paper's in brackets.

    Args:
        rows: of the table.
        outcomes: by row's name, by seed.
    """
    columns: Mapping[str, Cell[Outcome]] = {
        **{f"{one.upper()} (paper)": _over_devices(rows, one) for one in ("acc", "bwt", "fwt")},
        "bytes up": lambda name, found: _kilobytes(one.bytes_up for one in found.values()),
        "bytes down": lambda name, found: _kilobytes(one.bytes_down for one in found.values()),
        "conflicts": lambda name, found: _share(one.conflict_share for one in found.values()),
        "rounds": mean_of(lambda one: one.rounds, ".0f"),
        "CPU s": mean_of(lambda one: one.seconds, ".0f"),
    }
    return table_of(outcomes, columns)


def by_domain_table(outcomes: Outcomes, domains: Sequence[str]) -> str:
    """ACC / BWT / FWT of each device, means over seeds."""

    def device(place: int) -> Cell[Outcome]:
        def cell(name: str, found: BySeed[Outcome]) -> str:
            scores = [one.devices[place] for one in found.values()]
            means = (fmean(getattr(one, what) for one in scores) for what in ("acc", "bwt", "fwt"))
            return " / ".join(f"{mean:.1f}" for mean in means)

        return cell

    columns = {f"{domain}: ACC / BWT / FWT": device(n) for n, domain in enumerate(domains)}
    return table_of(outcomes, columns, seeds=False)


def validation_table(rows: Sequence[Row], outcomes: Outcomes) -> str:
    """The devices' mean best validation accuracy: all that settings may be chosen by."""
    columns: Mapping[str, Cell[Outcome]] = {
        "validation": _over_devices(rows, "validation"),
        "round picked": mean_of(lambda one: fmean(score.round for score in one.devices), ".0f"),
        "CPU s": mean_of(lambda one: one.seconds, ".0f"),
    }
    return table_of(outcomes, columns)


def _over_devices(rows: Sequence[Row], what: str) -> Cell[Outcome]:
    """Mean and deviation over seeds, of the devices that count in the row."""
    by_name = {row.name: row for row in rows}

    def cell(name: str, found: BySeed[Outcome]) -> str:
        row = by_name[name]
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


if __name__ == "__main__":
    raise SystemExit(main())
