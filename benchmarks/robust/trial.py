"""One measured run: a method's experiment, an attack and the share of devices that carry it out."""

from __future__ import annotations

import hashlib
import json
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from benchmarks.robust.attacks import ATTACKS, SINGLE, Attack

_REVISION = 1
"""Part of every key: raise it when attacks or what is measured change."""


class _Experiment(Protocol):
    """A dataclass of settings, with a key that changes with each of them."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def key(self) -> str: ...


ExperimentT = TypeVar("ExperimentT", bound=_Experiment)


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
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:20]
