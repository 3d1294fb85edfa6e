"""Operators of the exporter's own, each declared once: what it computes, its shapes, its lowering.

A recorded step holds such an operator whole. Where what it gives is to be differentiated, its
definition is recorded instead, operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from onnx import helper
from torch import Tensor

from export.insides import (
    enable_python_dispatcher,
    make_fx,
    maybe_get_fake_mode,
    use_lazy_graph_module,
)
from export.lowering.decompositions import decompositions
from export.lowering.graph import ONNX_DTYPE, Graph, Value
from export.lowering.registry import lowers
from export.lowering.walk import Walk
from export.mutation import nodes_behind
from export.symbols import fixed

_Definition = TypeVar("_Definition", bound=Callable[..., Any])


def opaque(
    *, fake: Callable[..., Any], lowering: Callable[..., Any], drawn: bool = False
) -> Callable[[_Definition], _Definition]:
    """Makes an operator of a definition in torch.

    ``fake``: of its arguments, tensors of the results' shapes; ``lowering``: as ``registry.lowers``
    takes one; ``drawn``: the definition is no arithmetic of torch's, so it is never recorded.
    """

    def made(definition: _Definition) -> _Definition:
        name = definition.__name__
        operator: Any = torch.library.custom_op(f"tessera::{name}", definition, mutates_args=())
        operator.register_fake(fake)
        lowers(getattr(torch.ops.tessera, name).default)(lowering)

        @wraps(definition)
        def called(*given: Any, **named: Any) -> Any:
            plain = torch.is_grad_enabled() and not drawn
            return (definition if plain else operator)(*given, **named)

        return cast(_Definition, called)

    return made


Tensors = Sequence[Tensor]
Step = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]
"""``step(states, parts, held)``: the new states, and this step's part of each result.

``parts`` are this step's of each sequence, ``held`` what all steps have in common.
"""

_STEPS: dict[str, Step] = {}


def scanned(step: Step) -> Callable[[Tensors, Tensors, Tensors, bool], tuple[Tensors, Tensors]]:
    """Runs a step along axis 0 of sequences [T, ...], from the last to the first if ``backwards``.

    ``run(states, sequences, held, backwards)`` gives the last states and the results of all steps
    [T, ...], each at its own step. The step is written in torch, of operators that have a lowering;
    a graph has it as the body of one ``Scan``.
    """
    _STEPS[step.__name__] = step

    def run(
        states: Tensors, sequences: Tensors, held: Tensors, backwards: bool
    ) -> tuple[Tensors, Tensors]:
        found = scan(step.__name__, [*states], [*sequences], [*held], backwards)
        return found[: len(states)], found[len(states) :]

    return run


def _of_scan(
    kind: str, states: list[Tensor], sequences: list[Tensor], held: list[Tensor], backwards: bool
) -> list[Tensor]:
    parts = [each.new_empty(each.shape[1:]) for each in sequences]
    new, results = _STEPS[kind](states, parts, held)
    steps = sequences[0].shape[0]
    sized = [[*each.shape] for each in new] + [[steps, *each.shape] for each in results]
    return [like.new_empty(size) for like, size in zip((*new, *results), sized, strict=True)]


def _lower_scan(
    g: Graph, out: Any, kind: str, states: Sequence[Value], sequences: Sequence[Value],
    held: Sequence[Value], backwards: bool,
) -> list[str]:  # fmt: skip
    """One ``Scan``, whose body reads what is held from the graph around it."""
    child = g.child()
    given = [
        *(Value(child.name("state"), v.dtype, v.shape) for v in states),
        *(Value(child.name("part"), v.dtype, v.shape[1:]) for v in sequences),
    ]
    cut = len(states), len(given)

    def body(*tensors: Tensor) -> list[Tensor]:
        own = tensors[: cut[0]], tensors[cut[0] : cut[1]], tensors[cut[1] :]
        return [each for part in _STEPS[kind](*own) for each in part]

    mode: Any = maybe_get_fake_mode(out[0])
    recording = make_fx(
        body,
        decomposition_table=decompositions(),
        tracing_mode="real",
        _disable_torch_fn_metadata_mode=True,
    )
    with mode, enable_python_dispatcher(), torch.no_grad(), use_lazy_graph_module(True):
        recorded = recording(*(torch.empty(v.shape, dtype=v.dtype) for v in (*given, *held)))
    nodes = list(recorded.graph.nodes)
    ends = nodes[-1].args[0]
    walk = Walk(recorded, child, dict(zip(nodes, (*given, *held), strict=False)))
    values = walk.lower(nodes_behind(set(ends)))
    names: list[str] = []
    for end in ends:
        # A body's outputs are distinct names.
        name = values[end].name
        names.append(child.op("Identity", name) if name in names else name)
    infos = [
        helper.make_tensor_value_info(name, ONNX_DTYPE[values[end].dtype], None)
        for name, end in zip(names, ends, strict=True)
    ]
    inputs = [
        helper.make_tensor_value_info(v.name, ONNX_DTYPE[v.dtype], [fixed(n) for n in v.shape])
        for v in given
    ]
    directions = [int(backwards)]
    return list(
        g.multi(
            "Scan",
            *states,
            *sequences,
            outputs=len(names),
            body=child.body("steps", inputs, infos),
            num_scan_inputs=len(sequences),
            scan_input_directions=directions * len(sequences),
            scan_output_directions=directions * (len(names) - len(states)),
        )
    )


@opaque(fake=_of_scan, lowering=_lower_scan)
def scan(
    kind: str, states: list[Tensor], sequences: list[Tensor], held: list[Tensor], backwards: bool
) -> list[Tensor]:
    """As ``scanned`` says, of the step by this name."""
    found: list[Tensors] = []
    steps = range(sequences[0].shape[0])
    for t in reversed(steps) if backwards else steps:
        new, results = _STEPS[kind](states, [each[t] for each in sequences], held)
        states = list(new)
        found.append(results)
    ordered = found[::-1] if backwards else found
    return [
        *(each.clone() for each in states),
        *(torch.stack(each) for each in zip(*ordered, strict=True)),
    ]
