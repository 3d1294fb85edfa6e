"""One measured run, as data: what it does, what it found, and the key that it is stored under."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from aggregator.methods.prototypes import PrototypesSettings
from benchmarks.harness import key_of
from benchmarks.mutual.domains import Split
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.mutual.contract import MutualTraining

FourModels = tuple[str, str, str, str]
MethodName = Literal["alone", "pooled", "mutual", "fedavg", "prototypes"]


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run over four domains, one device each.

    Attributes:
        data: ``rmnist`` or ``pacs64``.
        split: of Rotated MNIST; PACS's domains have no image in common.
        share: public part of all samples of a domain.
        seed: of the whole run. Runs that share it share images, splits and first weights.
        models: of the four devices, by domain.
        method: ``alone`` trains on the own samples (IND), ``pooled`` on these and all public ones
            (AGG), ``mutual``, ``fedavg`` and ``prototypes`` by the methods of these names.
        rounds: at most.
        steps: a round's, for ``alone`` and ``pooled``.
        learning_rate: for ``alone`` and ``pooled``; 0 for the artifact's.
        mutual, fedavg, prototypes: settings of those methods.
        stale_rounds: see ``aggregator.methods.mutual``.
        present: devices that take part in a round, drawn at random.
        random_device: one whose soft labels are drawn at random; -1 for none.
        update_codec: how float32 arrays travel up.
        most_bytes: a device's up and down; the run ends before a round that would exceed it. 0 for
            no limit.
        every: rounds between looks at the validation samples.
    """

    data: Literal["rmnist", "pacs64"]
    split: Split
    share: float
    seed: int
    models: FourModels
    method: MethodName
    rounds: int
    steps: int = 0
    learning_rate: float = 0.0
    mutual: MutualTraining | None = None
    fedavg: FedAvgTraining | None = None
    stale_rounds: int = 0
    present: int = 4
    random_device: int = -1
    update_codec: Literal["float32", "float16", "int8"] = "float16"
    most_bytes: int = 0
    every: int = 1
    prototypes: PrototypesSettings | None = None

    def __post_init__(self) -> None:
        settings = {
            "mutual": self.mutual,
            "fedavg": self.fedavg,
            "prototypes": self.prototypes,
        }
        for name, given in settings.items():
            if (self.method == name) != (given is not None):
                raise ValueError(f"method {self.method!r} goes with its own settings, not {name}'s")
        if self.rounds < 1 or self.every < 1 or not 1 <= self.present <= 4:
            raise ValueError("an experiment needs rounds and between one and four devices in each")

    @property
    def key(self) -> str:
        """Names the stored result: another setting, another key."""
        told: dict[str, Any] = asdict(self)
        if self.prototypes is None:
            # Runs were stored before there was such a method.
            del told["prototypes"]
        return key_of(told)


@dataclass(frozen=True, slots=True)
class DeviceScore:
    """One device's accuracies in percent, of the round that its validation chose.

    ``acc`` on all domains' test samples, ``bwt`` on its own, ``fwt`` on the others' (papers/mafml,
    section 3.2); ``validation`` on all domains' validation samples.
    """

    round: int
    validation: float
    acc: float
    bwt: float
    fwt: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Scores by device, and what they cost.

    ``curve`` is the devices' mean validation accuracy at each look; bytes are a device's mean over
    the whole run, sealed; ``conflict_share`` is NaN-free: -1 where nothing was projected.
    """

    devices: tuple[DeviceScore, ...]
    curve: tuple[float, ...]
    rounds: int
    bytes_up: float
    bytes_down: float
    conflict_share: float
    seconds: float

    @property
    def bytes(self) -> float:
        """A device's, both ways."""
        return self.bytes_up + self.bytes_down

    def mean(self, what: str, leave_out: int = -1) -> float:
        """Over devices, of ``acc``, ``bwt``, ``fwt`` or ``validation``, but one of them."""
        values = [
            float(getattr(score, what))
            for place, score in enumerate(self.devices)
            if place != leave_out
        ]
        return sum(values) / len(values)
