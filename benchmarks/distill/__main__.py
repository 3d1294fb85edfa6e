"""``python -m benchmarks.distill``: attentive federated distillation on MovieLens 1M."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from aggregator.intervals import paired_difference, spread
from benchmarks.datasets.click import Clicks, ClickSettings, load_clicks
from benchmarks.distill.experiment import (
    AFD,
    BASELINE,
    GLOBAL,
    HARDER_ROWS,
    PAPER,
    ROWS,
    Experiment,
    Outcome,
    PaperFigures,
)
from benchmarks.distill.fleet import ArtifactShelf, click_fields, execute
from benchmarks.harness import BySeed, Cell, Suite, data_folder, mean_of, spread_of, table_of
from benchmarks.recommendation.click_metrics import ClickQuality


@cache
def _opened(root: Path, settings: ClickSettings, artifacts: Path) -> tuple[Clicks, ArtifactShelf]:
    clicks = load_clicks(root, settings)
    return clicks, ArtifactShelf(artifacts, click_fields(clicks.sizes))


class DistillSuite(Suite[Experiment, Outcome]):
    name = "distill"
    description = """\
Four devices with unequal shares of MovieLens 1M's users predict clicks and teach one another by
mean outputs (AFD, FD), or average their models (FedAvg). Tables 5 to 7 of the AFD paper, our
figures first, the paper's in brackets. The round with the least validation loss is reported; bytes
are those of sealed messages. Every finished run is stored under its settings, so a benchmark that
was stopped continues where it was, and --table-only prints what is there. A run takes one to three
minutes of one core."""
    examples = """\
examples:
  python -m benchmarks.distill                           (everything, three seeds)
  python -m benchmarks.distill --rows "AFD;FD" --seeds 1
  python -m benchmarks.distill --table-only              (print what is stored)
"""
    outcome = Outcome
    rows = ROWS
    tables: Mapping[str, str] = {
        "": "All devices' test samples; in brackets the paper's figure",
    }
    exports = True

    def execute(
        self, run: Experiment, options: argparse.Namespace, progress: Callable[[str], None]
    ) -> Outcome:
        root = data_folder(options.root, "ml-1m")
        return execute(run, *_opened(root, run.data, options.artifacts), progress)

    def shown(self, table: str, outcomes: Outcomes, options: argparse.Namespace) -> Iterator[str]:
        harder = {row.name for row in HARDER_ROWS}
        fleet = {name: found for name, found in outcomes.items() if name not in harder}
        yield quality_table(fleet)
        yield f"By device\n\n{device_table(fleet)}"
        yield f"Time and bytes\n\n{cost_table(fleet)}"
        yield f"Beyond the paper\n\n{harder_table(outcomes)}"
        yield verdict(outcomes)


# The tables: a line a row, the paper's figures in brackets beside ours.

Outcomes = Mapping[str, BySeed[Outcome]]
Measure = Callable[[ClickQuality], float]
_NOTHING = PaperFigures()
_BYTES_ROW = "FedAvg, Wide & Deep"
_MEASURES: Mapping[str, Measure] = {
    "ACC": lambda quality: quality.accuracy,
    "AUC": lambda quality: quality.auc,
    "NDCG@5": lambda quality: quality.ndcg,
    "MAE": lambda quality: quality.mae,
}


def quality_table(outcomes: Outcomes) -> str:
    """ACC, AUC, NDCG@5 and MAE over all devices' test samples, mean and deviation over seeds."""
    printed: Mapping[str, Callable[[PaperFigures], float | None]] = {
        "ACC": lambda paper: paper.accuracy,
        "AUC": lambda paper: paper.auc,
        "NDCG@5": lambda paper: paper.ndcg,
        "MAE": lambda paper: paper.mae,
    }
    columns = {
        title: _beside(spread_of(_of(read)), printed[title]) for title, read in _MEASURES.items()
    }
    return table_of(outcomes, {**columns, "round": mean_of(lambda one: one.best.round_id, ".1f")})


