"""The scans of recurrent layers as ONNX ``Scan`` with as few nodes in the body as can be.

Weights come from the outer graph. Each function states its body's nodes in order; the equations
are those of ``export.rewrites.recurrent_scans``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import torch
from onnx import helper

import export.rewrites.recurrent_scans  # noqa: F401  (defines torch.ops.tessera)
from export.lowering.graph import ONNX_DTYPE, Graph, Value, fixed
from export.lowering.indexing import slice_axis
from export.lowering.registry import lowers
from export.rewrites.ctc import NEVER

tessera = torch.ops.tessera

# A body gets the child graph, the states and one step of each sequence, and gives the new states
# and one step of each result.
Body = Callable[[Graph, list[str], list[str]], tuple[list[str], list[str]]]


def scan(
    g: Graph,
    states: Sequence[Value],
    sequences: Sequence[Value],
    body: Body,
    *,
    reverse: bool,
) -> tuple[list[str], list[str]]:
    """Runs ``body`` along axis 0 of the sequences; last states and the results of all steps."""
    child = g.child()
    state_names = [child.name("state") for _ in states]
    step_names = [child.name("step") for _ in sequences]
    new_states, results = body(child, state_names, step_names)
    dtype = ONNX_DTYPE[states[0].dtype]
    inputs = [
        *(_info(n, v.dtype, v.shape) for n, v in zip(state_names, states, strict=True)),
        *(_info(n, v.dtype, v.shape[1:]) for n, v in zip(step_names, sequences, strict=True)),
    ]
    ends: list[str] = []
    for name in [*new_states, *results]:
        # A body's outputs are distinct names.
        ends.append(child.op("Identity", name) if name in ends else name)
    infos = [helper.make_tensor_value_info(name, dtype, None) for name in ends]
    directions = [int(reverse)]
    found = g.multi(
        "Scan",
        *states,
        *sequences,
        outputs=len(ends),
        body=child.body("steps", inputs, infos),
        num_scan_inputs=len(sequences),
        scan_input_directions=directions * len(sequences),
        scan_output_directions=directions * len(results),
    )
    return list(found[: len(states)]), list(found[len(states) :])


def _info(name: str, dtype: torch.dtype, shape: Sequence[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ONNX_DTYPE[dtype], [fixed(size) for size in shape])


@lowers(tessera.project.default)
def project(g: Graph, out: Any, weight: Value, x: Value) -> str:
    return g.op("MatMul", weight, x)


# Where torch's blocks of gates stand in ONNX's order: z, r, n and i, o, f, g.
_ONNX_ORDER = {"GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2)}


@lowers(tessera.recurrent_layer.default)
def recurrent_layer(
    g: Graph,
    out: Any,
    kind: str,
    x: Value,
    h0: Value,
    c0: Value | None,
    weights: Sequence[Value],
    backwards: bool,
) -> tuple[str, ...]:
    operator, _, activation = kind.partition("_")
    order = _ONNX_ORDER.get(kind, (0,))
    lead = g.ints([0])

    def ordered(weight: Value) -> str:
        if len(order) == 1:
            return weight.name
        blocks = g.multi("Split", weight, outputs=len(order), axis=0, num_outputs=len(order))
        return g.op("Concat", *[blocks[place] for place in order], axis=0)

    given = [ordered(weight) for weight in weights]
    bias = None
    if len(given) == 4:
        bias = g.op("Unsqueeze", g.op("Concat", *given[2:], axis=0), lead)
    states = [g.op("Unsqueeze", state, lead) for state in (h0, c0) if state is not None]
    found = g.multi(
        operator,
        x,
        *(g.op("Unsqueeze", weight, lead) for weight in given[:2]),
        bias,
        None,
        *states,
        outputs=1 + len(states),
        hidden_size=fixed(h0.shape[1]),
        direction="reverse" if backwards else None,
        linear_before_reset=1 if kind == "GRU" else None,
        activations=[activation.capitalize()] if activation else None,
    )
    h = g.op("Squeeze", found[0], g.ints([1]))
    ends = [g.op("Squeeze", end, lead) for end in found[1:]]
    return h, ends[0], ends[1] if len(ends) > 1 else ""


@lowers(tessera.state_before.default)
def state_before(g: Graph, out: Any, h: Value, h0: Value, backwards: bool) -> str:
    first = g.op("Unsqueeze", h0, g.ints([0]))
    if backwards:
        return g.op("Concat", slice_axis(g, h, 0, 1, None), first, axis=0)
    return g.op("Concat", first, slice_axis(g, h, 0, 0, -1), axis=0)


@lowers(tessera.rnn_scan.default)
def rnn_scan(
    g: Graph, out: Any, x: Value, h0: Value, weight: Value, relu: bool, backwards: bool
) -> str:
    def body(b: Graph, states: list[str], steps: list[str]) -> tuple[list[str], list[str]]:
        h = b.op("Relu" if relu else "Tanh", b.op("Gemm", weight, states[0], steps[0]))
        return [h], [h]

    return scan(g, [h0], [x], body, reverse=backwards)[1][0]


@lowers(tessera.gru_scan.default)
def gru_scan(
    g: Graph,
    out: Any,
    gates: Value,
    candidate: Value,
    h0: Value,
    weight_gates: Value,
    weight_candidate: Value,
    bias_candidate: Value,
    backwards: bool,
) -> tuple[str, ...]:
    def body(b: Graph, states: list[str], steps: list[str]) -> tuple[list[str], list[str]]:
        (h,), (gate, own) = states, steps
        rz = b.op("Sigmoid", b.op("Gemm", weight_gates, h, gate))
        r, z = b.multi("Split", rz, outputs=2, axis=0, num_outputs=2)
        share = b.op("Gemm", weight_candidate, h, bias_candidate)
        n = b.op("Tanh", b.op("Add", own, b.op("Mul", r, share)))
        new = b.op("Add", n, b.op("Mul", z, b.op("Sub", h, n)))
        return [new], [new, r, z, n, share]

    return tuple(scan(g, [h0], [gates, candidate], body, reverse=backwards)[1])


@lowers(tessera.lstm_scan.default)
def lstm_scan(
    g: Graph,
    out: Any,
    x: Value,
    h0: Value,
    c0: Value,
    weight_gates: Value,
    weight_candidate: Value,
    bias_gates: Value | None,
    bias_candidate: Value | None,
    backwards: bool,
) -> tuple[str, ...]:
    def body(b: Graph, states: list[str], steps: list[str]) -> tuple[list[str], list[str]]:
        h, c = states
        pair = b.op("Concat", steps[0], h, axis=0)
        ifo = b.op("Sigmoid", b.op("Gemm", weight_gates, pair, bias_gates))
        new_g = b.op("Tanh", b.op("Gemm", weight_candidate, pair, bias_candidate))
        i, f, o = b.multi("Split", ifo, outputs=3, axis=0, num_outputs=3)
        kept = b.op("Mul", f, c)
        cell = b.op("Add", kept, b.op("Mul", i, new_g))
        squashed = b.op("Tanh", cell)
        new = b.op("Mul", o, squashed)
        return [new, cell], [pair, new, i, f, o, new_g, kept, squashed]

    (_, cell), sequences = scan(g, [h0, c0], [x], body, reverse=backwards)
    return *sequences, cell


@lowers(tessera.state_gradient_scan.default)
def state_gradient_scan(
    g: Graph,
    out: Any,
    grad: Value,
    last: Value,
    keep: Value | None,
    slopes: Value,
    weight: Value,
    backwards: bool,
) -> tuple[str, ...]:
    units, blocks = fixed(slopes.shape[2]), fixed(slopes.shape[1])
    assert units is not None and blocks is not None  # sizes of weights are not named axes
    flat = g.ints([units * blocks, -1])

    def body(b: Graph, states: list[str], steps: list[str]) -> tuple[list[str], list[str]]:
        total = b.op("Add", steps[0], states[0])
        block = b.op("Mul", steps[1], total)
        kept = b.op("Mul", steps[2], total) if keep is not None else None
        sent = b.op("Gemm", weight, b.op("Reshape", block, flat), kept)
        return [sent], [total, block]

    sequences = [grad, slopes] if keep is None else [grad, slopes, keep]
    (sent,), (total, block) = scan(g, [last], sequences, body, reverse=not backwards)
    return total, block, sent


@lowers(tessera.cell_gradient_scan.default)
def cell_gradient_scan(
    g: Graph,
    out: Any,
    grad: Value,
    last_h: Value,
    last_c: Value,
    slope: Value,
    forget: Value,
    slopes: Value,
    weight: Value,
    backwards: bool,
) -> tuple[str, ...]:
    units, rows = fixed(last_h.shape[0]), fixed(weight.shape[0])
    assert units is not None and rows is not None  # sizes of weights are not named axes
    features = rows - units

    def body(b: Graph, states: list[str], steps: list[str]) -> tuple[list[str], list[str]]:
        total = b.op("Add", steps[0], states[0])
        cell = b.op("Add", states[1], b.op("Mul", steps[1], total))
        block = b.op("Mul", steps[3], b.op("Concat", cell, cell, cell, total, axis=0))
        kept = b.op("Mul", steps[2], cell)
        sent = b.op("Gemm", weight, block, None)
        if not features:
            return [sent, kept], [block]
        of_input, sent = b.multi("Split", sent, g.ints([features, units]), outputs=2, axis=0)
        return [sent, kept], [block, of_input]

    (sent_h, sent_c), (block, *of_input) = scan(
        g, [last_h, last_c], [grad, slope, forget, slopes], body, reverse=not backwards
    )
    return block, *(of_input or [""]), sent_h, sent_c


@lowers(tessera.ctc_scan.default)
def ctc_scan(
    g: Graph,
    out: Any,
    emissions: Value,
    active: Value,
    first: Value,
    skips: Value,
    backwards: bool,
) -> tuple[str, ...]:
    lead = g.ints([0])
    dtype = first.dtype
    never = g.scalar(NEVER, dtype)
    nothing = {k: g.op("Expand", never, g.shape([first.shape[0], k])) for k in (1, 2)}

    def body(b: Graph, states: list[str], steps: list[str]) -> tuple[list[str], list[str]]:
        (state,), (emission, runs) = states, steps

        def moved(places: int) -> str:
            if backwards:
                return b.op(
                    "Concat", slice_axis(b, state, 1, places, None), nothing[places], axis=1
                )
            return b.op("Concat", nothing[places], slice_axis(b, state, 1, 0, -places), axis=1)

        ways = [state, moved(1), b.op("Add", moved(2), skips)]
        stacked = b.op("Concat", *[b.op("Unsqueeze", way, lead) for way in ways], axis=0)
        new = b.op("Add", b.op("ReduceLogSumExp", stacked, lead, keepdims=0), emission)
        kept = b.op("Where", runs, b.op("Max", new, never), state)
        return [kept], [kept]

    (last,), (logs,) = scan(g, [first], [emissions, active], body, reverse=backwards)
    return logs, last
