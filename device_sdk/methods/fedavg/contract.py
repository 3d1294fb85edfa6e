"""The training settings that a broadcast of federated averaging carries, known to both ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from device_sdk.methods.settings import (
    TrainingSettings,
    require_choice,
    require_number,
    require_whole,
)

__all__ = ["FedAvgTraining", "Weighting"]

Weighting = Literal["samples", "uniform"]


@dataclass(frozen=True, slots=True)
class FedAvgTraining(TrainingSettings):
    """How every device trains in a round of federated averaging.

    FedAvg (McMahan et al. 2017, algorithm 1) is the default. FedSGD is ``batch_size`` 0 and one
    epoch: one gradient step on all local samples. FedProx (Li et al. 2020, eq. 2) is
    ``proximal_mu`` above 0. FedPer (Arivazhagan et al. 2019) is ``personal``.

    Attributes:
        epochs: passes over the local samples in a round.
        batch_size: samples a step; 0 for all at once.
        most_steps: at most so many steps a round; 0 for no limit.
        learning_rate: 0 for the artifact's own.
        proximal_mu: weight of half the squared distance to the broadcast's parameters.
        personal: torch's names of what stays on the device, separated by commas: ``classifier`` or
            ``classifier.4,norm``. A name stands for all parameters and buffers below it.
        weighting: ``samples`` weights devices by their number of training samples, which they then
            send; with ``uniform`` all count the same and none is sent.
        optimizer_state: ``fresh`` starts the device's optimizer anew in each round, as its
            parameters do; ``kept`` carries momenta over.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    epochs: int = 1
    batch_size: int = 32
    most_steps: int = 0
    learning_rate: float = 0.0
    proximal_mu: float = 0.0
    personal: str = ""
    weighting: Weighting = "samples"
    optimizer_state: Literal["fresh", "kept"] = "fresh"

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 0), ("most_steps", 0)):
            require_whole(name, getattr(self, name), least)
        for name in ("learning_rate", "proximal_mu"):
            require_number(name, getattr(self, name), 0, 1e3)
        if not isinstance(self.personal, str) or "" in self.personal.split(",")[1:]:
            raise ValueError(
                f"personal is {self.personal!r}; expected names separated by commas, such as "
                "'classifier,norm', or nothing"
            )
        require_choice("weighting", self.weighting, get_args(Weighting))
        require_choice("optimizer_state", self.optimizer_state, ("fresh", "kept"))

    @property
    def personal_names(self) -> tuple[str, ...]:
        """``personal``, taken apart."""
        return tuple(name.strip() for name in self.personal.split(",") if name.strip())
