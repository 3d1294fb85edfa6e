"""``python -m benchmarks.attention``: attention-based aggregation against its baselines."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

# Official onnxruntime wheels write to the user's cache folder unless this is set before the import.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np

from aggregator.intervals import spread
from benchmarks.attention.execute import execute
from benchmarks.attention.experiment import (
    BEST,
    FINE_TUNED,
    KINDS,
    OBSERVED,
    ROWS,
    TABLES,
    Experiment,
    Outcome,
    Scores,
)
from benchmarks.datasets.air import SUBURBS
from benchmarks.datasets.vmnist import VARIANTS
from benchmarks.harness import (
    Artifacts,
    BySeed,
    Cell,
    Found,
    Suite,
    against,
    data_folder,
    markdown_table,
    mean_of,
    spread_of,
    spread_text,
    table_of,
)
from device_sdk.methods.attention.mixer import AttentionScores
from examples.attention_picture import Moment, draw_attention


class AttentionSuite(Suite[Experiment, Outcome]):
    name = "attention"
    description = """\
Personalised federated learning with the real learners, methods and train graphs: FedAMN, its
layers one by one, and the baselines, on V-MNIST (18 devices, a convolutional network of 22,218
parameters) and Beijing air quality (12 stations, a GRU of 32). 20 rounds of 30 steps; validation
data picks the round that is reported. Every finished run is stored under its settings, so a
benchmark that was stopped continues where it was, and --table-only prints what is there. A run
takes about half a minute of one core.
"""
    examples = """\
examples:
  python -m benchmarks.attention --table vmnist --seeds 1
  python -m benchmarks.attention --table air --rows "FedAvg;FedAMN"
  python -m benchmarks.attention --validation --table air --seeds 1      (to choose settings)
  python -m benchmarks.attention --table-only
  python -m benchmarks.attention --table-only --pictures out/pictures   (figures 5 and 6)
"""
    outcome = Outcome
    rows = ROWS
    tables = TABLES
    exports = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        shown = parser.add_mutually_exclusive_group()
        shown.add_argument("--validation", action="store_true", help="validation accuracy alone")
        shown.add_argument(
            "--pictures",
            type=Path,
            metavar="FOLDER",
            help=f"draw there whom devices listen to ({BEST} on vmnist and air, an early round and "
            "the last, the first seed; figure 5) and accuracy as stations join (figure 6)",
        )

    def execute(
        self, run: Experiment, options: argparse.Namespace, progress: Callable[[str], None]
    ) -> Outcome:
        root = data_folder(options.root, "mnist, fashion-mnist and beijing-air")
        return execute(run, root, Artifacts(options.artifacts), progress)

    def shown(self, table: str, outcomes: Outcomes, options: argparse.Namespace) -> Iterator[str]:
        if options.validation:
            yield validation_table(outcomes)
        elif table == "joining":
            yield joining_table(outcomes)
        elif table == "known":
            yield known_table(outcomes)
        elif table == "untouched":
            yield untouched_table(outcomes)
        else:
            yield main_table(outcomes)
            yield main_caption(ROWS[0].make(0).every)

    def finish(self, options: argparse.Namespace, found: Found[Outcome]) -> None:
        """Figure 5 of the first seed that has it, figure 6 of all; says what cannot be drawn."""
        if options.pictures is None:
            return
        for table in self.asked_tables(options):
            outcomes = found.get(table, {})
            best = outcomes.get(BEST, {})
            drawn = table in ("vmnist", "air", "joining")
            if table == "joining" and any(outcomes.values()):
                print(f"\npicture: {draw_joining(options.pictures / 'joining.png', outcomes)}")
            elif table != "joining" and drawn and best:
                path = options.pictures / f"attention-{table}.png"
                draw_listening(path, table, best[min(best)])
                print(f"\npicture: {path} ({BEST}, seed {min(best)})")
            elif drawn:
                print(f"no picture of {table}: no run for it is stored", file=sys.stderr)


# The tables.

Outcomes = Mapping[str, BySeed[Outcome]]
"""By row's name, by seed."""


def _accuracy(one: Outcome) -> float:
    return 100 * one.best.accuracy


def main_table(outcomes: Outcomes) -> str:
    """Mean and deviation over seeds at the round that validation picks, and what it cost.

    Times are a device's processor time while it trains.
    """

    def seconds_to(accuracy: float) -> Cell[Outcome]:
        def cell(name: str, found: BySeed[Outcome]) -> str:
            times = [one.seconds_to(accuracy) for one in found.values()]
            reached = [time for time in times if time is not None]
            if len(reached) < len(times):
                return "-" if not reached else f"({len(reached)} of {len(times)} seeds)"
            return f"{fmean(reached):.1f}"

        return cell

    columns: Mapping[str, Cell[Outcome]] = {
        "accuracy %": spread_of(_accuracy, 2),
        "macro precision %": spread_of(lambda one: 100 * one.best.precision, 2),
        f"{BEST} is ahead by": against(outcomes.get(BEST, {}), _accuracy, 2, ahead=True),
        "s to 70 %": seconds_to(0.7),
        "s to 80 %": seconds_to(0.8),
        "kB down": mean_of(lambda one: one.down_bytes / 1000, ",.0f"),
        "kB up": mean_of(lambda one: one.up_bytes / 1000, ",.0f"),
        "ms a round": mean_of(lambda one: 1000 * one.round_seconds, ",.0f"),
    }
    return table_of(outcomes, columns)


def main_caption(every: int) -> str:
    """What the main table's times and bytes are; ``every``: rounds between evaluations."""
    return (
        f"Times are those of the first evaluation at the accuracy or above, one every {every} "
        "rounds, not interpolated.\n"
        "Bytes are those of the encoded arrays, without seals and padding."
    )