def device_table(outcomes: Outcomes) -> str:
    """Each measure of each device, mean over seeds: two tables, each as wide as a terminal."""
    first = next((one for found in outcomes.values() for one in found.values()), None)
    devices = [] if first is None else [name for name in first.best.quality if name != GLOBAL]

    def cell(title: str, place: int, device: str) -> Cell[Outcome]:
        def printed(paper: PaperFigures) -> float | None:
            return paper.by_device[place] if title == "MAE" and paper.by_device else None

        return _beside(mean_of(_of(_MEASURES[title], device), ".3f"), printed)

    return "\n\n".join(
        table_of(
            outcomes,
            {
                f"{title} {device}": cell(title, place, device)
                for title in titles
                for place, device in enumerate(devices)
            },
            seeds=False,
        )
        for titles in (("MAE", "AUC"), ("ACC", "NDCG@5"))
    )


def cost_table(outcomes: Outcomes) -> str:
    """Training time to FD's validation loss, and bytes of a round.

    FD's loss is that of the round which validation picks. Times are processor seconds of a device;
    the ratio is taken seed by seed. Rows without an exchange have no bytes.
    """
    base = outcomes.get(BASELINE, {})

    def sent(read: Callable[[Outcome], float]) -> Cell[Outcome]:
        return lambda name, found: "" if name in _APART else mean_of(read, ",.0f")(name, found)

    columns: Mapping[str, Cell[Outcome]] = {
        f"s to {BASELINE}'s loss": lambda name, found: _time_to(found, base)[0],
        f"of {BASELINE}'s time": lambda name, found: _time_to(found, base)[1],
        f"rounds to {BASELINE}'s loss": lambda name, found: _time_to(found, base)[2],
        "in the paper": lambda name, found: _paper_time(name),
        "s a round": mean_of(lambda one: one.curve[-1].seconds / len(one.curve), ".2f"),
        "bytes up": sent(lambda one: one.up_bytes),
        "bytes down": sent(lambda one: one.down_bytes),
        "parameters": mean_of(lambda one: one.parameters, ",.0f"),
        "switched": lambda name, found: _switches(found),
    }
    return table_of(outcomes, columns, seeds=False)


def harder_table(outcomes: Outcomes) -> str:
    """What harder conditions change against AFD's own run of the seed, over the same devices."""
    base = outcomes.get(AFD, {})
    harder = {
        name: {seed: one for seed, one in found.items() if seed in base}
        for name, found in outcomes.items()
        if name.startswith(f"{AFD}, ")
    }

    def points(read: Measure) -> Cell[Outcome]:
        def cell(name: str, found: BySeed[Outcome]) -> str:
            honest = [one for one in next(iter(found.values())).best.quality if one != GLOBAL]
            ours, theirs = (
                [
                    sum(read(one[seed].best.quality[d]) for d in honest) / len(honest)
                    for seed in found
                ]
                for one in (found, base)
            )
            return f"{100 * paired_difference(ours, theirs).mean:+.2f} points"

        return cell

    columns = {title: points(read) for title, read in _MEASURES.items()}
    return "Against AFD, mean of honest devices\n\n" + table_of(
        harder, {**columns, "bytes up": mean_of(lambda one: one.up_bytes, ",.0f")}
    )


