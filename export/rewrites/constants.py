"""Values that are known while a step is recorded: what is made of constants alone.

Those are tensors that the model holds beside its state, those that the loss makes of numbers, and
state that a step leaves as it is. Code may branch on them, count by them and list them as it does
in torch. Where state comes in, a device that holds another value refuses the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from export.insides import (
    OpOverload,
    disable_current_modes,
    get_proxy_mode,
    get_proxy_slot,
    is_fake,
    maybe_get_fake_mode,
    tree_leaves,
)
from export.mutation import live_nodes
from export.sizes import Sizes


def value_of(tensor: Tensor) -> Tensor | None:
    """A recorded tensor's value, or None where only a step knows it."""
    if not is_fake(tensor):
        return tensor
    mode: Any = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    sizes = getattr(maybe_get_fake_mode(tensor), "shape_env", None)
    if slot is None or mode is None or not isinstance(sizes, Sizes):
        return None
    node = slot.proxy.node
    needed = _deciding(node)
    placed = [each for each in node.graph.nodes if each.op == "placeholder"]
    held = {each: sizes.held[n] for n, each in enumerate(placed) if n in sizes.held}
    if not all(each in held or _is_of_constants(each) for each in needed):
        return None
    value: Tensor = _computed(node, needed, held, mode.tracer.root)
    if held.keys() & needed:
        if value.is_floating_point() and bool(value.isnan().any()):
            return None
        same = (tensor == value).all().item()
        if isinstance(same, torch.SymBool):  # else it is noted already
            sizes.needed.update({symbol - 1: None for symbol in same.node.expr.free_symbols})
    return value


def _is_of_constants(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return node.op == "call_function" and getattr(target, "__name__", "") == "getitem"
    leaves = tree_leaves(node.meta.get("val"))
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not random and all(isinstance(each, Tensor) for each in leaves)


def _deciding(node: fx.Node) -> set[fx.Node]:
    """The nodes that a value is made of, with all that was written into the memory of one of them.

    Views lie in one memory, so a write into anything that is made of the same nodes counts.
    """
    needed = live_nodes({node})
    writes = {each: into for each in node.graph.nodes if (into := _written(each))}
    while found := [each for each, into in writes.items() if live_nodes(into) & needed]:
        for each in found:
            del writes[each]
            needed |= live_nodes({each})
    return needed


def _written(node: fx.Node) -> set[fx.Node]:
    """The tensors that an operator writes into."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    pairs = zip(schema.arguments, node.args, strict=False)
    return {
        given
        for argument, given in pairs
        if isinstance(given, fx.Node) and argument.alias_info is not None
    }


def _computed(node: fx.Node, needed: set[fx.Node], held: dict[fx.Node, Tensor], root: Any) -> Any:
    found: dict[fx.Node, Any] = {}
    with disable_current_modes(), torch.no_grad():
        for each in (one for one in node.graph.nodes if one in needed):
            if each in held:
                found[each] = held[each]
            elif each.op == "get_attr":
                found[each] = getattr(root, str(each.target)).clone()
            else:
                args, kwargs = fx.map_arg((each.args, dict(each.kwargs)), found.__getitem__)
                found[each] = each.target(*args, **kwargs)
    return found[node]
