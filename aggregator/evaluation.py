"""Figures of a version out of its devices' reports: of the fleet, its parts, and how they spread.

A *figure* is a metric's value of the statistics that devices sent, added up: the same as if one
place had held their data. Beside it stand the devices' own values, each device counting once.

Any device may say what some data could have. So what it says counts for no more than a multiple of
the median device's samples and, of a metric without a largest value, within what is usual among the
devices; and versions are compared by :attr:`Figure.typical`, which leaves the extremes out.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aggregator.intervals import trimmed_interval
from device_sdk.evaluation.metrics import METRICS, Metric, Statistics
from device_sdk.evaluation.report import (
    ALONE,
    SERVED,
    STAGES,
    Evaluation,
    EvaluationReport,
    Stage,
)

# Figures as programs and people read them.


def figure_name(stage: Stage, metric: str) -> str:
    """What a figure is called: the metric's name, behind its stage unless that is ``global``."""
    return metric if stage == STAGES[0] else f"{stage}.{metric}"


def typical_name(figure: str) -> str:
    """What versions are compared by, beside the figure of this name."""
    return f"{figure}.typical"


def part_name(part: str) -> str:
    """What a part is called beside the fleet; an artifact may have the fleet's name."""
    return {FLEET: "fleet", "fleet": "artifact fleet"}.get(part, part)


def in_a_line(figures: Iterable[Figure]) -> str:
    """The fleet's: ``hr10 0.531 (median 0.5, worst tenth 0.2), personal.hr10 ...``."""
    return ", ".join(
        f"{figure_name(each.stage, each.metric)} {shown(each.value)} ({', '.join(_beside(each))})"
        for each in figures
        if each.part == FLEET
    )


def as_json(figure: Figure) -> dict[str, object]:
    """Every field, and what follows from them; what is not defined is null."""
    return {
        "stage": figure.stage,
        "metric": figure.metric,
        "part": figure.part or None,
        "devices": figure.devices,
        "samples": figure.samples,
        "capped_devices": figure.capped,
        "value": _defined(figure.value),
        "error_bound": _defined(figure.error_bound),
        "median": _defined(figure.median),
        "deciles": list(figure.deciles) or None,
        "worst_tenth": figure.worst_tenth,
        "typical": _defined(figure.typical),
        "over_alone": _defined(figure.over_alone),
        "over_alone_interval": _interval(figure.over_alone, figure.over_alone_half_width),
        "control_devices": figure.control_devices,
        "control_rounds": figure.control_rounds,
        "over_received": _defined(figure.over_received),
        "over_received_interval": _interval(figure.over_received, figure.over_received_half_width),
    }


def shown(value: float | None) -> str:
    """Four digits; a dash for what is not defined."""
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"


def _beside(figure: Figure) -> list[str]:
    found = (("median", figure.median), ("worst tenth", figure.worst_tenth))
    said = [f"{name} {shown(value)}" for name, value in found if shown(value) != "-"]
    return [*said, f"{figure.devices} devices"]


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value


def _interval(mean: float, half_width: float) -> list[float] | None:
    return list(ends_of(mean, half_width)) or None


# What devices predict with, and what federation brings, as people read it.


def serves(figures: Iterable[Figure], metric: str) -> Literal["", "global", "personal"]:
    """Which model devices had best predict with: the one that they receive, or their own after
    training. Empty where the figures do not tell, to 95 %."""
    found = _of_fleet(figures, metric).get("personal")
    ends = () if found is None else ends_of(found.over_received, found.over_received_half_width)
    if not ends or ends[0] <= 0 <= ends[1]:
        return ""
    return "personal" if ends[0] > 0 else "global"


def compared(figures: Sequence[Figure], metric: str) -> Figure | None:
    """The fleet's figure that the control arm is compared with: of the model that devices predict
    with."""
    fleet = _of_fleet(figures, metric)
    stages = SERVED if serves(figures, metric) == "global" else SERVED[::-1]
    return next((fleet[stage] for stage in stages if stage in fleet), None)