def verdict(outcomes: Outcomes) -> str:
    """The targets, each with what was measured."""
    base, best = outcomes.get(BASELINE, {}), outcomes.get(AFD, {})
    shared = sorted(set(base) & set(best))
    if not shared:
        return f"no verdict without runs of {AFD} and {BASELINE} on the same seeds"
    lines = []
    for title, read in (("AUC", _MEASURES["AUC"]), ("NDCG@5", _MEASURES["NDCG@5"])):
        ours = [read(best[seed].best.quality[GLOBAL]) for seed in shared]
        theirs = [read(base[seed].best.quality[GLOBAL]) for seed in shared]
        found = paired_difference(ours, theirs)
        noise = max(spread(ours).deviation, spread(theirs).deviation)
        lines.append(
            f"{AFD} ahead of {BASELINE} in {title}: {found.mean:+.4f} (seed spread {noise:.4f})"
        )
    models = outcomes.get(_BYTES_ROW, {})
    if models:
        ours_up = sum(one.up_bytes for one in best.values()) / len(best)
        ours_down = sum(one.down_bytes for one in best.values()) / len(best)
        theirs_up = sum(one.up_bytes for one in models.values()) / len(models)
        theirs_down = sum(one.down_bytes for one in models.values()) / len(models)
        lines.append(
            f"bytes below {_BYTES_ROW}: {theirs_up / ours_up:.0f} times up, "
            f"{theirs_down / ours_down:.0f} times down, "
            f"{(theirs_up + theirs_down) / (ours_up + ours_down):.0f} times both"
        )
    return "\n".join(lines)


def _exchanges(experiment: Experiment) -> bool:
    """Whether devices learn from one another; where not, what they send is of no use."""
    if experiment.method == "teacher_logits":
        told = experiment.training
        return told.beta > 0 or (told.divergence and told.alpha + told.beta < 1)
    if experiment.prototypes is not None:
        return experiment.prototypes.training.pull > 0
    return experiment.method == "fedavg"


_APART = frozenset(row.name for row in ROWS if not _exchanges(row.make(0)))
"""Rows without an exchange: they cost no bytes, whatever the simulated channel counts."""


def _of(read: Measure, device: str = GLOBAL) -> Callable[[Outcome], float]:
    """A measure in the round that validation picks."""
    return lambda one: read(one.best.quality[device])


def _beside(cell: Cell[Outcome], printed: Callable[[PaperFigures], float | None]) -> Cell[Outcome]:
    """With the paper's figure in brackets where there is one."""

    def both(name: str, found: BySeed[Outcome]) -> str:
        paper = printed(PAPER.get(name, _NOTHING))
        return cell(name, found) + ("" if paper is None else f" ({paper:.2f})")

    return both


def _time_to(by_seed: Mapping[int, Outcome], base: Mapping[int, Outcome]) -> tuple[str, str, str]:
    """Seconds, their ratio to the baseline's, and rounds; how many seeds never got there."""
    times, ratios, rounds, missed = [], [], [], 0
    for seed in sorted(set(by_seed) & set(base)):
        wanted = base[seed].best.validation_loss
        found, reference = by_seed[seed].seconds_to(wanted), base[seed].seconds_to(wanted)
        number = by_seed[seed].rounds_to(wanted)
        if found is None or reference is None or number is None:
            missed += 1
            continue
        times.append(found)
        ratios.append(found / reference)
        rounds.append(number)
    if not times:
        return ("never" if missed else ""), "", ""
    note = f" ({missed} never)" if missed else ""
    return _mean(times, ".1f") + note, _mean(ratios, ".2f"), _mean(rounds, ".1f")


def _paper_time(name: str) -> str:
    """Of the baseline's, for as many iterations."""
    ours, base = (PAPER.get(each, _NOTHING).minutes for each in (name, BASELINE))
    return f"{ours / base:.2f}" if ours is not None and base is not None else ""


def _switches(by_seed: Mapping[int, Outcome]) -> str:
    """The first round after which all devices' segmented optimizers took plain steps."""
    rounds = [
        next((p.round_id for p in one.curve if p.switched == 1), None) for one in by_seed.values()
    ]
    found = [number for number in rounds if number is not None]
    return f"round {_mean(found, '.1f')}" if found else ""


def _mean(values: Sequence[float], form: str) -> str:
    return format(sum(values) / len(values), form) if values else ""


main = DistillSuite().main

if __name__ == "__main__":
    raise SystemExit(main())
