"""Batch normalisation's layer, whose count of batches stays a tensor."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as functional
from torch import Tensor


def forward(layer: Any, input: Tensor) -> Tensor:
    """``torch.nn.BatchNorm1d.forward`` and its kin.

    torch reads ``num_batches_tracked`` as a number where momentum is None (a plain average over
    all batches); here it stays a tensor.
    """
    layer._check_input_dim(input)
    momentum = 0.0 if layer.momentum is None else layer.momentum
    counter = layer.num_batches_tracked
    if layer.training and layer.track_running_stats and counter is not None:
        counter.add_(1)
        if layer.momentum is None:
            momentum = 1 / counter.to(input.dtype)
    without = layer.running_mean is None and layer.running_var is None
    kept = not layer.training or layer.track_running_stats
    return functional.batch_norm(
        input,
        layer.running_mean if kept else None,
        layer.running_var if kept else None,
        layer.weight,
        layer.bias,
        layer.training or without,
        momentum,
        layer.eps,
    )
