"""RNN, GRU and LSTM layers as short scans and large products, with dropout from the seed.

The products of input and weights, and the gradients of all weights, are taken over all steps at
once; only what needs the step before runs inside a scan. Where a gradient is to be differentiated
again (a second derivative of the layer), the scans are recorded step by step.

Layout: time first, features before batch, so that each step's product is ``weights @ state`` and
onnxruntime never has to repack the weights. ``T`` steps, ``F`` features, ``H`` units, ``B``
sequences; ``backwards`` runs from the last step to the first, with results at their own steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.lowering.graph import Graph, Value
from export.lowering.opaque import Tensors, opaque, scanned
from export.rewrites import BESIDE, RECORDED
from export.rewrites.packed import Packing, last_step, pack_padded, pad_packed, turned
from export.short_gradients import ShortGradient
from export.symbols import fixed

# What runs step after step.


@scanned
def rnn(states: Tensors, parts: Tensors, held: Tensors) -> tuple[Tensors, Tensors]:
    """h' = tanh(x + U h): x [H, B], U [H, H]; the result is h'."""
    h = torch.tanh(torch.addmm(parts[0], held[0], states[0]))
    return [h], [h]


@scanned
def rnn_relu(states: Tensors, parts: Tensors, held: Tensors) -> tuple[Tensors, Tensors]:
    """As ``rnn``, with relu in place of tanh."""
    h = torch.relu(torch.addmm(parts[0], held[0], states[0]))
    return [h], [h]


@scanned
def gru(states: Tensors, parts: Tensors, held: Tensors) -> tuple[Tensors, Tensors]:
    """The gated recurrent unit as torch defines it (Cho et al. 2014, reset after the product).

    Parts are the input's share of r and z [2H, B] and of n [H, B], with biases; held are the
    state's weights [2H, H] and [H, H] of these, and n's bias [H, 1]. Results: h, r, z, n and the
    state's share of n, each [H, B].
    """
    (h,), (gates, candidate) = states, parts
    weight_gates, weight_candidate, bias_candidate = held
    r, z = torch.sigmoid(torch.addmm(gates, weight_gates, h)).chunk(2)
    share = torch.addmm(bias_candidate, weight_candidate, h)
    n = torch.tanh(candidate + r * share)
    h = n + z * (h - n)
    return [h], [h, r, z, n, share]


@scanned
def lstm(states: Tensors, parts: Tensors, held: Tensors) -> tuple[Tensors, Tensors]:
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with forget gates).

    States are h and c [H, B], the part x [F, B]. Held are weights [3H, F + H] of i, f and o and
    [H, F + H] of g, times input and state one under the other, and their biases [3H, 1] and [H, 1],
    if any: the products of the input alone would be as much work, and be written out and read
    again. Results: that pair [F + H, B]; h, i, f, o, g, what f keeps of the cell and tanh(c), each
    [H, B].
    """
    h, c = states
    pair = torch.cat([parts[0], h])
    gates, candidate = _times(held, pair)
    i, f, o = torch.sigmoid(gates).chunk(3)
    g = torch.tanh(candidate)
    kept = f * c
    c = kept + i * g
    squashed = torch.tanh(c)
    h = o * squashed
    return [h, c], [pair, h, i, f, o, g, kept, squashed]


def _times(held: Tensors, pair: Tensor) -> list[Tensor]:
    """Two weights times the pair, with their biases behind them, if any."""
    if len(held) == 2:
        return [weight @ pair for weight in held]
    return [torch.addmm(held[place + 2], held[place], pair) for place in (0, 1)]


@scanned
def state_gradient(states: Tensors, parts: Tensors, held: Tensors) -> tuple[Tensors, Tensors]:
    """Back through time for RNN and GRU, whose only state is h.

    With a = grad + (what the step after sends back): the gradient of the K blocks of
    pre-activations is slopes * a, and weight @ that + keep * a goes on. Parts are grad [H, B],
    slopes [K, H, B] and, if anything is kept, keep [H, B]; the weight is [H, K H]. Results: a, and
    the blocks' gradients [K, H, B].
    """
    (sent,), (grad, slopes, *keep), (weight,) = states, parts, held
    total = grad + sent
    block = slopes * total
    kept = [each * total for each in keep]
    flat = block.flatten(0, 1)
    sent = torch.addmm(kept[0], weight, flat) if kept else weight @ flat
    return [sent], [total, block]


