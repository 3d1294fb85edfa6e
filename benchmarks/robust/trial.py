"""One measured run: a method's experiment, an attack and the share of devices that carry it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from benchmarks.harness import Run, key_of
from benchmarks.robust.attacks import ATTACKS, SINGLE, Attack

_REVISION = 1
"""Part of every key: raise it when attacks or what is measured change."""


ExperimentT = TypeVar("ExperimentT", bound=Run)


@dataclass(frozen=True, slots=True)
class Trial(Generic[ExperimentT]):
    """``share`` of the devices carry out ``attack``; 0 and None for a clean run.

    ``magnitude``: of an attack of a single device; 0 for others.
    """

    experiment: ExperimentT
    attack: Attack | None
    share: float
    magnitude: float = 0.0

    def __post_init__(self) -> None:
        if (self.attack is None) != (self.share == 0) or not 0 <= self.share < 1:
            raise ValueError(f"attack {self.attack!r} does not go with a share of {self.share}")
        known = SINGLE if self.magnitude else ATTACKS
        if self.attack is not None and self.attack not in known:
            raise ValueError(f"attack is {self.attack!r}; expected one of {', '.join(known)}")

    @property
    def key(self) -> str:
        """Names the stored result: another setting, another key."""
        described = [_REVISION, self.experiment.key, self.attack, self.share]
        if self.magnitude:
            described.append(self.magnitude)
        return key_of(described)
