"""The results as tables: a line a row, the paper's figures beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tabulate import tabulate

from aggregator.simulate.intervals import paired_difference, spread
from benchmarks.distill.experiment import GLOBAL, Experiment, Outcome
from benchmarks.distill.presets import AFD, BASELINE, PAPER, ROWS, PaperFigures
from benchmarks.recommendation.click_metrics import ClickQuality

Outcomes = Mapping[str, Mapping[int, Outcome]]
_NOTHING = PaperFigures()
_BYTES_ROW = "FedAvg, Wide & Deep"


def quality_table(outcomes: Outcomes) -> str:
    """ACC, AUC, NDCG@5 and MAE over all devices' test samples, mean and deviation over seeds."""
    lines = []
    for name, by_seed in outcomes.items():
        if by_seed:
            paper = PAPER.get(name, _NOTHING)
            lines.append(
                (
                    name,
                    len(by_seed),
                    _cell(_of(by_seed, lambda q: q.accuracy), paper.accuracy),
                    _cell(_of(by_seed, lambda q: q.auc), paper.auc),
                    _cell(_of(by_seed, lambda q: q.ndcg), paper.ndcg),
                    _cell(_of(by_seed, lambda q: q.mae), paper.mae),
                    _mean([one.best.round_id for one in by_seed.values()], ".1f"),
                )
            )
    headers = ("", "seeds", "ACC", "AUC", "NDCG@5", "MAE", "round")
    return _table(lines, headers)


def device_table(outcomes: Outcomes) -> str:
    """Each measure of each device, mean over seeds: two tables, each as wide as a terminal."""
    tables = (_device_table(outcomes, pair) for pair in (("MAE", "AUC"), ("ACC", "NDCG@5")))
    return "\n\n".join(tables)


def cost_table(outcomes: Outcomes) -> str:
    """Training time to FD's validation loss, and bytes of a round.

    FD's loss is that of the round which validation picks. Times are processor seconds of a device;
    the ratio is taken seed by seed. Rows without an exchange have no bytes.
    """
    lines = []
    for name, by_seed in outcomes.items():
        apart = name in _APART
        if by_seed:
            lines.append(
                (
                    name,
                    *_time_to(by_seed, outcomes.get(BASELINE, {})),
                    _paper_time(name),
                    _mean(
                        [one.curve[-1].seconds / len(one.curve) for one in by_seed.values()], ".2f"
                    ),
                    "" if apart else _mean([one.up_bytes for one in by_seed.values()], ",.0f"),
                    "" if apart else _mean([one.down_bytes for one in by_seed.values()], ",.0f"),
                    _mean([one.parameters for one in by_seed.values()], ",.0f"),
                    _switches(by_seed),
                )
            )
    headers = (
        "",
        f"s to {BASELINE}'s loss",
        f"of {BASELINE}'s time",
        f"rounds to {BASELINE}'s loss",
        "in the paper",
        "s a round",
        "bytes up",
        "bytes down",
        "parameters",
        "switched",
    )
    return _table(lines, headers)


def harder_table(outcomes: Outcomes) -> str:
    """What harder conditions change against AFD's own run of the seed, over the same devices."""
    lines = []
    base = outcomes.get(AFD, {})
    for name, by_seed in outcomes.items():
        shared = sorted(set(by_seed) & set(base))
        if name.startswith(f"{AFD}, ") and shared:
            ours = [by_seed[seed].best.quality for seed in shared]
            theirs = [base[seed].best.quality for seed in shared]
            honest = [device for device in ours[0] if device != GLOBAL]
            lines.append(
                (
                    name,
                    len(shared),
                    *(
                        _points(
                            [_over(q, honest, read) for q in ours],
                            [_over(q, honest, read) for q in theirs],
                        )
                        for read in _READERS.values()
                    ),
                    _mean([by_seed[seed].up_bytes for seed in shared], ",.0f"),
                )
            )
    headers = ("against AFD, mean of honest devices", "seeds", *_READERS, "bytes up")
    return _table(lines, headers)


def verdict(outcomes: Outcomes) -> str:
    """The targets, each with what was measured."""
    base, best = outcomes.get(BASELINE, {}), outcomes.get(AFD, {})
    shared = sorted(set(base) & set(best))
    if not shared:
        return f"no verdict without runs of {AFD} and {BASELINE} on the same seeds"
    lines = []
    for title, read in (("AUC", _READERS["AUC"]), ("NDCG@5", _READERS["NDCG@5"])):
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


_READERS: Mapping[str, Callable[[ClickQuality], float]] = {
    "ACC": lambda quality: quality.accuracy,
    "AUC": lambda quality: quality.auc,
    "NDCG@5": lambda quality: quality.ndcg,
    "MAE": lambda quality: quality.mae,
}


def _device_table(outcomes: Outcomes, measures: Sequence[str]) -> str:
    lines = []
    devices: list[str] = []
    for name, by_seed in outcomes.items():
        if by_seed:
            first = next(iter(by_seed.values())).best.quality
            devices = [device for device in first if device != GLOBAL]
            paper = PAPER.get(name, _NOTHING).by_device
            cells = [
                _short(
                    _of(by_seed, _READERS[measure], device),
                    paper[place] if paper and measure == "MAE" else None,
                )
                for measure in measures
                for place, device in enumerate(devices)
            ]
            lines.append((name, *cells))
    headers = ("", *(f"{measure} {device}" for measure in measures for device in devices))
    return _table(lines, headers)


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


def _of(
    by_seed: Mapping[int, Outcome], read: Callable[[ClickQuality], float], device: str = GLOBAL
) -> list[float]:
    return [read(one.best.quality[device]) for one in by_seed.values()]


def _over(
    quality: Mapping[str, ClickQuality],
    devices: Sequence[str],
    read: Callable[[ClickQuality], float],
) -> float:
    return sum(read(quality[device]) for device in devices) / len(devices)


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


def _cell(values: Sequence[float], paper: float | None) -> str:
    found = spread(values)
    own = f"{found.mean:.4f}"
    if not math.isnan(found.deviation):
        own += f" ± {found.deviation:.4f}"
    return own if paper is None else f"{own} ({paper:.2f})"


def _short(values: Sequence[float], paper: float | None) -> str:
    own = _mean(values, ".3f")
    return own if paper is None else f"{own} ({paper:.2f})"


def _points(ours: Sequence[float], theirs: Sequence[float]) -> str:
    found = paired_difference(ours, theirs)
    return f"{100 * found.mean:+.2f} points"


def _mean(values: Sequence[float], form: str) -> str:
    return format(sum(values) / len(values), form) if values else ""


def _table(lines: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)
