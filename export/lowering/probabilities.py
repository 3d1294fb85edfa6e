"""Sigmoids that are read as probabilities, exact where they are small.

onnxruntime's Sigmoid is exact to 6e-8 absolutely: that of -16 is half too small, that of -20 is 0.
To a gate this is nothing; a logarithm of it, a cross-entropy say, would be -inf, and teach nothing
where a model is most wrong. 1 / (1 + exp(-x)) is exact to a few roundings at every x, and takes
four passes in place of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from export.lowering.graph import Graph, Value

# What leaves a probability one, or at least a small number small.
_PASSED_ON = {
    "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "select", "slice", "expand", "t",
    "permute", "transpose", "clone", "cat", "stack", "index", "index_select", "gather", "clamp",
    "clamp_min", "clamp_max", "maximum", "minimum", "add", "sub", "rsub", "mul", "div", "neg",
    "where", "_to_copy", "detach", "alias", "unbind", "split", "split_with_sizes", "getitem",
}  # fmt: skip
_READ = {"log", "log2", "log10", "log1p", "binary_cross_entropy", "output"}


def probabilities(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The sigmoids among these nodes whose elements reach a logarithm or a result of the graph."""
    return {node for node in nodes if _name(node).rstrip("_") == "sigmoid" and _is_read(node)}


def sigmoid(g: Graph, out: torch.Tensor, a: Value) -> str:
    """1 / (1 + exp(-x)), elementwise."""
    below = g.op("Exp", g.op("Neg", g.cast(a, out.dtype)))
    return g.op("Reciprocal", g.op("Add", below, g.scalar(1, out.dtype)))


def _is_read(node: fx.Node) -> bool:
    queue, seen = list(node.users), {node}
    while queue:
        user = queue.pop()
        name = _name(user)
        if name in _READ:
            return True
        if name in _PASSED_ON and user not in seen:
            seen.add(user)
            queue += user.users
    return False


def _name(node: fx.Node) -> str:
    target: Any = node.target
    packet = getattr(target, "overloadpacket", target)
    return getattr(packet, "__name__", str(packet))
