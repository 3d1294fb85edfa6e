"""Pooling, compared with torch by the exporter's own verification."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import export
from tests.export.recorded import assert_as_torch, recorded

_RANKS = st.sampled_from([1, 2, 2, 3])

Parity = Callable[..., export.Exported]


def _images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _after_convolution(
    layer: nn.Module, rank: int = 2, middle: nn.Module | None = None
) -> nn.Module:
    torch.manual_seed(0)
    front = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank](2, 3, 1)
    return nn.Sequential(front, middle or nn.Tanh(), layer)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "max": (lambda: nn.MaxPool2d(2), (6, 8)),
    "max_with_rest": (lambda: nn.MaxPool2d(2), (7, 5)),
    "max_overlapping": (lambda: nn.MaxPool2d(3, 2, 1), (8, 7)),
    "max_every_position": (lambda: nn.MaxPool2d(3, 1, 1), (5, 4)),
    "max_apart": (lambda: nn.MaxPool2d(2, 3), (8, 8)),
    "max_ceil": (lambda: nn.MaxPool2d(3, 2, ceil_mode=True), (6, 8)),
    "max_ceil_padded": (lambda: nn.MaxPool2d(2, 2, 1, ceil_mode=True), (5, 6)),
    "max_dilated": (lambda: nn.MaxPool2d(2, 2, dilation=2), (8, 7)),
    "max_sequence": (lambda: nn.MaxPool1d(3, 2), (9,)),
    "max_volume": (lambda: nn.MaxPool3d(2), (4, 4, 5)),
    "average": (lambda: nn.AvgPool2d(2), (6, 8)),
    "average_with_rest": (lambda: nn.AvgPool2d(3), (7, 8)),
    "average_overlapping": (lambda: nn.AvgPool2d(3, 2, 1), (7, 8)),
    "average_real_elements": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), (7, 8)),
    "average_ceil": (lambda: nn.AvgPool2d(3, 2, ceil_mode=True), (6, 8)),
    "average_ceil_padded": (lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True), (6, 7)),
    "average_ceil_real": (
        lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (6, 7),
    ),
    "average_divisor": (lambda: nn.AvgPool2d(2, divisor_override=3), (4, 6)),
    "average_apart": (lambda: nn.AvgPool2d(2, 3), (8, 7)),
    "average_sequence": (lambda: nn.AvgPool1d(3, 2, 1), (8,)),
    "average_volume": (lambda: nn.AvgPool3d(2, 1), (3, 4, 3)),
    "adaptive_average_even": (lambda: nn.AdaptiveAvgPool2d((2, 4)), (6, 8)),
    "adaptive_average_uneven": (lambda: nn.AdaptiveAvgPool2d((3, 2)), (7, 5)),
    "adaptive_average_larger": (lambda: nn.AdaptiveAvgPool2d((3, 7)), (2, 5)),
    "adaptive_average_one": (lambda: nn.AdaptiveAvgPool2d(1), (4, 5)),
    "adaptive_average_sequence": (lambda: nn.AdaptiveAvgPool1d(4), (10,)),
    "adaptive_average_volume": (lambda: nn.AdaptiveAvgPool3d((2, 3, 2)), (5, 3, 4)),
    "adaptive_max_even": (lambda: nn.AdaptiveMaxPool2d((2, 3)), (6, 6)),
    "adaptive_max_uneven": (lambda: nn.AdaptiveMaxPool2d((3, 3)), (8, 7)),
    "adaptive_max_larger": (lambda: nn.AdaptiveMaxPool2d((3, 7)), (2, 5)),
    "adaptive_max_sequence": (lambda: nn.AdaptiveMaxPool1d(4), (10,)),
    "adaptive_max_volume": (lambda: nn.AdaptiveMaxPool3d((2, 3, 2)), (5, 3, 4)),
}  # fmt: skip


class Cropped(nn.Module):
    """A layer on the first places along each axis of a volume, and on as many axes as it takes."""

    def __init__(self, layer: nn.Module, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = _after_convolution(layer, len(sizes))
        self._sizes = sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = (*map(slice, self._sizes), *[0] * (3 - len(self._sizes)))
        found: torch.Tensor = self.layer(x[:, :, *places])
        return found


@pytest.mark.parametrize("kind", ["max", "average", "adaptive"])
def test_layers_train_as_in_torch(kind: str, assert_parity_of_each: Parity) -> None:
    chosen = {name: each for name, each in LAYERS.items() if name.startswith(kind)}
    models = {name: Cropped(make(), sizes) for name, (make, sizes) in chosen.items()}
    assert_parity_of_each(models, {"x": _images(3, 2, 10, 8, 5)})


@pytest.mark.parametrize("layer", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1)])
def test_a_tie_gives_its_gradient_to_torchs_choice(layer: nn.Module, assert_parity: Parity) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Unflatten(1, (1, 8, 8)), layer)
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(64))
        model[1].bias.fill_(1.0)
    # Whole numbers keep ties exact in float32 and float64; after the linear layer they stay whole.
    x = torch.randint(0, 2, (3, 1, 8, 8), generator=torch.Generator().manual_seed(2)).float()
    assert_parity(model, {"x": x}, optimizer=export.Sgd(lr=0.0))


def test_a_window_of_minus_infinity_alone_is_minus_infinity() -> None:
    def pooled(x: torch.Tensor) -> list[torch.Tensor]:
        least = torch.where(x > 1, x, torch.finfo(torch.float32).min)
        layers = (nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2), nn.MaxPool2d((1, 3), 1))
        flat = (nn.MaxPool1d(2)(x[:, 0]), nn.AdaptiveMaxPool1d(10)(x[:, 0, 0]))
        return [layer(each) for layer in layers for each in (x, least)] + list(flat)

    x = torch.randn(7, 2, 20, 20, generator=torch.Generator().manual_seed(4))
    masked = torch.where(x > 1.2, x, -torch.inf)
    masked[:, :, :9] = -torch.inf
    with torch.no_grad():
        assert all(bool(each.isinf().any()) for each in pooled(masked)[::2])
    assert_as_torch(pooled, lambda n: (masked[:n],))


def test_ties_and_places_of_adaptive_maxima() -> None:
    """Windows that overlap, repeat and differ in size: the first of the largest, as in torch."""
    two = torch.nn.functional.adaptive_max_pool2d
    three = torch.nn.functional.adaptive_max_pool3d

    def pooled(x: torch.Tensor) -> list[torch.Tensor]:
        x = torch.cat([x, x - 2 * x.abs()], 1)
        found = [two(x, wanted, return_indices=True) for wanted in ((3, 3), (2, 5), (9, 1))]
        deep = [three(x.unsqueeze(2), (2, 3, 5)), two(x[:, 0], (3, 2))]
        deep.append(three(x, (3, 3, 5)))
        return [*deep, *(each * (1 + place) for each, place in found)]

    random = torch.Generator().manual_seed(3)
    assert_as_torch(
        pooled, lambda n: (torch.randint(-1, 2, (n, 2, 8, 7), generator=random).float(),)
    )


def test_adaptive_pooling_of_free_sizes() -> None:
    f, random = torch.nn.functional, torch.Generator().manual_seed(3)

    def pooled(x: torch.Tensor) -> list[torch.Tensor]:
        masked = torch.where(x < 0, -torch.inf, x)
        largest, place = f.adaptive_max_pool2d(x, (3, None), return_indices=True)
        return [
            nn.AdaptiveAvgPool2d((3, 4))(torch.max_pool2d(x, 2)),
            f.adaptive_avg_pool1d(x[0], 3),
            f.adaptive_avg_pool3d(x, (3, 2, None)),
            f.adaptive_max_pool3d(masked, (1, 2, 3)),
            largest * (1 + place),
        ]

    def make(n: int) -> tuple[torch.Tensor]:
        return (torch.randint(-1, 3, (2, 3, n, 2 * n + 3), generator=random).float(),)

    assert_as_torch(pooled, make, sizes=(2, 7, 12))


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_random_windows(data: st.DataObject, assert_parity: Parity) -> None:
    sizes = (data.draw(st.integers(4, 8)), data.draw(st.integers(4, 8)))
    kernel = (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    stride = (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    ceil = data.draw(st.booleans())
    layer: nn.Module
    if data.draw(st.booleans()):
        layer = nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil)
    else:
        counted = data.draw(st.booleans())
        layer = nn.AvgPool2d(kernel, stride, padding, ceil_mode=ceil, count_include_pad=counted)
    assert_parity(_after_convolution(layer), {"x": _images(3, 2, *sizes)})


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_ties_of_large_images_go_where_torch_sends_them(data: st.DataObject) -> None:
    sizes = [data.draw(st.sampled_from([1, 7, 16, 17, 20])) for _ in range(data.draw(_RANKS))]
    kernel = [data.draw(st.integers(1, min(5, size))) for size in sizes]
    stride = [data.draw(st.integers(1, 4)) for _ in sizes]
    padding = [data.draw(st.integers(0, k // 2)) for k in kernel]
    dilation = [data.draw(st.integers(1, 2)) if 2 * k - 1 <= s else 1
                for k, s in zip(kernel, sizes, strict=True)]  # fmt: skip
    ceil = data.draw(st.booleans())
    pool = [torch.max_pool1d, torch.max_pool2d, torch.max_pool3d][len(sizes) - 1]

    def pooled(x: torch.Tensor) -> torch.Tensor:
        # Of a batch as it stands the maximum might be of -inf.
        return pool(torch.relu(x) - 2, kernel, stride, padding, dilation, ceil)

    random = torch.Generator().manual_seed(3)
    assert_as_torch(
        pooled, lambda n: (torch.randint(1, 4, (n, 2, *sizes), generator=random).float(),)
    )


def test_indices_that_nothing_needs_are_not_searched_for() -> None:
    def pooled(x: torch.Tensor) -> torch.Tensor:
        return torch.max_pool2d(x, 2)

    model, _ = recorded(pooled, lambda n: (torch.rand(n, 2, 32, 32),))
    assert [len(node.output) for node in model.graph.node if node.op_type == "MaxPool"] == [1]


def test_a_mean_over_images_whose_channels_come_last() -> None:
    def pooled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        mean = torch.nn.functional.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 1)
        return torch.flatten(mean, 1) @ weight

    assert_as_torch(pooled, lambda n: (torch.ones(n, 8, 8, 6) * 0.5, torch.ones(6, 4) * 0.1))
