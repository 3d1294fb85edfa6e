"""Batch and group normalisation, compared with torch by the exporter's own verification."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
import torch
from torch import nn

import export

Parity = Callable[..., export.Exported]


def _numbers(*shape: int) -> torch.Tensor:
    # Far from zero mean: a variance taken as E[x^2] - E[x]^2 would lose its digits.
    return 5 + torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class Branches(nn.Module):
    """Every layer after its own 1 x 1 convolution, on the same input; a mismatch names it."""

    def __init__(self, layers: dict[str, nn.Module], front: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleDict(
            {name: nn.Sequential(front(), layer) for name, layer in layers.items()}
        )
        for layer in layers.values():
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x).flatten(1) for branch in self.branches.values()], 1)


def test_batch_norm_of_images(assert_parity: Parity) -> None:
    layers: dict[str, nn.Module] = {
        "usual": nn.BatchNorm2d(6),
        "plain": nn.BatchNorm2d(6, affine=False),
        "no_statistics": nn.BatchNorm2d(6, track_running_stats=False),
        "fast_statistics": nn.BatchNorm2d(6, momentum=0.5, eps=1e-3),
        "rectified": nn.Sequential(nn.BatchNorm2d(6), nn.ReLU()),
        "twice": nn.Sequential(nn.BatchNorm2d(6), nn.Tanh(), nn.BatchNorm2d(6)),
    }
    model = Branches(layers, lambda: nn.Conv2d(3, 6, 1))
    exported = assert_parity(model, {"x": _numbers(5, 3, 4, 3)})
    compared = {c.tensor for c in exported.report.comparisons} if exported.report else set()
    assert any("running_var" in name for name in compared), sorted(compared)


def test_batch_norm_of_sequences_and_rows(assert_parity: Parity) -> None:
    layers: dict[str, nn.Module] = {
        "sequence": nn.BatchNorm1d(4),
        "rows": nn.Sequential(nn.Flatten(), nn.BatchNorm1d(20)),
    }
    assert_parity(Branches(layers, lambda: nn.Conv1d(3, 4, 1)), {"x": _numbers(6, 3, 5)})


def test_frozen_batch_norm_trains_with_its_running_statistics(assert_parity: Parity) -> None:
    class Frozen(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> Frozen:
            super().train(False)
            return self

    layer = Frozen(4)
    with torch.no_grad():
        layer.running_mean.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))  # type: ignore[union-attr]
        layer.running_var.copy_(torch.tensor([1.0, 4.0, 0.25, 2.0]))  # type: ignore[union-attr]
    model = Branches({"frozen": layer}, lambda: nn.Conv2d(3, 4, 1))
    assert_parity(model, {"x": _numbers(3, 3, 4, 3)})


def test_group_norm(assert_parity: Parity) -> None:
    layers: dict[str, nn.Module] = {
        "groups": nn.GroupNorm(3, 6),
        "one_group": nn.GroupNorm(1, 6),
        "a_group_each": nn.GroupNorm(6, 6),
        "plain": nn.GroupNorm(2, 6, affine=False),
        "instance": nn.InstanceNorm2d(6),
        "instance_affine": nn.InstanceNorm2d(6, affine=True),
    }
    assert_parity(Branches(layers, lambda: nn.Conv2d(3, 6, 1)), {"x": _numbers(3, 3, 4, 3)})


@pytest.mark.parametrize(
    ("make", "most"), [(lambda: nn.BatchNorm2d(6), 70), (lambda: nn.GroupNorm(3, 6), 45)]
)
def test_a_layer_adds_few_nodes(
    make: Callable[[], nn.Module], most: int, assert_parity: Parity
) -> None:
    batch = {"x": _numbers(3, 3, 4, 3)}
    counts = []
    for layer in (nn.Identity(), make()):
        exported = assert_parity(Branches({"layer": layer}, lambda: nn.Conv2d(3, 6, 1)), batch)
        counts.append(len(onnx.load(exported.directory / "train.onnx").graph.node))
    assert counts[1] - counts[0] <= most, counts


def test_instance_norm_with_running_statistics_is_refused(assert_parity: Parity) -> None:
    layer = nn.InstanceNorm2d(4, track_running_stats=True)
    with pytest.raises(export.ExportError, match="running statistics"):
        assert_parity(
            Branches({"layer": layer}, lambda: nn.Conv2d(3, 4, 1)), {"x": _numbers(3, 3, 4, 3)}
        )