@scanned
def cell_gradient(states: Tensors, parts: Tensors, held: Tensors) -> tuple[Tensors, Tensors]:
    """Back through time for LSTM, whose state is h and c.

    With a = grad + sent h and e = slope * a + sent c: the gradient of the pre-activations of
    i, f, g, o is slopes * (e, e, e, a); weight @ that is the gradient of input (where the weight
    has rows of it) and of h, one under the other; forget * e goes on to c. Parts are grad, slope
    and forget [H, B] and slopes [4H, B]; the weight is [F + H, 4H] or [H, 4H]. Results: the
    gradients of the pre-activations and, with F, of the input [F, B].
    """
    (sent, sent_cell), (grad, slope, forget, slopes), (weight,) = states, parts, held
    total = grad + sent
    cell = sent_cell + slope * total
    block = slopes * torch.cat([cell, cell, cell, total])
    kept = forget * cell
    sent = weight @ block
    features = weight.shape[0] - total.shape[0]
    if not features:
        return [sent, kept], [block]
    inwards, sent = sent.split([features, total.shape[0]])
    return [sent, kept], [block, inwards]


# The operators of whole layers.


def _of_project(weight: Tensor, x: Tensor) -> Tensor:
    return x.new_empty([x.shape[0], weight.shape[0], x.shape[2]])


def _lower_project(g: Graph, weight: Value, x: Value) -> str:
    return g.op("MatMul", weight, x)


@opaque(fake=_of_project, lowering=_lower_project)
def project(weight: Tensor, x: Tensor) -> Tensor:
    """weight [M, F] times each step of x [T, F, B]: [T, M, B]."""
    return torch.matmul(weight, x)


def _of_layer(
    kind: str, x: Tensor, states: list[Tensor], weights: list[Tensor], backwards: bool
) -> list[Tensor]:
    h = x.new_empty([x.shape[0], x.shape[1], states[0].shape[1]])
    return [h, *(torch.empty_like(state) for state in states)]


