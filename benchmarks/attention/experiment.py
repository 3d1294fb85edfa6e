"""One measured run, as data: what it trains, and the key its result is stored under."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from aggregator.methods.attention.method import AttentionSettings
from aggregator.methods.fedavg.method import FedAvgSettings

DataName = Literal["vmnist", "air", "air-missing", "air-widths"]
Shown = Literal["personal", "global"]
DATA: tuple[str, ...] = get_args(DataName)

# Raise when a change to the code changes what the same settings come to.
_REVISION = 2


@dataclass(frozen=True, slots=True)
class Local:
    """Every device for itself: so many steps a round, nothing shared."""

    steps: int = 30
    batch_size: int = 32
    learning_rate: float = 0.1


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run over a fleet.

    Attributes:
        data: which fleet (see :mod:`benchmarks.attention.fleet`).
        seed: of the whole run: first parameters, batches, and who lacks which features.
        rounds: at most so many.
        decay: the learning rate falls by this factor a round, for every method.
        every: rounds between evaluations; the one that is best on validation is reported.
        method: settings of the method's halves.
        shows: ``personal`` evaluates each device's own model after its steps, ``global`` the model
            that all share.
        key_scale: see :class:`export.models.attention_meta.AttentionMeta`.
        own_bias: likewise.
        weak: this share of the devices leaves mixing to the aggregator.
        devices: names of the fleet's devices that take part; all where there are none.
    """

    data: DataName
    seed: int
    rounds: int
    method: AttentionSettings | FedAvgSettings | Local
    shows: Shown = "personal"
    decay: float = 1.0
    every: int = 4
    key_scale: float = 0.0
    own_bias: float = 0.0
    weak: float = 0.0
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.every < 1:
            raise ValueError("an experiment needs rounds, and evaluations among them")

    @property
    def key(self) -> str:
        """Names the stored result: another setting, another key."""
        told = {"revision": _REVISION, "kind": type(self.method).__name__, **asdict(self)}
        canonical = json.dumps(told, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:20]
