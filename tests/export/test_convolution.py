"""Convolutions, compared with torch by the exporter's own verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import export
from benchmarks.device.resnet import ResidualBlock, ResNet
from export.models.images import LeNet

Parity = Callable[..., export.Exported]


def _images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _between(layer: nn.Module, channels: int, inputs: int = 2, rank: int = 2) -> nn.Module:
    """A 1 x 1 convolution in front, so that the layer's input has a gradient too."""
    torch.manual_seed(0)
    front = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank](inputs, channels, 1)
    return nn.Sequential(front, nn.Tanh(), layer)


class SideBySide(nn.Module):
    """Independent branches, each on a crop of the input; a mismatch names the branch."""

    def __init__(self, branches: dict[str, tuple[nn.Module, tuple[int, ...]]]) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: branch for name, (branch, _) in branches.items()})
        self.sizes = {name: sizes for name, (_, sizes) in branches.items()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for name, branch in self.branches.items():
            sizes = self.sizes[name]
            crop = x[:, :, : sizes[0]]
            crop = crop[..., : sizes[1], :] if len(sizes) > 1 else crop[..., 0]
            crop = crop[..., : sizes[2]] if len(sizes) > 2 else crop[..., 0]
            parts.append(branch(crop).flatten(1))
        return torch.cat(parts, 1)


LAYERS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "plain": (lambda: nn.Conv2d(4, 5, 3), 4, (6, 7)),
    "padded": (lambda: nn.Conv2d(4, 5, 3, padding=1), 4, (6, 5)),
    "same_even_kernel": (lambda: nn.Conv2d(3, 4, (4, 2), padding="same"), 3, (5, 6)),
    "strided_with_rest": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), 3, (8, 7)),
    "wide_stride": (lambda: nn.Conv2d(3, 4, 2, stride=3), 3, (9, 7)),
    "dilated": (lambda: nn.Conv2d(3, 4, 3, dilation=2, padding=2), 3, (7, 6)),
    "strided_dilated": (lambda: nn.Conv2d(3, 4, 3, stride=2, dilation=2), 3, (9, 8)),
    "grouped": (lambda: nn.Conv2d(6, 4, 3, groups=2, stride=2, padding=1), 6, (7, 6)),
    "depthwise": (lambda: nn.Conv2d(5, 10, 3, groups=5, padding=1), 5, (6, 6)),
    "pointwise": (lambda: nn.Conv2d(20, 6, 1), 20, (4, 5)),
    "pointwise_strided": (lambda: nn.Conv2d(20, 6, 1, stride=2, bias=False), 20, (5, 5)),
    "many_channels": (lambda: nn.Conv2d(17, 6, (3, 2), padding=(0, 1)), 17, (6, 5)),
    "many_channels_strided": (
        lambda: nn.Conv2d(18, 5, 3, stride=2, padding=1, dilation=(1, 2)), 18, (9, 8),
    ),
    "few_positions": (lambda: nn.Conv2d(96, 80, 3, padding=1), 96, (2, 3)),
    "few_positions_strided": (
        lambda: nn.Conv2d(90, 90, 3, stride=2, padding=1, bias=False), 90, (5, 4),
    ),
    "few_positions_dilated": (
        lambda: nn.Conv2d(90, 90, 3, padding=(2, 4), dilation=(1, 3)), 90, (2, 3),
    ),
    "few_positions_pointwise": (lambda: nn.Conv2d(260, 256, 1), 260, (2, 2)),
    "few_positions_1d": (lambda: nn.Conv1d(96, 140, 5, dilation=2, padding=4), 96, (6,)),
    "sequence": (lambda: nn.Conv1d(3, 4, 5, stride=2, padding=2), 3, (11,)),
    "sequence_grouped": (lambda: nn.Conv1d(4, 8, 3, groups=4, dilation=3), 4, (10,)),
    "volume": (lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=1), 2, (3, 4, 3)),
    "reflected": (
        lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), 3, (5, 5),
    ),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1), 3, (4, 5)),
    "transposed_output_padding": (
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1), 3, (4, 3),
    ),
    "transposed_room_beyond_stride": (
        lambda: nn.ConvTranspose2d(3, 2, 2, dilation=3, output_padding=2), 3, (4, 3),
    ),
    "transposed_grouped": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 1), groups=2, dilation=(1, 2)),
        4, (4, 3),
    ),
    "transposed_many_channels": (lambda: nn.ConvTranspose2d(18, 17, 3, stride=2), 18, (3, 3)),
    "transposed_sequence": (lambda: nn.ConvTranspose1d(3, 4, 4, stride=3, padding=1), 3, (5,)),
}  # fmt: skip


