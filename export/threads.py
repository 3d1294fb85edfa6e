"""Whether a second thread pays: whether a step's products are large beside what it scatters.

onnxruntime's ScatterND that adds races under several threads, so a graph with it runs with one.
ScatterElements adds in one fixed order at any number of threads, and takes 5 to 30 times as long
(0.25 against 0.04 ms for 512 rows of 128). It is the better choice only where it takes little of
the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

LEAST_OPERATIONS = 1e8
"""Of a step's products, about 1 ms of one core: below, threads cost more than they bring."""

OPERATIONS_A_SCATTERED_ELEMENT = 2e4
"""About 200 ns of products for the 4 to 10 ns that ScatterElements takes."""

_ROWS_OF: dict[Any, int] = {
    aten.embedding_dense_backward.default: 0,
    aten.index_add.default: 3,
    aten.index_put.default: 2,
    aten._unsafe_index_put.default: 2,
}


def several_threads_pay(nodes: Iterable[fx.Node]) -> bool:
    """Whether these nodes' products, at the traced sizes, outweigh an order-fixed scatter."""
    operations, scattered = 0.0, 0.0
    for node in nodes:
        if node.op != "call_function":
            continue
        operations += _operations(node)
        place = _ROWS_OF.get(node.target)
        if place is not None:
            scattered += _elements(node.args[place])
    return operations >= max(LEAST_OPERATIONS, OPERATIONS_A_SCATTERED_ELEMENT * scattered)


def _operations(node: fx.Node) -> float:
    """Two for each multiplication and addition of a matrix product or convolution."""
    target: Any = node.target
    if target in (aten.mm.default, aten.bmm.default):
        return 2 * _elements(node) * _sizes(node.args[0])[-1]
    if target in (aten.addmm.default, aten.baddbmm.default):
        return 2 * _elements(node) * _sizes(node.args[1])[-1]
    if target is aten.convolution.default:
        return 2 * _elements(node) * math.prod(_sizes(node.args[1])[1:])
    if target is aten.convolution_backward.default:
        return 4 * _elements(node.args[0]) * math.prod(_sizes(node.args[2])[1:])
    return 0.0


def _elements(node: Any) -> float:
    return float(math.prod(_sizes(node)))


def _sizes(node: Any) -> list[int]:
    value = node.meta["val"] if isinstance(node, fx.Node) else node
    if not isinstance(value, Tensor):
        return [0]
    # A hint says what was traced, and assumes nothing of the axis.
    return [s.node.hint or 1 if isinstance(s, torch.SymInt) else s for s in value.shape]
