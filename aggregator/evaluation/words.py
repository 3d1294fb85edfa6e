"""Figures as programs and people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from aggregator.evaluation.figures import FLEET, Figure
from device_sdk.evaluation.report import STAGES, Stage


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