GROUPS = {
    "one axis": [n for n, (_, _, sizes) in LAYERS.items() if len(sizes) == 1],
    "two axes": [n for n, (_, _, s) in LAYERS.items() if len(s) == 2 and "transposed" not in n],
    "two axes, transposed": [
        n for n, (_, _, s) in LAYERS.items() if len(s) == 2 and "transposed" in n
    ],
    "three axes": [n for n, (_, _, sizes) in LAYERS.items() if len(sizes) == 3],
}


@pytest.mark.parametrize("group", GROUPS)
def test_layers_train_as_in_torch(group: str, assert_parity: Parity) -> None:
    branches = {}
    for name in GROUPS[group]:
        make, channels, sizes = LAYERS[name]
        branches[name] = (_between(make(), channels, rank=len(sizes)), sizes)
    assert_parity(SideBySide(branches), {"x": _images(3, 2, 9, 9, 9)})


def test_a_named_spatial_axis(assert_parity: Parity) -> None:
    model = nn.Sequential(
        nn.Conv1d(2, 20, 3, padding=1), nn.Tanh(), nn.Conv1d(20, 4, 3, stride=2, padding=2)
    )

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"]) ** 2).mean()

    assert_parity(
        model, {"x": _images(3, 2, 12)}, loss=loss, dynamic={"x": {0: "batch", 2: "length"}}
    )


def _cross_entropy(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    logits = model(batch["x"])
    return nn.functional.cross_entropy(logits, batch["y"]), {"logits": logits}


@pytest.mark.exhaustive
def test_lenet(assert_parity: Parity) -> None:
    torch.manual_seed(0)
    batch = {"x": _images(4, 1, 28, 28), "y": torch.tensor([1, 0, 9, 3])}
    assert_parity(LeNet(), batch, loss=_cross_entropy, optimizer=export.Adam(lr=1e-3))


def test_a_residual_block_that_changes_shape(assert_parity: Parity) -> None:
    torch.manual_seed(0)
    assert_parity(_between(ResidualBlock(16, 24, 2), 16), {"x": _images(4, 2, 6, 6)})


def test_a_narrow_residual_network(assert_parity: Parity) -> None:
    torch.manual_seed(0)
    batch = {"x": _images(4, 3, 16, 32), "y": torch.tensor([1, 0, 2, 1])}
    exported = assert_parity(
        ResNet(classes=3, width=4, stages=2),
        batch,
        loss=_cross_entropy,
        optimizer=export.Sgd(lr=0.01, momentum=0.9),
    )
    assert {"train.onnx", "infer.onnx"} <= {p.name for p in exported.directory.iterdir()}


@pytest.mark.parametrize("arguments", [{"classes": 1}, {"width": 0}, {"stages": 0}])
def test_a_network_of_no_size_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        ResNet(**arguments)


@st.composite
def _layers(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    small = st.integers(1, 3)
    kernel = (draw(small), draw(small))
    stride = (draw(small), draw(small))
    dilation = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    padding = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
    groups = draw(st.integers(1, 2))
    channels = groups * draw(st.sampled_from([1, 2, 9, 17]))
    outputs = groups * draw(small)
    sizes = (draw(st.integers(3, 8)), draw(st.integers(3, 8)))
    layer: nn.Module
    if draw(st.booleans()):
        extra = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
        layer = nn.ConvTranspose2d(
            channels, outputs, kernel, stride, padding, (extra[0], extra[1]), groups, True, dilation
        )
    else:
        layer = nn.Conv2d(channels, outputs, kernel, stride, padding, dilation, groups)
    try:
        empty = layer(torch.zeros(1, channels, *sizes)).numel() == 0
    except RuntimeError:
        empty = True
    assume(not empty)
    return _between(layer, channels), sizes


@settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(layers=st.lists(_layers(), min_size=8, max_size=8))
def test_random_windows(
    layers: list[tuple[nn.Module, tuple[int, ...]]], assert_parity: Parity
) -> None:
    branches = {f"branch{i}": layer for i, layer in enumerate(layers)}
    assert_parity(SideBySide(branches), {"x": _images(3, 2, 9, 9, 1)})


def test_convolutions_beside_a_write_through_a_view(assert_parity: Parity) -> None:
    """What is recorded twice considers no faster kernel either, which torch takes by the batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, padding=1)
            self.second = nn.Conv2d(8, 8, 3, padding=1, groups=8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            y = torch.zeros_like(h)
            y[:, :4] = h[:, 4:]
            result: torch.Tensor = self.second(y + h).mean((2, 3))
            return result

    assert_parity(Model(), {"x": _images(4, 3, 32, 32)})
