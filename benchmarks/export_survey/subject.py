"""What is surveyed: an ordinary torch model, its loss, a batch and the name of an optimizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], Any]


@dataclass(frozen=True)
class TrainStep:
    """One step as its author writes it.

    ``optimizer`` is a name of :data:`optimizers.OPTIMIZERS`. ``dynamic`` is the exporter's; None
    means that axis 0 of every batch entry is the batch. ``predict`` is the exporter's, for losses
    that a prediction cannot compute: with gradients of their own, or writes.
    """

    model: nn.Module
    loss: Loss
    batch: Batch
    optimizer: str = "adam"
    dynamic: Mapping[str, Mapping[int, str]] | None = None
    predict: Loss | None = None

    @property
    def axes(self) -> dict[str, dict[int, str]]:
        """The named axes."""
        if self.dynamic is None:
            return {name: {0: "batch"} for name, tensor in self.batch.items() if tensor.dim()}
        return {name: dict(axes) for name, axes in self.dynamic.items()}


@dataclass(frozen=True)
class Subject:
    """A row of the table. ``package``: the module it comes from, empty where torch is enough."""

    name: str
    kind: str
    package: str
    write: Callable[[], TrainStep]

    @property
    def missing(self) -> bool:
        """Whether its package is not installed."""
        return bool(self.package) and importlib.util.find_spec(self.package) is None

    def step(self, seed: int = 0) -> TrainStep:
        """The train step anew, with the same weights and batch for the same seed."""
        torch.manual_seed(seed)
        return self.write()


@dataclass
class Kind:
    """Subjects of one kind; ``add`` is the decorator that lists one."""

    name: str
    subjects: list[Subject] = field(default_factory=list)

    def add(
        self, name: str, package: str = ""
    ) -> Callable[[Callable[[], TrainStep]], Callable[[], TrainStep]]:
        """Lists the function that writes a train step."""

        def listed(write: Callable[[], TrainStep]) -> Callable[[], TrainStep]:
            self.subjects.append(Subject(name, self.name, package, write))
            return write

        return listed
