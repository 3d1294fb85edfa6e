"""The forms that a convolution is lowered to, each beside torch in float64, and channels first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, shape_inference
from torch import nn

import export
from export.lowering.convolution import convolution, convolution_backward
from export.lowering.graph import Graph, Value

Parity = Callable[..., export.Exported]
ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Max", "Min", "Where", "Less", "Greater", "Pow"}


@dataclass(frozen=True)
class Layer:
    """A convolution's sizes: plain, grouped, depthwise, with or without several outputs each."""

    batch: int
    channels: int
    outputs: int
    groups: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    sizes: tuple[int, ...]
    transposed: bool = False

    def settings(self) -> dict[str, Any]:
        """In the order of torch's operators."""
        return {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "transposed": self.transposed,
            "output_padding": [0] * len(self.kernel),
            "groups": self.groups,
        }


def errors(layer: Layer) -> dict[str, float]:
    """Relative L2 errors of the result and of each gradient, against float64 torch."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    x = draw(layer.batch, layer.channels, *layer.sizes)
    pair = (layer.outputs, layer.channels // layer.groups)
    if layer.transposed:
        pair = (layer.channels, layer.outputs // layer.groups)
    weight, bias = draw(*pair, *layer.kernel), draw(layer.outputs)
    settings = layer.settings()
    y = torch.ops.aten.convolution(x, weight, bias, *settings.values())
    grad = draw(*y.shape)
    wanted = [True] * 3
    found = torch.ops.aten.convolution_backward(
        grad, x, weight, [layer.outputs], *settings.values(), wanted
    )
    given = {"x": x, "weight": weight, "bias": bias, "grad": grad}
    values = {k: Value(k, torch.float32, tuple(v.shape)) for k, v in given.items()}
    g = Graph()
    result = Value("", torch.float32, tuple(y.shape))
    a, b, c, d = values["x"], values["weight"], values["bias"], values["grad"]
    names = [
        convolution(g, result, a, b, c, settings=settings),
        *convolution_backward(g, d, a, b, settings={**settings, "output_mask": wanted}),
    ]
    labels = ["result", "gradient of input", "gradient of weight", "gradient of bias"]
    ends = dict(zip(labels, names, strict=True))
    g.rename_outputs({name: str(value) for name, value in ends.items()})
    model = g.model(
        "layer",
        [
            helper.make_tensor_value_info(
                k, TensorProto.FLOAT, [f"n_{k}" if k in ("x", "grad") else v.shape[0], *v.shape[1:]]
            )
            for k, v in given.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in labels],
        metadata={},
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    got = session.run(None, {k: v.float().numpy() for k, v in given.items()})
    wanted_values = [value.numpy() for value in (y, *found)]
    return {
        name: float(np.linalg.norm(have - want) / max(np.linalg.norm(want), 1e-9))
        if have.shape == want.shape
        else np.inf
        for name, have, want in zip(labels, got, wanted_values, strict=True)
    }


SHAPES = {
    "whole image": Layer(2, 6, 6, 6, (3, 3), (1, 1), (1, 1), (1, 1), (4, 5)),
    "whole image, strided": Layer(2, 6, 6, 6, (5, 3), (2, 2), (2, 1), (1, 1), (8, 7)),
    "rows": Layer(2, 6, 6, 6, (3, 3), (1, 1), (1, 1), (1, 1), (25, 5)),
    "rows, strided": Layer(2, 6, 6, 6, (3, 3), (2, 2), (1, 1), (1, 1), (17, 16)),
    "rows, strided with a rest": Layer(1, 4, 4, 4, (7, 3), (3, 2), (3, 0), (1, 1), (20, 15)),
    "rows, dilated": Layer(2, 4, 4, 4, (3, 5), (2, 1), (4, 2), (2, 1), (19, 16)),
    "rows, more padding than reach": Layer(2, 4, 4, 4, (2, 2), (1, 1), (2, 2), (1, 1), (20, 14)),
    "one row of weights": Layer(2, 4, 4, 4, (1, 5), (2, 1), (0, 2), (1, 1), (33, 9)),
    "one weight": Layer(3, 4, 4, 4, (1, 1), (2, 2), (0, 0), (1, 1), (18, 18)),
    "wide rows": Layer(2, 4, 4, 4, (3, 3), (1, 1), (1, 1), (1, 1), (9, 40)),
    "rows too wide": Layer(1, 2, 2, 2, (3, 3), (2, 1), (1, 1), (1, 1), (5, 70)),
    "sequence": Layer(2, 4, 4, 4, (5,), (1,), (2,), (1,), (30,)),
    "volume": Layer(2, 4, 4, 4, (3, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 1), (3, 4, 3)),
    "transposed depthwise": Layer(2, 4, 4, 4, (3, 3), (2, 2), (1, 1), (1, 1), (9, 8), True),
    "two outputs each": Layer(2, 4, 8, 4, (3, 3), (1, 1), (1, 1), (1, 1), (8, 8)),
    "one tap, few positions": Layer(2, 20, 6, 1, (1, 1), (1, 1), (0, 0), (1, 1), (4, 4)),
    "one tap, many positions": Layer(2, 20, 6, 1, (1, 1), (1, 1), (0, 0), (1, 1), (20, 20)),
    "one tap, strided": Layer(2, 20, 6, 1, (1, 1), (2, 2), (0, 0), (1, 1), (9, 8)),
    "groups, few positions": Layer(3, 12, 8, 4, (3, 3), (1, 1), (1, 1), (1, 1), (2, 2)),
    "groups, few positions, strided": Layer(2, 6, 9, 3, (3, 2), (2, 1), (1, 0), (1, 1), (3, 3)),
    "groups, more positions": Layer(3, 6, 4, 2, (3, 3), (1, 1), (1, 1), (1, 1), (4, 4)),
    "groups, one tap": Layer(2, 6, 4, 2, (1, 1), (1, 1), (0, 0), (1, 1), (2, 2)),
    "groups, sequence": Layer(2, 6, 4, 2, (3,), (2,), (1,), (2,), (8,)),
    "many weights, 3 x 3": Layer(2, 96, 80, 1, (3, 3), (1, 1), (1, 1), (1, 1), (3, 3)),
    "many weights, 4 x 4": Layer(2, 96, 80, 1, (3, 3), (2, 2), (1, 1), (1, 1), (8, 7)),
    "many weights, dilated": Layer(2, 160, 150, 1, (3,), (2,), (2,), (2,), (9,)),
    "many channels": Layer(2, 18, 5, 1, (3, 2), (1, 2), (1, 0), (1, 2), (12, 11)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_form_is_torchs(shape: str) -> None:
    found = errors(SHAPES[shape])
    assert max(found.values()) < 2e-6, found


@st.composite
def _layers(draw: st.DrawFn) -> Layer:
    rank = draw(st.sampled_from([1, 2, 2, 2]))

    def each(values: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(values) for _ in range(rank))

    kernel = each(st.sampled_from([1, 2, 3, 5, 7]))
    groups = draw(st.sampled_from([1, 2, 4]))
    channels = groups * draw(st.sampled_from([1, 1, 2, 9]))
    outputs = groups * draw(st.sampled_from([1, 1, 2, 3]))
    layer = Layer(
        draw(st.integers(1, 3)), channels, outputs, groups, kernel, each(st.integers(1, 3)),
        tuple(draw(st.integers(0, size)) for size in kernel), each(st.integers(1, 2)),
        each(st.sampled_from([1, 2, 4, 7, 8, 16, 17, 20, 33])),
    )  # fmt: skip
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, layer.dilation, strict=True)]
    room = [s + 2 * p for s, p in zip(layer.sizes, layer.padding, strict=True)]
    assume(all(r >= k for r, k in zip(room, reach, strict=True)))
    return layer


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(layer=_layers())
def test_any_form_is_torchs(layer: Layer) -> None:
    found = errors(layer)
    assert max(found.values()) < 5e-6, (layer, found)


class Mobile(nn.Module):
    """An inverted residual with squeeze and excitation, a dense join, and a classifier."""

    def __init__(self, channels: int = 4, wide: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, channels, 1)
        self.grow = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()
        )
        self.each = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
        )
        self.squeeze, self.excite = nn.Conv2d(wide, 2, 1), nn.Conv2d(2, wide, 1)
        self.shrink = nn.Sequential(nn.Conv2d(wide, channels, 1), nn.BatchNorm2d(channels))
        self.out = nn.Linear(channels + wide, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        wide = self.each(self.grow(x))
        share = self.excite(torch.relu(self.squeeze(wide.mean((2, 3), keepdim=True))))
        wide = wide * torch.sigmoid(share)
        y = torch.cat([x + self.shrink(wide), wide], 1)
        first, second = y[:, :5], y[:, 5:]
        result: torch.Tensor = self.out(torch.cat([second, first], 1).mean((2, 3)))
        return result


def _elementwise(directory: Any) -> list[tuple[str, list[list[int | str]]]]:
    """Operator and input shapes of each elementwise node of the train graph."""
    model = shape_inference.infer_shapes(onnx.load(directory / "train.onnx"), data_prop=True)
    shapes: dict[str, list[int | str]] = {
        info.name: [d.dim_value or d.dim_param for d in info.type.tensor_type.shape.dim]
        for info in (*model.graph.value_info, *model.graph.input)
    }
    shapes.update({t.name: list(t.dims) for t in model.graph.initializer})
    return [
        (node.op_type, [shapes[name] for name in node.input if name in shapes])
        for node in model.graph.node
        if node.op_type in ELEMENTWISE
    ]


def test_small_images_stay_channels_first(assert_parity: Parity) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 4, 5, 4, generator=torch.Generator().manual_seed(1))}
    exported = assert_parity(Mobile(), batch, optimizer=export.Adam(lr=1e-3))
    model = onnx.load(exported.directory / "train.onnx")
    operators = [node.op_type for node in model.graph.node]
    assert not {"Conv", "ConvTranspose"} & set(operators)
    orders = [list(n.attribute[0].ints) for n in model.graph.node if n.op_type == "Transpose"]
    # The images on their way in, and the share of each channel beside them.
    assert orders.count([1, 0, 2, 3]) <= 2, orders


def test_numbers_are_as_wide_as_what_they_meet(assert_parity: Parity) -> None:
    # onnxruntime takes [..., 1, 1] beside a 0-d number element by element, 90 times slower.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(260, 256, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    batch = {"x": torch.randn(2, 260, 2, 2, generator=torch.Generator().manual_seed(1))}
    exported = assert_parity(model, batch, optimizer=export.Adam(lr=1e-3, weight_decay=0.1))
    met = 0
    for operator, inputs in _elementwise(exported.directory):
        widest = max(inputs, key=len)
        if len(widest) > 1 and widest[-1] == 1:
            met += 1
            assert all(inputs), f"{operator} of {inputs}"
    assert met > 5, "the weight's updates are not among the nodes that were looked at"