def what_it_brings(figures: Sequence[Figure], metric: str = "", *, asked: bool = False) -> str:
    """Fleet against control arm in a sentence, by the metric's name (default: the first figure's).
    Empty where nothing was heard of a control arm and none was ``asked`` for."""
    if not (asked or any(each.control_devices or each.stage == ALONE for each in figures)):
        return ""
    metric = metric or figures[0].metric
    found = compared(figures, metric)
    heard = 0 if found is None else found.control_devices
    ends = () if found is None else ends_of(found.over_alone, found.over_alone_half_width)
    if found is None or not ends:
        return (
            f"what federation brings is not known yet: {heard} of the control arm's devices "
            "evaluated this version, too few for an interval, or too few others "
            "(evaluation.least_devices; a larger evaluation.control has more of them, 1.0 no "
            "others)"
        )
    verb = "brings" if ends[0] > 0 else "costs" if ends[1] < 0 else "brings nothing yet:"
    rounds, sign = found.control_rounds, -1 if verb == "costs" else 1
    return (
        f"federation {verb} {_gain(metric, found.over_alone, ends, sign)}: {metric}, "
        f"{_MODELS[found.stage]} against the same devices alone, {heard} devices after {rounds} "
        f"round{'s' * (rounds != 1)} alone"
    )


def what_serves(figures: Sequence[Figure], metric: str = "") -> str:
    """What devices predict with and why, in a sentence; empty where the figures do not tell."""
    metric = metric or (figures[0].metric if figures else "")
    stage = serves(figures, metric)
    if not stage:
        return ""
    found = _of_fleet(figures, metric)["personal"]
    ends = ends_of(found.over_received, found.over_received_half_width)
    gain = _gain(metric, found.over_received, ends, 1 if stage == "personal" else -1)
    other = _MODELS["global" if stage == "personal" else "personal"]
    return f"devices predict with {_MODELS[stage]}: {gain} better than with {other}, by {metric}"


_MODELS = {"global": "the shared model", "personal": "their own models after training"}


def _of_fleet(figures: Iterable[Figure], metric: str) -> dict[Stage, Figure]:
    return {each.stage: each for each in figures if each.part == FLEET and each.metric == metric}


def ends_of(mean: float, half_width: float) -> tuple[float, ...]:
    """Of an interval; empty where there is none."""
    return () if math.isnan(half_width) else (mean - half_width, mean + half_width)


def _gain(metric: str, mean: float, ends: Iterable[float], sign: int) -> str:
    """A mean and its interval; with the ``sign`` -1 of what is lost."""
    shares = METRICS[metric].most_value == 1  # are told in points
    signed = (sign * each for each in (mean, *sorted(ends, reverse=sign < 0)))
    gain, *span = (f"{100 * each:.1f}" if shares else f"{each:.3g}" for each in signed)
    return f"{gain}{' points' if shares else ''} ({' to '.join(span)})"


# Early stopping: when a task's rounds have brought nothing for long enough.


class Evaluated(NamedTuple):
    """A version's figure, and the round that evaluated it."""

    version: int
    round: int
    value: float


def stalled_since(
    history: Sequence[Evaluated],
    *,
    higher_is_better: bool,
    most_rounds: int,
    least_improvement: float,
) -> Evaluated | None:
    """The last version that improved, where ``most_rounds`` rounds followed it without another.

    ``history`` by rising version. The first one improves, and each that is better than the last
    that did, by at least ``least_improvement``.
    """
    sign = 1.0 if higher_is_better else -1.0
    best: Evaluated | None = None
    for each in history:
        gain = math.inf if best is None else sign * (each.value - best.value)
        if gain > 0 and gain >= least_improvement:
            best = each
    if best is None or history[-1].round - best.round < most_rounds:
        return None
    return best


FLEET = ""
"""The part that is all of them."""
DECILES = tuple(range(10, 100, 10))
_MOST_APART = 5.0
"""Median absolute deviations from the median that a device's mean may lie, where nothing else
bounds it: of a thousand normal ones one is further away."""
_LEAST_USUAL = 3
"""Devices of which one that lies cannot choose the median."""
_LEAST_TRIMMED = 8
"""Devices with differences of which the extremes are left out."""
_EXTREME_SHARE = 0.05
"""Of the devices, at either end: at least one is left out of :attr:`Figure.typical`."""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What one device said of a version. ``part``: its capacity class, such as ``k=8`` or an
    artifact's name; empty where it named none."""

    part: str
    report: EvaluationReport


