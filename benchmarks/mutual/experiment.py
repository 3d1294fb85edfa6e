"""One measured run, as data: what it is called, and the key its result is stored under."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

from benchmarks.mutual.domains import Split
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.mutual.contract import MutualTraining

FourModels = tuple[str, str, str, str]


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
            (AGG), ``mutual`` and ``fedavg`` by the methods of these names.
        rounds: at most.
        steps: a round's, for ``alone`` and ``pooled``.
        learning_rate: for ``alone`` and ``pooled``; 0 for the artifact's.
        mutual, fedavg: settings of those methods.
        stale_rounds: see ``aggregator.methods.mutual.method``.
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
    method: Literal["alone", "pooled", "mutual", "fedavg"]
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

    def __post_init__(self) -> None:
        settings = {"mutual": self.mutual, "fedavg": self.fedavg}
        for name, given in settings.items():
            if (self.method == name) != (given is not None):
                raise ValueError(f"method {self.method!r} goes with its own settings, not {name}'s")
        if self.rounds < 1 or self.every < 1 or not 1 <= self.present <= 4:
            raise ValueError("an experiment needs rounds and between one and four devices in each")

    @property
    def key(self) -> str:
        """Names the stored result: another setting, another key."""
        canonical = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:20]
