"""Writes into memory: found in a recorded graph, and turned into plain functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

_VIEWS = {
    "view", "reshape", "_unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze",
    "squeeze", "select", "slice", "split", "split_with_sizes", "unbind", "alias", "detach",
    "as_strided", "diagonal", "unfold", "narrow",
}  # fmt: skip


def nodes_behind(ends: set[fx.Node]) -> set[fx.Node]:
    """The nodes that ``ends`` depend on, and ``ends`` themselves."""
    live: set[fx.Node] = set()
    queue = list(ends)
    while queue:
        node = queue.pop()
        if node not in live:
            live.add(node)
            queue.extend(node.all_input_nodes)
    return live


def shared_write(graph: fx.Graph) -> fx.Node | None:
    """The first write that a plain function in its place would get wrong, or None.

    An in-place write shows in every view of the same memory; the recorded graph has no memory. A
    write is right as a plain function only where no other view of it is read afterwards.
    """
    nodes: list[fx.Node] = list(graph.nodes)
    live = nodes_behind({nodes[-1]})
    order = {node: i for i, node in enumerate(nodes)}
    group: dict[fx.Node, int] = {}
    members: dict[int, list[fx.Node]] = {}
    for node in nodes:
        packet = _packet(node)
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        shares = packet in _VIEWS or _is_getitem(node)
        root = group[source] if source is not None and (shares or _writes(node)) else len(group)
        group[node] = root
        members.setdefault(root, []).append(node)
    for node in nodes:
        if node.op == "call_function" and "out" in node.kwargs:
            return node
        if _writes(node) and _read_later(node, members[group[node]], order, live):
            return node
    return None


def without_writes(
    module: fx.GraphModule, entered: Callable[[fx.Node], None], left: Callable[[fx.Node, Any], None]
) -> Callable[..., Sequence[Tensor]]:
    """The recorded graph as a function without in-place writes.

    ``entered`` hears of each node before, ``left`` of the node and its result.
    """

    class Replay(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            entered(n)
            result = super().run_node(n)
            left(n, result)
            return result

    def run(*tensors: Tensor) -> Any:
        return Replay(module).run(*tensors)

    replayed: Callable[..., Sequence[Tensor]] = torch.func.functionalize(run, remove="mutations")
    return replayed


def written_inputs(graph: fx.Graph, names: Sequence[str]) -> list[str]:
    """Which of the inputs a graph from ``without_writes`` writes to (it copies back at the end)."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    written = {node.args[0] for node in graph.nodes if _packet(node) == "copy_"}
    return [name for name, node in zip(names, inputs, strict=True) if node in written]


def _packet(node: fx.Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _writes(node: fx.Node) -> bool:
    packet = _packet(node)
    return node.op == "call_function" and packet.endswith("_") and not packet.startswith("__")


def _read_later(
    write: fx.Node, views: Sequence[fx.Node], order: dict[fx.Node, int], live: set[fx.Node]
) -> bool:
    before = [view for view in views if order[view] < order[write]]
    return any(
        order[user] > order[write] and user in live for view in before for user in view.users
    )