@dataclass(frozen=True, slots=True)
class Rules:
    """What becomes a figure.

    Attributes:
        metrics: those that were asked for.
        least_devices: a figure of fewer is none. Nor is a median that leaves fewer on either side
            of it, nor are deciles of tenths of fewer.
        least_samples: a device's evaluation of fewer counts as none.
        sample_cap: a device's samples count for no more than so many times the median device's;
            0 for no limit.
    """

    metrics: tuple[str, ...]
    least_devices: int
    least_samples: int = 1
    sample_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric of one stage, of the fleet or a part of it.

    Attributes:
        devices: that it is of.
        samples: that they evaluated on, as they count: see ``Rules.sample_cap``.
        capped: devices whose samples count for less than they said, or whose mean for a nearer one.
        value: the metric of all statistics; NaN where they do not define it.
        error_bound: how far ``value`` may lie from the data's own figure.
        median: of the devices' own values; NaN where fewer than two times ``least_devices`` have
            one.
        deciles: likewise the 10th to the 90th percentile, rising; empty where fewer than ten times
            ``least_devices`` have one.
        typical: the mean of the devices' own values, each counting once, without the lowest and the
            highest twentieth, one device at least. Where the median is NaN, for a value that single
            devices are left out of would be that of fewer: ``value`` if no device's samples counted
            for more than the median device's, so that one of n that lies is one of n.
        over_alone: how much better the devices of the control arm do in this stage than alone, each
            beside itself and counting once (of a metric without a largest value without the
            extremes, as in ``typical``): above 0 is better, whichever way the metric goes. NaN
            where fewer than ``least_devices`` have both.
        over_alone_half_width: of its 95 % interval; NaN where the devices are too few for one.
        control_devices: that have both.
        control_rounds: of the median one, that its second model has trained: fewer than the fleet's
            where the arm began later.
        over_received, over_received_half_width: of the personal stage likewise, how much better
            devices do with their own models than with the one that they received.
    """

    stage: Stage
    metric: str
    part: str
    devices: int
    samples: float
    capped: int
    value: float
    error_bound: float
    median: float
    deciles: tuple[float, ...] = ()
    typical: float = math.nan
    over_alone: float = math.nan
    over_alone_half_width: float = math.nan
    control_devices: int = 0
    control_rounds: int = 0
    over_received: float = math.nan
    over_received_half_width: float = math.nan

    @property
    def comparable(self) -> float:
        """What `best` and early stopping compare versions by: one device that lies cannot choose
        it. A median could not tell versions apart where a device has one user, who hits or not."""
        return self.value if math.isnan(self.typical) else self.typical

    @property
    def worst_tenth(self) -> float | None:
        """What nine devices in ten do better than, or as well as; None without deciles."""
        if not self.deciles:
            return None
        return self.deciles[0 if METRICS[self.metric].higher_is_better else -1]


def summarise(reports: Iterable[DeviceReport], rules: Rules) -> list[Figure]:
    """All figures that enough devices stand behind, by stage, metric and part, the fleet first.

    The same reports in the same order give the same bits. They are taken one by one. No part is
    left, and nobody out of a comparison, so that those of fewer than ``least_devices`` follow from
    the others by subtraction.
    """
    heard = {
        (stage, name): _Heard(stage, METRICS[name]) for stage in STAGES for name in rules.metrics
    }
    parts: list[str] = []
    rounds: list[int] = []
    for place, each in enumerate(reports):
        parts.append(each.part)
        rounds.append(each.report.rounds)
        for evaluation in each.report.results:
            column = heard.get((evaluation.stage, evaluation.metric))
            if column is not None and evaluation.samples >= rules.least_samples:
                column.add(place, each.part, evaluation)
    found: dict[Stage, list[Figure]] = {stage: [] for stage in STAGES}
    for name in rules.metrics:
        columns = {stage: heard[stage, name] for stage in STAGES}
        compared = _Compared(METRICS[name], columns, parts, rules.least_devices)
        alone = int(np.median(np.array(rounds)[compared.arm])) if compared.arm.any() else 0
        columns[ALONE].keep(compared.arm)
        for stage, column in columns.items():
            told = column.figures(rules, compared.shown)
            found[stage] += [
                replace(each, **compared.fields(stage, each.part), control_rounds=alone)
                for each in told
            ]
    return [figure for stage in STAGES for figure in found[stage]]


class _Heard:
    """What devices said of one metric of one stage."""

    def __init__(self, stage: Stage, metric: Metric) -> None:
        self._stage, self._metric = stage, metric
        self._places = array("l")
        self._parts: list[str] = []
        self._samples = array("d")
        self._values = array("d")
        # Of a histogram's hundreds of bins a device fills few.
        self._cells: list[tuple[NDArray[np.uint16], Statistics]] = []

    def add(self, place: int, part: str, evaluation: Evaluation) -> None:
        """``place``: of the device's report among all."""
        places = np.flatnonzero(evaluation.statistics)
        self._places.append(place)
        self._parts.append(part)
        self._samples.append(evaluation.samples)
        self._values.append(evaluation.value)
        self._cells.append((places.astype(np.uint16), evaluation.statistics[places]))

    def values(self, reports: int) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """By report who was heard, bool, and the devices' own values, NaN where there is none."""
        heard, values = np.zeros(reports, dtype=np.bool_), np.full(reports, math.nan)
        heard[self._places], values[self._places] = True, self._values
        return heard, values

    def keep(self, who: NDArray[np.bool_]) -> None:
        """Forget all others; bool by report."""
        kept = np.flatnonzero(who[np.asarray(self._places, dtype=np.int64)]).tolist()
        self._parts = [self._parts[each] for each in kept]
        self._cells = [self._cells[each] for each in kept]
        self._places = array("l", [self._places[each] for each in kept])
        self._samples = array("d", [self._samples[each] for each in kept])
        self._values = array("d", [self._values[each] for each in kept])

    def figures(self, rules: Rules, parts: Sequence[str]) -> list[Figure]:
        """Of the fleet and these parts; none where too few devices were heard."""
        least = rules.least_devices
        if len(self._parts) < least:
            return []
        samples, values = np.asarray(self._samples), np.asarray(self._values)
        most = rules.sample_cap * float(np.median(samples)) if rules.sample_cap else math.inf
        held = self._hold_means(samples)
        shares = np.minimum(1.0, np.where(held, np.median(samples), most) / samples)
        too_many = (samples > most) | held
        even = np.minimum(shares, np.median(samples) / samples)
        whole = {FLEET: np.ones(len(samples), dtype=np.bool_)}
        owns = {part: np.array([each == part for each in self._parts]) for part in parts}
        return [
            self._figure(part, own, (shares, even), too_many, _spread(values[own], least))
            for part, own in (whole | owns).items()
            # None of nobody; nor of all, who are the fleet.
            if part == FLEET or (own.any() and not own.all())
        ]

    def _total(self, shares: NDArray[np.float64], own: NDArray[np.bool_]) -> Statistics:
        """Statistics of some devices, each by its share."""
        total = np.zeros(self._metric.size)
        for each in np.flatnonzero(own):
            places, cells = self._cells[each]
            total[places] += shares[each] * cells
        return total

    def _hold_means(self, samples: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Hold each device's mean to what is usual, of a metric that has no largest value; bool
        [devices], whose. Their samples count for no more than the median device's."""
        if self._metric.most_value < math.inf or len(samples) < _LEAST_USUAL:
            return np.zeros(len(samples), dtype=np.bool_)
        place = self._metric.size - 1
        sums = np.array([cells[places == place].sum() for places, cells in self._cells])
        means = sums / samples
        median = float(np.median(means))
        apart = float(np.median(np.abs(means - median))) or abs(median)
        usual = np.clip(means, median - _MOST_APART * apart, median + _MOST_APART * apart)
        held: NDArray[np.bool_] = usual != means
        for each in np.flatnonzero(held):
            places, cells = self._cells[each]
            kept = np.where(places == place, usual[each] * samples[each], cells)
            self._cells[each] = (places, kept)
        return held

    def _figure(
        self,
        part: str,
        own: NDArray[np.bool_],
        weights: tuple[NDArray[np.float64], NDArray[np.float64]],
        too_many: NDArray[np.bool_],
        spread: tuple[float, tuple[float, ...], float],
    ) -> Figure:
        metric, (shares, even) = self._metric, weights
        total = self._total(shares, own)
        median, deciles, typical = spread
        if math.isnan(typical):
            typical = metric.value(self._total(even, own))
        return Figure(
            self._stage,
            metric.name,
            part,
            devices=int(np.count_nonzero(own)),
            samples=metric.weight(total),
            capped=int(np.count_nonzero(too_many[own])),
            value=metric.value(total),
            error_bound=metric.error_bound(total),
            median=median,
            deciles=deciles,
            typical=typical,
        )


class _Compared:
    """Who is told of apart in a metric's figures: parts of the fleet, and devices that are compared
    with themselves in other stages.

    Means over a set and a part of it tell the mean over the rest. So both are of ``least`` devices
    or of none, in every stage and in all that is told: within each of the ``shown`` parts, and the
    rest of the fleet, the arm's devices, around them those that have all that is served, and around
    them those that have each stage of it.
    """

    def __init__(
        self, metric: Metric, columns: Mapping[Stage, _Heard], parts: Sequence[str], least: int
    ) -> None:
        self._metric, self._parts, self._least = metric, np.array(parts, dtype=np.str_), least
        heard = {stage: each.values(len(parts)) for stage, each in columns.items()}
        self._values = {stage: values for stage, (_, values) in heard.items()}
        self._defined = {stage: ~np.isnan(values) for stage, values in self._values.items()}
        there = [heard[stage][0] for stage in SERVED]
        self.shown = self._shown_parts(there)
        served = [each for each in SERVED if np.count_nonzero(heard[each][0]) >= max(least, 1)]
        whole = np.full(len(parts), bool(served))
        both = np.logical_and.reduce([whole, *(self._defined[each] for each in served)])
        self._both = self._thinned(both, [heard[each][0] for each in served])
        self.arm = self._thinned(self._both & self._defined[ALONE], [self._both])
        """Whose second models are told of; bool by report."""

    def fields(self, stage: Stage, part: str) -> dict[str, Any]:
        """A figure's fields of comparisons."""
        if stage == ALONE:
            return {}
        own = self._of(part)
        arm, both = self.arm & own, self._both & self._defined["global"] & own
        who = arm if arm.any() else self._defined[stage] & self._defined[ALONE] & own
        found: dict[str, Any] = {"control_devices": int(np.count_nonzero(who))}
        if arm.any():
            found |= self._over("over_alone", stage, ALONE, arm)
        if stage == "personal" and both.any():
            found |= self._over("over_received", stage, "global", both)
        return found

    def _over(
        self, name: str, stage: Stage, other: Stage, who: NDArray[np.bool_]
    ) -> dict[str, float]:
        better = 1 if self._metric.higher_is_better else -1
        found = (better * (self._values[stage] - self._values[other])[who]).tolist()
        # One device that lies shifts a share's mean by 2 / n, any other's as it likes.
        bounded = self._metric.most_value < math.inf or len(found) < _LEAST_TRIMMED
        told = trimmed_interval(found, 0 if bounded else _cut(len(found)))
        return {name: told.mean, f"{name}_half_width": told.half_width}

    def _thinned(
        self, inner: NDArray[np.bool_], outer: Sequence[NDArray[np.bool_]]
    ) -> NDArray[np.bool_]:
        """``inner`` without as few of each group's first devices as that takes."""
        found = np.zeros_like(inner)
        for group in self._groups(self.shown):
            kept = np.flatnonzero(inner & group)
            gaps = [int(np.count_nonzero(each & group)) - len(kept) for each in outer]
            if any(0 < gap < self._least for gap in gaps):
                kept = kept[self._least - min(gaps) :]
            found[kept if len(kept) >= self._least else []] = True
        return found

    def _shown_parts(self, there: Sequence[NDArray[np.bool_]]) -> list[str]:
        sizes = Counter(self._parts[np.logical_or.reduce(there)].tolist())
        shown = sorted((size, part) for part, size in sizes.items() if part != FLEET)
        shown = [each for each in shown if self._are_enough(self._of(each[1]), there)]
        while shown and not self._are_enough(self._groups([part for _, part in shown])[-1], there):
            del shown[0]
        return sorted(part for _, part in shown)

    def _are_enough(self, group: NDArray[np.bool_], there: Sequence[NDArray[np.bool_]]) -> bool:
        counts = [np.count_nonzero(each & group) for each in there]
        return all(count == 0 or count >= self._least for count in counts)

    def _groups(self, parts: Sequence[str]) -> list[NDArray[np.bool_]]:
        """Of each part the devices, and at last the rest."""
        return [*(self._of(part) for part in parts), ~np.isin(self._parts, [*parts])]

    def _of(self, part: str) -> NDArray[np.bool_]:
        return np.full(len(self._parts), True) if part == FLEET else self._parts == part


def _cut(count: int) -> int:
    """So many are left out at either end."""
    return max(1, int(_EXTREME_SHARE * count)) if count >= _LEAST_USUAL else 0


def _spread(
    values: NDArray[np.float64], least_devices: int
) -> tuple[float, tuple[float, ...], float]:
    """Median, deciles and the typical value of those that are defined, where their halves and
    tenths are of enough devices: such a figure is a device's own value, or lies between two."""
    defined = np.sort(values[~np.isnan(values)])
    groups = len(defined) // least_devices
    if groups < 2:
        return math.nan, (), math.nan
    deciles = np.percentile(defined, DECILES).tolist() if groups >= 10 else ()
    cut = _cut(len(defined))
    typical = float(defined[cut : len(defined) - cut].mean())
    return float(np.median(defined)), tuple(deciles), typical
