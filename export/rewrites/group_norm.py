"""Group and instance normalisation by way of layer normalisation."""

from __future__ import annotations

from torch import Tensor

from export.errors import ExportError
from export.rewrites.batch_norm import batch_norm
from export.rewrites.layer_norm import layer_norm


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.group_norm`` for input [b, c, ...] (Wu and He 2018, equation 7)."""
    batch, channels = input.shape[:2]
    if channels % num_groups:
        raise ValueError(f"{channels} channels cannot be split into {num_groups} equal groups")
    elements = channels // num_groups
    for size in input.shape[2:]:
        elements = elements * size
    grouped = input.reshape(batch, num_groups, elements)
    y = layer_norm(grouped, [elements], eps=eps).reshape(input.shape)
    line = [channels] + [1] * (input.dim() - 2)
    if weight is not None:
        y = y * weight.reshape(line)
    return y if bias is None else y + bias.reshape(line)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.instance_norm``; its own running statistics only in evaluation."""
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is not None:
        raise ExportError(
            "instance normalisation that trains running statistics",
            operator="instance_norm",
            instead="track_running_stats=False, torch's default",
        )
    return group_norm(input, input.shape[1], weight, bias, eps)
