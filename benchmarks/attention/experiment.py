"""One measured run, as data: what it does, what it found, and the key that it is stored under."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

from aggregator.methods.attention import AttentionSettings
from aggregator.methods.fedavg import FedAvgSettings
from benchmarks.harness import key_of

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
        return key_of(told)


@dataclass(frozen=True, slots=True)
class Point:
    """After a round: means over the devices, of their own validation and test sets.

    ``seconds``: processor time that a device has spent on training so far, mean over the devices.
    """

    round_id: int
    validation: float
    accuracy: float
    precision: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Scores:
    """Whom each device listened to in a round, mean over the parameter groups.

    ``first``: per device its weights over all devices, in the fleet's order; ``second``: per device
    the share of the mixture, the rest being the global model's.
    """

    round_id: int
    first: list[list[float]]
    second: list[float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``curve`` of evaluated rounds; ``by_device`` test accuracy in the best of them.

    ``down_bytes`` and ``up_bytes``: mean a device and round, as encoded, seals and padding apart,
    over the rounds after the warm-up. ``round_seconds``: processor time of a device's round there.
    """

    curve: list[Point]
    by_device: dict[str, float]
    down_bytes: float
    up_bytes: float
    round_seconds: float
    scores: list[Scores] = field(default_factory=list)

    @property
    def best(self) -> Point:
        """The round that validation picks; the first of equals."""
        return max(self.curve, key=lambda point: point.validation)

    def seconds_to(self, accuracy: float) -> float | None:
        """A device's training time until test accuracy first reached this; None where it never
        did."""
        return next((p.seconds for p in self.curve if p.accuracy >= accuracy), None)
