"""RNN, GRU and LSTM layers as short scans and large products, with dropout from the seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.rewrites import Replacement
from export.rewrites.packed import Packing, last_step, pack_padded, pad_packed, turned
from export.rewrites.recurrent_layer import Weights, gru_layer, lstm_layer, rnn_layer
from export.rewrites.recurrent_scans import recurrent_layer

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


def replacements() -> list[Replacement]:
    """What to patch so that recurrent layers can be recorded."""

    def stacked(kind: str, with_gradient: Layer) -> Callable[..., Any]:
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
            layer = with_gradient if torch.is_grad_enabled() else _without_gradient(kind)
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

    return [
        (_VF, "gru", stacked("GRU", _gru)),
        (_VF, "lstm", stacked("LSTM", _lstm)),
        (_VF, "rnn_tanh", stacked("RNN_TANH", _rnn(False))),
        (_VF, "rnn_relu", stacked("RNN_RELU", _rnn(True))),
        (_VF, "gru_cell", gru_cell),
        (_VF, "lstm_cell", lstm_cell),
        (_VF, "_pack_padded_sequence", pack_padded),
        (_VF, "_pad_packed_sequence", pad_packed),
        (torch.nn.RNNBase, "check_forward_args", _check(torch.nn.RNNBase)),
        (torch.nn.LSTM, "check_forward_args", _check(torch.nn.LSTM)),
    ]


def _check(layer: type[torch.nn.RNNBase]) -> Callable[..., None]:
    """The layer's own check of shapes, save for packed sequences: it would fix their number."""
    own = layer.check_forward_args

    def check(module: torch.nn.RNNBase, input: Tensor, hidden: Any, batch_sizes: Any) -> None:
        if not isinstance(batch_sizes, Packing):
            own(module, input, hidden, batch_sizes)

    return check


def seeded_replacements() -> list[Replacement]:
    """torch's own recurrent functions, with ``functional.dropout`` between the layers.

    Called while ``functional.dropout`` draws the exported graph's masks; torch's functions would
    draw their own.
    """
    return [
        (_VF, name, _layer_by_layer(getattr(_VF, name)))
        for name in ("gru", "lstm", "rnn_tanh", "rnn_relu")
    ]


def _without_gradient(kind: str) -> Layer:
    """The operator that ONNX has for a whole layer: much faster for small batches."""

    def layer(
        x: Tensor, states: States, weights: Weights, backwards: bool
    ) -> tuple[Tensor, States]:
        first = [state.t() for state in states]
        c0 = first[1] if len(first) > 1 else None
        own = [weights.input, weights.state]
        if weights.input_bias is not None and weights.state_bias is not None:
            own += [weights.input_bias, weights.state_bias]
        h, *ends = recurrent_layer(kind, x.transpose(1, 2), first[0], c0, own, backwards)
        return h.transpose(1, 2), tuple(end.t() for end in ends[: len(states)])

    return layer


def _rnn(relu: bool) -> Layer:
    def layer(
        x: Tensor, states: States, weights: Weights, backwards: bool
    ) -> tuple[Tensor, States]:
        h = rnn_layer(x, states[0], weights, relu, backwards)
        return h, (_last(h, backwards),)

    return layer


def _gru(x: Tensor, states: States, weights: Weights, backwards: bool) -> tuple[Tensor, States]:
    h = gru_layer(x, states[0], weights, backwards)
    return h, (_last(h, backwards),)


def _lstm(x: Tensor, states: States, weights: Weights, backwards: bool) -> tuple[Tensor, States]:
    h, cell = lstm_layer(x, states[0], states[1], weights, backwards)
    return h, (_last(h, backwards), cell)


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