def joining_accuracies(outcomes: Outcomes) -> dict[str, dict[int, list[float]]]:
    """Accuracies % at the observed station, one a seed, by method and number of stations."""
    accuracies: dict[str, dict[int, list[float]]] = {}
    for name, found in outcomes.items():
        method, _, count = name.partition(", ")
        if found:
            values = [100 * one.by_device[OBSERVED] for one in found.values()]
            accuracies.setdefault(method, {})[int(count)] = values
    return accuracies


def joining_table(outcomes: Outcomes) -> str:
    """Accuracy at the observed station: a line a method, a column a number of stations."""
    found = joining_accuracies(outcomes)
    counts = sorted({count for by_count in found.values() for count in by_count})
    lines = [
        (method, *(spread_text(by_count[c], 2) if c in by_count else "" for c in counts))
        for method, by_count in found.items()
    ]
    headers = (f"accuracy % at {OBSERVED}, stations:", *(str(count) for count in counts))
    return markdown_table(lines, headers)


def known_table(outcomes: Outcomes) -> str:
    """Accuracy by what devices' pictures show: a line a method, those told apart first."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, by_seed in outcomes.items():
        method, _, among = name.partition(", ")
        for kind, devices in KINDS.items():
            if among not in (kind, "all") or not by_seed:
                continue
            line = method if among == "all" else f"{method}, told apart"
            found.setdefault(line, {})[kind] = [
                100 * sum(one.by_device[device] for device in devices) / len(devices)
                for one in by_seed.values()
            ]
    lines = [
        (line, *(spread_text(by_kind[kind], 2) if kind in by_kind else "" for kind in KINDS))
        for line, by_kind in found.items()
    ]
    headers = ("accuracy %", *(f"{len(devices)} with {k}" for k, devices in KINDS.items()))
    return markdown_table(lines, headers)


def untouched_table(outcomes: Outcomes) -> str:
    """Accuracy of what ships beside fine-tuning alone: a line a fleet and method."""
    fleets: dict[str, dict[str, BySeed[Outcome]]] = {}
    for name, found in outcomes.items():
        fleet, _, method = name.partition(", ")
        fleets.setdefault(fleet, {})[method] = found
    lines = []
    for fleet, by_method in fleets.items():
        plain = by_method.get(FINE_TUNED, {})
        cells: Sequence[Cell[Outcome]] = (
            spread_of(_accuracy, 2),
            against(plain, _accuracy, 2),
            mean_of(lambda one: one.down_bytes / 1000, ",.0f"),
            mean_of(lambda one: 1000 * one.round_seconds, ",.1f"),
        )
        lines += [
            (fleet, method, *(cell(method, found) for cell in cells))
            for method, found in by_method.items()
            if found
        ]
    headers = ("fleet", "method", "accuracy %", f"ahead of {FINE_TUNED}", "kB down", "ms a round")
    return markdown_table(lines, headers)


def validation_table(outcomes: Outcomes) -> str:
    """Validation accuracy alone, to choose settings by."""
    columns: Mapping[str, Cell[Outcome]] = {
        "validation %": spread_of(lambda one: 100 * one.best.validation, 2),
        "round": mean_of(lambda one: one.best.round_id, ",.0f"),
    }
    return table_of(outcomes, columns)


# Figures 5 and 6 of papers/fedamn, drawn from stored outcomes; no data set is read.


def device_groups(data: str, names: Collection[str]) -> dict[str, str]:
    """Each device's group, V-MNIST's variant or the city and its suburbs, in the fleet's order.

    A stored outcome names its devices in no order, and has weights in the fleet's.
    """
    if data != "vmnist":
        return {name: "suburbs" if name in SUBURBS else "city" for name in sorted(names)}
    variant = {name: name.partition(".")[0] for name in names}
    order: list[str] = list(VARIANTS)
    return {n: variant[n] for n in sorted(names, key=lambda n: (order.index(variant[n]), n))}


def moment_of(scores: Scores, names: Collection[str]) -> Moment:
    """What a round's scores say of each device; ``names`` in the fleet's order."""
    senders = tuple(names)
    return {
        name: AttentionScores(
            scores.round_id,
            senders,
            np.asarray([weights], np.float32),
            np.asarray([[share, 1 - share]], np.float32),
        )
        for name, weights, share in zip(senders, scores.first, scores.second, strict=True)
    }


def draw_listening(path: Path, data: str, outcome: Outcome) -> Path:
    """Figure 5: whom each device listens to, in an early round and in the last, group by group.

    Returns the path of the PNG; raises ValueError for an outcome without scores.
    """
    if not outcome.scores:
        raise ValueError("nobody mixes in this run: there are no scores to draw")
    groups = device_groups(data, outcome.by_device)
    moments = [moment_of(scores, groups) for scores in outcome.scores]
    return draw_attention(path, moments, {name: name for name in groups}, groups)


def draw_joining(path: Path, outcomes: Outcomes) -> Path:
    """Figure 6: accuracy at the observed station as others join, a line a method.

    Means over seeds with their deviation; returns the path of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    accuracies = joining_accuracies(outcomes)
    for method, found in accuracies.items():
        over = {count: spread(values) for count, values in sorted(found.items())}
        axes.errorbar(
            list(over),
            [one.mean for one in over.values()],
            [np.nan_to_num(one.deviation) for one in over.values()],
            marker="o",
            capsize=3,
            label=method,
        )
    axes.set_xticks(sorted({count for found in accuracies.values() for count in found}))
    axes.set_xlabel("stations that take part")
    axes.set_ylabel(f"accuracy % at {OBSERVED}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


main = AttentionSuite().main

if __name__ == "__main__":
    raise SystemExit(main())
