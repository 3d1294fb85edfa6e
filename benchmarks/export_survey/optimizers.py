"""The optimizers of the survey: the exporter's, and torch's that computes the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

import export


@dataclass(frozen=True)
class Pair:
    """How each side makes it."""

    ours: Callable[[], export.Optimizer]
    torchs: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


OPTIMIZERS = {
    "adam": Pair(lambda: export.Adam(1e-3), lambda p: torch.optim.Adam(p, 1e-3)),
    "sgd": Pair(
        lambda: export.Sgd(0.01, momentum=0.9), lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)
    ),
    "plain sgd": Pair(lambda: export.Sgd(0.01), lambda p: torch.optim.SGD(p, 0.01)),
}
