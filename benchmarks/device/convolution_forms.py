"""`python -m benchmarks.device.convolution_forms`: what decides between a convolution's forms.

Each form of a layer's result and gradients as a graph of its own, on one thread and by turns, in
microseconds of processor time: the lowest. The limits in export/lowering/convolution.py and
export/lowering/channels.py are read off these tables.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper
from tabulate import tabulate

from export.lowering import convolution as forms
from export.lowering.graph import Graph, Value

Form = Callable[[Graph, Value, Value, Value, forms.Window], str]


@dataclass(frozen=True)
class Shape:
    """A square kernel with "same" padding on [batch, channels, height, width]."""

    batch: int
    channels: int
    outputs: int
    height: int
    width: int
    kernel: int
    stride: int = 1
    groups: int = 1

    def __str__(self) -> str:
        kind = "depthwise" if self.depthwise else f"to {self.outputs}"
        kind += f" in {self.groups} groups" if self.groups > 1 else ""
        return (
            f"[{self.batch}, {self.channels}, {self.height}, {self.width}], {self.kernel} x "
            f"{self.kernel} {kind}, stride {self.stride}"
        )

    @property
    def depthwise(self) -> bool:
        return self.outputs == 0


def _back(g: Graph, x: Value, weight: Value, grad: Value, w: forms.Window) -> str:
    left = [
        int(s + 2 * p - k - (int(y) - 1) * step)
        for s, p, k, y, step in zip(
            w.fixed_sizes(), w.padding, w.kernel, w.positions, w.stride, strict=True
        )
    ]
    return forms.transposed_convolution(g, grad, weight, None, w, left)


OWN: dict[str, Form] = {
    "result": lambda g, x, weight, grad, w: g.op("Conv", x, weight, **w.attributes()),
    "input": _back,
    "weight": lambda g, x, weight, grad, w: forms.weight_by_exchange(g, x, grad, weight, w),
}
DEPTHWISE: dict[str, Form] = {
    "result": lambda g, x, weight, grad, w: forms.depthwise(g, x, weight, None, w),
    "input": lambda g, x, weight, grad, w: forms.depthwise_input(g, grad, weight, w),
    "weight": lambda g, x, weight, grad, w: forms.depthwise_weight(g, x, grad, weight, w),
}
DENSE: dict[str, Form] = {
    "weight": lambda g, x, weight, grad, w: forms.weight_tap_by_tap(g, x, grad, weight, w),
}
FEW: dict[str, Form] = {
    "result": lambda g, x, weight, grad, w: forms.by_one_product(g, x, weight, None, w),
    "input": lambda g, x, weight, grad, w: forms.input_by_one_product(g, grad, weight, w),
    "weight": lambda g, x, weight, grad, w: forms.weight_by_one_product(g, x, grad, weight, w),
}
FEW_POSITIONS = 16
SHAPES = (
    Shape(16, 960, 0, 2, 2, 3),
    Shape(16, 576, 0, 4, 4, 3),
    Shape(16, 192, 0, 8, 8, 3),
    Shape(16, 192, 0, 8, 8, 3, 2),
    Shape(8, 160, 0, 4, 4, 7),
    Shape(32, 64, 0, 25, 5, 3),
    Shape(16, 144, 0, 16, 16, 3),
    Shape(16, 144, 0, 16, 16, 3, 2),
    Shape(8, 40, 0, 16, 16, 7),
    Shape(16, 64, 0, 24, 24, 3),
    Shape(16, 32, 0, 32, 32, 3),
    Shape(16, 96, 0, 32, 32, 3, 2),
    Shape(4, 32, 32, 64, 64, 3),
    Shape(4, 64, 64, 32, 32, 3),
    Shape(8, 64, 64, 16, 16, 3),
    Shape(8, 128, 128, 8, 8, 3),
    Shape(8, 256, 256, 4, 4, 3),
    Shape(8, 512, 512, 2, 2, 3),
    Shape(8, 256, 512, 4, 4, 3, 2),
    Shape(8, 128, 32, 4, 4, 3),
    Shape(8, 128, 32, 2, 2, 3),
    Shape(8, 440, 440, 2, 2, 3, groups=55),
    Shape(8, 208, 208, 4, 4, 3, groups=26),
    Shape(16, 144, 24, 16, 16, 1),
    Shape(16, 16, 96, 32, 32, 1),
)


def call_of(shape: Shape, form: Form) -> Callable[[], object]:
    """A call that runs one form of the shape."""
    pad = shape.kernel // 2
    after = [(s + 2 * pad - shape.kernel) // shape.stride + 1 for s in (shape.height, shape.width)]
    outputs = shape.outputs or shape.channels
    groups = shape.channels if shape.depthwise else shape.groups
    sizes = {
        "x": [shape.batch, shape.channels, shape.height, shape.width],
        "weight": [outputs, shape.channels // groups, shape.kernel, shape.kernel],
        "grad": [shape.batch, outputs, *after],
    }
    values = {name: Value(name, torch.float32, tuple(size)) for name, size in sizes.items()}
    settings = {"stride": [shape.stride], "padding": [pad], "dilation": [1], "groups": groups}
    w = forms.window_between(sizes["x"][2:], after, values["weight"], settings)
    g = Graph()
    result = form(g, values["x"], values["weight"], values["grad"], w)
    g.rename_outputs({"result": result})
    used = {name for node in g.nodes for name in node.input}
    kept = {name: size for name, size in sizes.items() if name in used}
    ports = [helper.make_tensor_value_info(k, TensorProto.FLOAT, v) for k, v in kept.items()]
    end = helper.make_tensor_value_info("result", TensorProto.FLOAT, None)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        g.model("form", ports, [end], metadata={}).SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )
    random = np.random.default_rng(0)
    arrays = {k: random.standard_normal(v).astype(np.float32) for k, v in kept.items()}
    return lambda: session.run(None, arrays)


def lowest(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """Microseconds of processor time a call, the lowest of many turns."""
    found: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found[0]) < 5:
        for call, times in zip(calls, found, strict=True):
            start = time.thread_time()
            call()
            times.append((time.thread_time() - start) * 1e6)
    return [min(times) for times in found]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="timing a form (default: 0.5)")
    arguments = parser.parse_args()
    rows = []
    for shape in SHAPES:
        few = shape.height * shape.width // shape.stride**2 <= FEW_POSITIONS
        ours = DEPTHWISE if shape.depthwise else FEW if few else DENSE
        for what, form in ours.items():
            pair = [call_of(shape, each) for each in (OWN[what], form)]
            own, mine = lowest(pair, arguments.seconds)
            rows.append([str(shape), what, round(own), round(mine), f"{own / mine:.1f}"])
    headers = ["layer", "what", "as a Conv, us", "as products, us", "times"]
    print(tabulate(rows, headers=headers, disable_numparse=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
