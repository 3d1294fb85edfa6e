"""One measured run: a defence, an attack and the share of devices that carry it out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from aggregator.methods.scatter import ScatterSettings
from benchmarks.robust.hostile import ATTACKS, Attack
from benchmarks.scatter.experiment import Experiment
from benchmarks.scatter.presets import ROWS, preset

__all__ = ["OPTIONS", "RECOMMENDED", "SHARES", "UNPROTECTED", "Option", "Trial", "base_experiment"]

_REVISION = 1
"""Part of every key: raise it when attacks or what is measured change."""

SHARES = (0.05, 0.2)
UNPROTECTED = "none"
RECOMMENDED = "guarded"


@dataclass(frozen=True, slots=True)
class Option:
    """A line of the table: what it shows, and the settings that it changes."""

    name: str
    shows: str
    change: Callable[[ScatterSettings], ScatterSettings]


@dataclass(frozen=True, slots=True)
class Trial:
    """``share`` of the devices carry out ``attack``; 0 and None for a clean run."""

    experiment: Experiment
    attack: Attack | None
    share: float

    def __post_init__(self) -> None:
        if (self.attack is None) != (self.share == 0) or not 0 <= self.share < 1:
            raise ValueError(f"attack {self.attack!r} does not go with a share of {self.share}")
        if self.attack is not None and self.attack not in ATTACKS:
            raise ValueError(f"attack is {self.attack!r}; expected one of {', '.join(ATTACKS)}")

    @property
    def key(self) -> str:
        """Names the stored result: another setting, another key."""
        described = [_REVISION, self.experiment.key, self.attack, self.share]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:20]


def base_experiment(
    split: Literal["test", "validation"], seed: int, option: Option, epochs: int
) -> Experiment:
    """ML-100K's unequal fleet under ``option``; ``epochs`` 0 for the preset's."""
    (unequal,) = (row for row in ROWS if row.name == "unequal")
    found = unequal.change(preset("ml-100k", split, seed))
    found = replace(found, settings=option.change(found.settings))
    return replace(found, epochs=epochs) if epochs else found


def _set(**changed: Any) -> Callable[[ScatterSettings], ScatterSettings]:
    def change(base: ScatterSettings) -> ScatterSettings:
        return replace(base, **changed)

    return change


OPTIONS = (
    Option(UNPROTECTED, "no protection", lambda base: base),
    Option("clip", "norms up to 4 running medians", _set(clip_multiple=4.0)),
    Option("rows", "rows up to 6 running medians", _set(row_multiple=6.0)),
    Option(
        RECOMMENDED,
        "updates out of line by 3 left out, items' vectors up to 1.25 (recommended)",
        _set(outlier_multiple=3.0, item_multiple=1.25),
    ),
    Option(
        "trimmed",
        "rows up to 6, and a tenth trimmed at either end of every cell",
        _set(row_multiple=6.0, robust="trimmed", trim_share=0.1),
    ),
    Option(
        "median",
        "rows up to 6, and the median of those who touched a cell",
        _set(row_multiple=6.0, robust="median"),
    ),
)