# Where torch's blocks of gates stand in ONNX's order: z, r, n and i, o, f, g.
_ONNX_ORDER = {"GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2)}


def _lower_layer(
    g: Graph, kind: str, x: Value, states: Sequence[Value], weights: Sequence[Value],
    backwards: bool,
) -> list[str]:  # fmt: skip
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
    h, *ends = g.multi(
        operator,
        x,
        *(g.op("Unsqueeze", weight, lead) for weight in given[:2]),
        bias,
        None,
        *(g.op("Unsqueeze", state, lead) for state in states),
        outputs=1 + len(states),
        hidden_size=fixed(states[0].shape[1]),
        direction="reverse" if backwards else None,
        linear_before_reset=1 if kind == "GRU" else None,
        activations=[activation.capitalize()] if activation else None,
    )
    return [g.op("Squeeze", h, g.ints([1])), *(g.op("Squeeze", end, lead) for end in ends)]


@opaque(fake=_of_layer, lowering=_lower_layer)
def recurrent_layer(
    kind: str, x: Tensor, states: list[Tensor], weights: list[Tensor], backwards: bool
) -> list[Tensor]:
    """One direction of a layer without its gradient, as ONNX has an operator for it.

    ``kind`` is RNN_TANH, RNN_RELU, GRU or LSTM; x [T, B, F], states h and (LSTM only) c [B, H],
    torch's two weights and, where there are biases, two biases. Returns h [T, B, H] and the last
    states [B, H].
    """
    own = x.flip(0) if backwards else x
    first = [state.unsqueeze(0) for state in states]
    run = getattr(torch, kind.lower())
    rest = (weights, len(weights) == 4, 1, 0.0, False, False, False)
    h, *last = run(own, first if len(first) > 1 else first[0], *rest)
    return [h.flip(0) if backwards else h.clone(), *(each[0].clone() for each in last)]


# One direction of one layer with its gradient.


@dataclass(frozen=True)
class Weights:
    """torch's weights of one direction of one layer: [K H, F], [K H, H] and two [K H] or None.

    Where an LSTM's output is projected to P numbers: [4 H, P] of the state, and [P, H].
    """

    input: Tensor
    state: Tensor
    input_bias: Tensor | None = None
    state_bias: Tensor | None = None
    projection: Tensor | None = None


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a + b


def _projected(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = project(weight, x)
    return product if bias is None else product + bias.unsqueeze(1)


def _flat(x: Tensor) -> Tensor:
    """[T, F, B] -> [F, T B]."""
    return x.transpose(0, 1).reshape(x.shape[1], x.shape[0] * x.shape[2])


def _input_gradient(weight: Tensor, flat: Tensor, x: Tensor) -> Tensor:
    steps, features, batch = x.shape
    return (weight.t() @ flat).reshape(features, steps, batch).transpose(0, 1)


def _before(h: Tensor, h0: Tensor, backwards: bool) -> Tensor:
    """The state before each step, from all states [T, H, B] and the first [H, B]."""
    first = h0.unsqueeze(0)
    return torch.cat([h[1:], first]) if backwards else torch.cat([first, h[:-1]])


# Each ``forward`` is of x [T, F, B], the first states [H, B], the weights, their biases or None,
# and ``backwards``: all h [T, H, B], and of an LSTM the last cell.


def _only_once(*inputs: Any) -> str:
    if isinstance(inputs[0].shape[0], int):
        return ""
    return "it is recorded step by step, and its number of steps is free"


class _Rnn(ShortGradient):
    """h_t = act(W x_t + b + U h_{t-1} + c), act tanh or relu."""

    only_once = staticmethod(_only_once)

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        x, h0, weight, state_weight, bias, state_bias, backwards, relu = given
        gates = _projected(weight, x, _both(bias, state_bias))
        _, (h,) = (rnn_relu if relu else rnn)([h0], [gates], [state_weight], backwards)
        ctx.save_for_backward(x, h0, weight, state_weight, h)
        ctx.settings = relu, backwards, bias is not None
        return h

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, h0, weight, state_weight, h = ctx.saved_tensors
        relu, backwards, biased = ctx.settings
        slopes = (h > 0).to(h.dtype) if relu else 1 - h * h
        (of_h0,), (_, blocks) = state_gradient(
            [torch.zeros_like(h0)], [grad, slopes.unsqueeze(1)], [state_weight.t()], not backwards
        )
        flat = _flat(blocks.squeeze(1))
        of_bias = flat.sum(1) if biased else None
        return (
            _input_gradient(weight, flat, x) if ctx.needs_input_grad[0] else None,
            of_h0,
            flat @ _flat(x).t(),
            flat @ _flat(_before(h, h0, backwards)).t(),
            of_bias,
            of_bias,
            None,
            None,
        )


class _Gru(ShortGradient):
    """The equations of torch.nn.GRU for one layer and direction."""

    only_once = staticmethod(_only_once)

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        x, h0, weight, state_weight, bias, state_bias, backwards = given
        units = h0.shape[0]
        cut = 2 * units
        gate_bias, candidate_bias = None, None
        share_bias = torch.zeros_like(state_weight[:units, :1])
        if bias is not None:
            gate_bias, candidate_bias = bias[:cut] + state_bias[:cut], bias[cut:]
            share_bias = state_bias[cut:].unsqueeze(1)
        parts = [
            _projected(weight[:cut], x, gate_bias),
            _projected(weight[cut:], x, candidate_bias),
        ]
        _, results = gru(
            [h0], parts, [state_weight[:cut], state_weight[cut:], share_bias], backwards
        )
        ctx.save_for_backward(x, h0, weight, state_weight, *results)
        ctx.settings = backwards, bias is not None
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, h0, weight, state_weight, h, r, z, n, share = ctx.saved_tensors
        backwards, biased = ctx.settings
        units = h0.shape[0]
        cut = 2 * units
        before = _before(h, h0, backwards)
        slope_n = (1 - z) * (1 - n * n)
        slope_share = slope_n * r
        slope_r = slope_share * (1 - r) * share
        slope_z = z * (before - h)  # is (before - n) (1 - z) z
        slopes = torch.stack([slope_r, slope_z, slope_share], dim=1)
        (of_h0,), (total, blocks) = state_gradient(
            [torch.zeros_like(h0)], [grad, slopes, z], [state_weight.t()], not backwards
        )
        of_state = _flat(blocks.reshape(x.shape[0], 3 * units, x.shape[2]))
        of_candidate = _flat(total * slope_n)
        flat = torch.cat([of_state[:cut], of_candidate])
        of_bias, of_state_bias = None, None
        if biased:  # the gates' two biases have one gradient
            of_state_bias = of_state.sum(1)
            of_bias = torch.cat([of_state_bias[:cut], of_candidate.sum(1)])
        return (
            _input_gradient(weight, flat, x) if ctx.needs_input_grad[0] else None,
            of_h0,
            flat @ _flat(x).t(),
            of_state @ _flat(before).t(),
            of_bias,
            of_state_bias,
            None,
        )


class _Lstm(ShortGradient):
    """The equations of torch.nn.LSTM for one layer and direction, without projection."""

    only_once = staticmethod(_only_once)

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        x, h0, c0, weight, state_weight, bias, state_bias, backwards = given
        units = h0.shape[0]

        def parted(*rows: Tensor) -> list[Tensor]:
            """Of all gates but g, and of g."""
            gates = [torch.cat([w[: 2 * units], w[3 * units :]]) for w in rows]
            own = [w[2 * units : 3 * units] for w in rows]
            return [torch.cat(each, 1) if len(each) > 1 else each[0] for each in (gates, own)]

        both = _both(bias, state_bias)
        held = parted(weight, state_weight)
        held += [] if both is None else [each.unsqueeze(1) for each in parted(both)]
        (_, cell), (pairs, h, *saved) = lstm([h0, c0], [x], held, backwards)
        ctx.save_for_backward(pairs, c0, weight, state_weight, h, *saved)
        ctx.settings = backwards, bias is not None
        ctx.set_materialize_grads(False)
        return h, cell

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, of_cell: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        pairs, c0, weight, state_weight, h, i, f, o, g, kept, squashed = ctx.saved_tensors
        backwards, biased = ctx.settings
        features = weight.shape[1]
        to_cell = i * g
        slopes = torch.cat([to_cell * (1 - i), kept * (1 - f), i - to_cell * g, h * (1 - o)], dim=1)
        inwards = ctx.needs_input_grad[0]
        back = state_weight.t()
        grad = torch.zeros_like(h) if grad is None else grad
        last = [torch.zeros_like(c0), torch.zeros_like(c0) if of_cell is None else of_cell]
        (of_h0, of_c0), (blocks, *of_x) = cell_gradient(
            last,
            [grad, o - h * squashed, f, slopes],
            [torch.cat([weight.t(), back]) if inwards else back],
            not backwards,
        )
        flat = _flat(blocks)
        of_bias = flat.sum(1) if biased else None
        of_weights = flat @ _flat(pairs).t()
        return (
            of_x[0] if inwards else None,
            of_h0,
            of_c0,
            of_weights[:, :features],
            of_weights[:, features:],
            of_bias,
            of_bias,
            None,
        )


# Single recurrent steps out of place: torch's own write their gates in place, into views.


def gru_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """``torch.nn.GRUCell``'s equations: input [B, F], hx [B, H] -> [B, H]."""
    units = hx.shape[1]
    own = functional.linear(input, w_ih, b_ih).split([2 * units, units], dim=1)
    share = functional.linear(hx, w_hh, b_hh).split([2 * units, units], dim=1)
    r, z = torch.sigmoid(own[0] + share[0]).split([units, units], dim=1)
    n = torch.tanh(own[1] + r * share[1])
    h: Tensor = n + z * (hx - n)
    return h


def lstm_cell(
    input: Tensor,
    hx: tuple[Tensor, Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``torch.nn.LSTMCell``'s equations: input [B, F], hx two [B, H] -> two [B, H]."""
    h, c = hx
    gates = functional.linear(input, w_ih, b_ih) + functional.linear(h, w_hh, b_hh)
    i, f, g, o = gates.split([h.shape[1]] * 4, dim=1)
    cell = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


_VF = torch._VF

States = tuple[Tensor, ...]
# One direction of one layer: x [T, F, B], states [H, B] each, weights, backwards -> h [T, H, B] and
# the last states.
Layer = Callable[[Tensor, States, Weights, bool], tuple[Tensor, States]]
_WITH_GRADIENT: dict[str, tuple[Any, ...]] = {
    "RNN_TANH": (_Rnn, False),
    "RNN_RELU": (_Rnn, True),
    "GRU": (_Gru,),
    "LSTM": (_Lstm,),
}


def with_gradient(kind: str) -> Layer:
    """A layer of this kind that is trained."""
    function, *settings = _WITH_GRADIENT[kind]

    def layer(
        x: Tensor, states: States, weights: Weights, backwards: bool
    ) -> tuple[Tensor, States]:
        w = weights
        own = (w.input, w.state, w.input_bias, w.state_bias)
        found = function.apply(x, *states, *own, backwards, *settings)
        h, *cell = (found,) if isinstance(found, Tensor) else found
        return h, (_last(h, backwards), *cell)

    return layer


def _without_gradient(kind: str) -> Layer:
    """The operator that ONNX has for a whole layer: much faster for small batches."""

    def layer(
        x: Tensor, states: States, weights: Weights, backwards: bool
    ) -> tuple[Tensor, States]:
        own = (weights.input, weights.state, weights.input_bias, weights.state_bias)
        held = [each for each in own if each is not None]
        first = [state.t() for state in states]
        h, *ends = recurrent_layer(kind, x.transpose(1, 2), first, held, backwards)
        return h.transpose(1, 2), tuple(end.t() for end in ends)

    return layer


def _projecting(layer: Layer) -> Layer:
    """An LSTM whose output R m [P, B] stands for what came of its cell, m [H, B].

    That of m goes on by U R m, U the weights of the state. The first state is no R m of any m: its
    U h is what P further features give, which are 0 at all steps but the first.
    """

    def projecting(
        x: Tensor, states: States, weights: Weights, backwards: bool
    ) -> tuple[Tensor, States]:
        h0, c0 = states
        assert weights.projection is not None
        steps = torch.arange(x.shape[0])
        begins = steps == (x.shape[0] - 1 if backwards else 0)
        given = torch.cat([x, begins.to(x.dtype).reshape(-1, 1, 1) * h0], 1)
        own = replace(
            weights,
            input=torch.cat([weights.input, weights.state], 1),
            state=weights.state @ weights.projection,
            projection=None,
        )
        m, (_, cell) = layer(given, (torch.zeros_like(c0), c0), own, backwards)
        h: Tensor = weights.projection @ m
        return h, (_last(h, backwards), cell)

    return projecting


def _last(h: Tensor, backwards: bool) -> Tensor:
    return h[0] if backwards else h[-1]


def _layers(kind: str) -> Callable[..., Any]:
    """``torch._VF.gru`` and its kin: all layers and directions of one module."""

    def run(
        input: Tensor, second: Any, *rest: Any, batch_first: bool = False
    ) -> tuple[Tensor, ...]:
        # For packed sequences torch calls with their layout second and no batch_first.
        packing = second if isinstance(second, Packing) else None
        hx, params, has_biases, _, dropout, train, bidirectional, *first = (
            rest if packing else (second, *rest)
        )
        batch_first = first[0] if first else batch_first
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        layer = (with_gradient if torch.is_grad_enabled() else _without_gradient)(kind)
        projected = states[0].shape[2] != states[-1].shape[2]
        if projected:
            layer = _projecting(layer)
        stack = _Stack(_weights(params, has_biases, bidirectional, projected))
        time, units, sequences = (0, 2, 1) if not batch_first else (1, 2, 0)
        given = packing.unpack(input) if packing else input
        x = given.permute(time, units, sequences)
        x, last = stack.run(layer, x, states, dropout if train else 0.0, packing)
        # In torch's order in memory, which a view of the result relies on.
        y = x.permute(0, 2, 1).contiguous()
        if packing:
            return (packing.pack(y), *last)
        return (y.transpose(0, 1) if batch_first else y, *last)

    return run


def _check(layer: type[torch.nn.RNNBase]) -> Callable[..., None]:
    """The layer's own check of shapes, save for packed sequences: it would fix their number."""
    own = layer.check_forward_args

    def check(module: torch.nn.RNNBase, input: Tensor, hidden: Any, batch_sizes: Any) -> None:
        if not isinstance(batch_sizes, Packing):
            own(module, input, hidden, batch_sizes)

    return check


# Added to a gate before its sigmoid, it shuts or opens the gate for good.
_SHUT = 1e4


class _Stack:
    """Layers and directions of one call."""

    def __init__(self, weights: list[list[Weights]]) -> None:
        self._weights = weights

    def run(
        self, layer: Layer, x: Tensor, states: States, dropout: float, packing: Packing | None
    ) -> tuple[Tensor, States]:
        """x [T, F, B] to the output and the last states [layers x directions, B, H] each."""
        index = 0
        lasts: list[States] = []
        for depth, directions in enumerate(self._weights):
            if depth > 0 and dropout > 0:
                x = functional.dropout(x, dropout, True)
            outputs = []
            for place, weights in enumerate(directions):
                first = tuple(state[index].t() for state in states)
                if packing is None:
                    h, last = layer(x, first, weights, place == 1)
                else:
                    h, last = _of_lengths(layer, x, first, weights, place == 1, packing)
                outputs.append(h)
                lasts.append(last)
                index += 1
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        ends = tuple(
            torch.stack([last[kind] for last in lasts]).transpose(1, 2).contiguous()
            for kind in range(len(states))
        )
        return x, ends


def _of_lengths(
    layer: Layer, x: Tensor, first: States, weights: Weights, backwards: bool, packing: Packing
) -> tuple[Tensor, States]:
    """A layer's direction over sequences that end at their own lengths; zeros behind them.

    Backwards is forwards over each sequence turned round. Behind a sequence's end an LSTM's cell
    is kept as it is: a further feature shuts its input gate there and opens its forget gate.
    """
    outside = (~packing.active).unsqueeze(1)
    given = turned(x, packing) if backwards else x
    if len(first) > 1:
        units = first[1].shape[0]
        gates = torch.tensor([-_SHUT, _SHUT, 0.0, 0.0]).to(x.dtype)
        column = gates.unsqueeze(1).expand(4, units).reshape(-1, 1)
        weights = replace(weights, input=torch.cat([weights.input, column], 1))
        given = torch.cat([given, outside.to(x.dtype)], 1)
    h, ends = layer(given, first, weights, False)
    own = (last_step(h, packing), *ends[1:])
    h = turned(h, packing) if backwards else h
    return h.masked_fill(outside, 0.0), own


def _weights(
    params: Sequence[Tensor], has_biases: bool, bidirectional: bool, projected: bool
) -> list[list[Weights]]:
    """Weights by layer and direction, from torch's flat order."""
    directions = 2 if bidirectional else 1
    each = (4 if has_biases else 2) + projected
    groups = [params[i : i + each] for i in range(0, len(params), each)]
    weights = [
        Weights(
            group[0],
            group[1],
            group[2] if has_biases else None,
            group[3] if has_biases else None,
            group[-1] if projected else None,
        )
        for group in groups
    ]
    return [weights[i : i + directions] for i in range(0, len(weights), directions)]


def _layer_by_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(input: Tensor, second: Any, *rest: Any) -> Any:
        packed = isinstance(rest[1], (tuple, list))  # there stand the weights, behind hx
        hx, params, has_biases, num_layers, dropout, train, bidirectional, *first = (
            rest if packed else (second, *rest)
        )
        if not (train and dropout > 0 and num_layers > 1):
            return original(input, second, *rest)
        batch_first = bool(first) and first[0]
        directions = 2 if bidirectional else 1
        each = len(params) // num_layers
        x = input.transpose(0, 1) if batch_first else input
        lasts: list[tuple[Tensor, ...]] = []
        for depth in range(num_layers):
            if depth > 0:
                x = _dropped_packed(x, second, dropout) if packed else _dropped(x, dropout)
            rows = slice(depth * directions, (depth + 1) * directions)
            start = hx[rows] if isinstance(hx, Tensor) else tuple(state[rows] for state in hx)
            own = params[depth * each : (depth + 1) * each]
            how = (has_biases, 1, 0.0, train, bidirectional)
            if packed:
                x, *last = original(x, second, start, own, *how)
            else:
                x, *last = original(x, start, own, *how, False)
            lasts.append(tuple(last))
        y = x.transpose(0, 1) if batch_first else x
        return y, *(torch.cat(parts) for parts in zip(*lasts, strict=True))

    return run


def _dropped(x: Tensor, p: float) -> Tensor:
    """The mask's element order is that of the exported graph: [T, F, B], of x [T, B, F]."""
    return functional.dropout(x.transpose(1, 2), p, True).transpose(1, 2)


def _dropped_packed(data: Tensor, batch_sizes: Tensor, p: float) -> Tensor:
    steps = batch_sizes.shape[0]
    padded, lengths = _VF._pad_packed_sequence(data, batch_sizes, False, 0.0, steps)
    return _dropped(padded, p)[torch.arange(steps).unsqueeze(1) < lengths]


RECORDED.replaces(
    *((_VF, kind.lower(), _layers(kind)) for kind in _WITH_GRADIENT),
    (_VF, "gru_cell", gru_cell),
    (_VF, "lstm_cell", lstm_cell),
    (_VF, "_pack_padded_sequence", pack_padded),
    (_VF, "_pad_packed_sequence", pad_packed),
    (torch.nn.RNNBase, "check_forward_args", _check(torch.nn.RNNBase)),
    (torch.nn.LSTM, "check_forward_args", _check(torch.nn.LSTM)),
)
# torch's own, which would draw dropout masks of their own between the layers.
BESIDE.replaces(
    *((_VF, kind.lower(), _layer_by_layer(getattr(_VF, kind.lower()))) for kind in _WITH_GRADIENT)
)
