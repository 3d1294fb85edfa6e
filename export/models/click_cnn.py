"""Click prediction by convolutions over the fields."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


class ClickCnn(nn.Module):
    """Embedded fields [b, r, dim] to two logits [b, 2]: no click, click.

    The network of AFD's experiments (papers/afd, section 3.1): two convolutions along the fields,
    a maximum over neighbouring fields, and linear layers of 120, 60 and 2.
    """

    def __init__(self, count: int, dim: int, *, kernels: int = 32) -> None:
        super().__init__()
        if count < 2 or kernels < 1:
            raise ValueError(f"{count} fields and {kernels} kernels; expected at least 2 and 1")
        self.first = _Convolution(dim, kernels)
        self.second = _Convolution(kernels, kernels)
        self.head = nn.Sequential(
            nn.Linear(kernels * (count // 2), 120),
            nn.ReLU(),
            nn.Linear(120, 60),
            nn.ReLU(),
            nn.Linear(60, 2),
        )

    def forward(self, fields: Tensor) -> Tensor:
        maps = torch.relu(self.second(torch.relu(self.first(fields))))
        even = maps.shape[1] // 2 * 2
        pooled = torch.maximum(maps[:, 0:even:2], maps[:, 1:even:2])
        logits: Tensor = self.head(pooled.flatten(1))
        return logits


class _Convolution(nn.Module):
    """A convolution of width 3 along the fields, [b, r, inputs] to [b, r, outputs].

    Equal to nn.Conv1d(inputs, outputs, 3, padding=1) on the transposed map. As one matrix product
    over neighbours side by side it takes a third of the time, forwards and backwards.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 0, 1, 1))
        sides = torch.cat([padded[:, :-2], x, padded[:, 2:]], -1)
        maps: Tensor = self.linear(sides)
        return maps
