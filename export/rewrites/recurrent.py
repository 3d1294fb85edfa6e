"""RNN, GRU and LSTM layers as short scans and large products, with dropout from the seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.errors import ExportError
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
Replacement = tuple[Any, str, Callable[..., Any]]


def replacements() -> list[Replacement]:
    """What to patch so that recurrent layers can be recorded."""

    def stacked(kind: str, with_gradient: Layer) -> Callable[..., Any]:
        def run(
            input: Tensor,
            hx: Tensor | Sequence[Tensor],
            params: Sequence[Tensor],
            has_biases: bool,
            num_layers: int,
            dropout: float,
            train: bool,
            bidirectional: bool,
            batch_first: bool | None = None,
        ) -> tuple[Tensor, ...]:
            named = kind.partition("_")[0]
            stack = _stack(named, params, has_biases, num_layers, bidirectional, batch_first)
            states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
            if len({state.shape[2] for state in states}) > 1:
                raise ExportError(
                    "LSTM with proj_size",
                    operator="aten.lstm",
                    instead="proj_size=0 and torch.nn.Linear on the output",
                )
            layer = with_gradient if torch.is_grad_enabled() else _without_gradient(kind)
            y, last = stack.run(layer, input, states, dropout if train else 0.0)
            return (y, *last)

        return run

    return [
        (_VF, "gru", stacked("GRU", _gru)),
        (_VF, "lstm", stacked("LSTM", _lstm)),
        (_VF, "rnn_tanh", stacked("RNN_TANH", _rnn(False))),
        (_VF, "rnn_relu", stacked("RNN_RELU", _rnn(True))),
        (_VF, "gru_cell", gru_cell),
        (_VF, "lstm_cell", lstm_cell),
        (_VF, "_pack_padded_sequence", _refuse_packed),
    ]


def seeded_replacements() -> list[Replacement]:
    """torch's own recurrent functions, with ``functional.dropout`` between the layers.

    Called while ``functional.dropout`` draws the exported graph's masks; torch's functions would
    draw their own.
    """
    return [
        (_VF, name, _layer_by_layer(getattr(_VF, name)))
        for name in ("gru", "lstm", "rnn_tanh", "rnn_relu")
    ]


def _refuse_packed(*args: Any) -> Any:
    raise _packed()


def _packed() -> ExportError:
    return ExportError(
        "packed sequences, whose layout depends on data",
        operator="aten._pack_padded_sequence",
        instead="padded sequences, and a mask on the outputs (a batch input) in the loss",
    )


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


def _last(h: Tensor, backwards: bool) -> Tensor:
    return h[0] if backwards else h[-1]


class _Stack:
    """Layers and directions of one call, with the weights in torch's flat order."""

    def __init__(self, weights: list[list[Weights]], batch_first: bool) -> None:
        self._weights = weights
        self._batch_first = batch_first

    def run(
        self, layer: Layer, input: Tensor, states: States, dropout: float
    ) -> tuple[Tensor, States]:
        """Output in the caller's layout and last states [layers x directions, B, H] each."""
        x = input.permute(1, 2, 0) if self._batch_first else input.permute(0, 2, 1)
        index = 0
        lasts: list[States] = []
        for depth, directions in enumerate(self._weights):
            if depth > 0 and dropout > 0:
                x = functional.dropout(x, dropout, True)
            outputs = []
            for place, weights in enumerate(directions):
                first = tuple(state[index].t() for state in states)
                h, last = layer(x, first, weights, place == 1)
                outputs.append(h)
                lasts.append(last)
                index += 1
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        y = x.permute(2, 0, 1) if self._batch_first else x.permute(0, 2, 1)
        ends = tuple(
            torch.stack([last[kind] for last in lasts]).transpose(1, 2)
            for kind in range(len(states))
        )
        return y, ends


def _stack(
    kind: str,
    params: Any,
    has_biases: Any,
    num_layers: Any,
    bidirectional: bool,
    batch_first: bool | None,
) -> _Stack:
    # For a packed sequence torch calls with one argument less and the batch sizes second.
    if batch_first is None or not isinstance(params, (list, tuple)):
        raise _packed()
    directions = 2 if bidirectional else 1
    each = 4 if has_biases else 2
    if len(params) != num_layers * directions * each:
        raise ExportError(
            f"{kind} with {len(params)} weights for {num_layers} layers (proj_size)",
            operator=f"aten.{kind.lower()}",
            instead="proj_size=0 and torch.nn.Linear on the output",
        )
    groups = [params[i : i + each] for i in range(0, len(params), each)]
    weights = [
        Weights(group[0], group[1], *(group[2:] if has_biases else (None, None)))
        for group in groups
    ]
    layers = [weights[i : i + directions] for i in range(0, len(weights), directions)]
    return _Stack(layers, batch_first)


def _layer_by_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        input: Tensor,
        hx: Any,
        params: Any,
        has_biases: Any,
        num_layers: Any,
        dropout: Any,
        train: Any,
        bidirectional: Any,
        batch_first: bool | None = None,
    ) -> Any:
        if batch_first is None or not (train and dropout > 0 and num_layers > 1):
            call = (input, hx, params, has_biases, num_layers, dropout, train, bidirectional)
            return original(*call) if batch_first is None else original(*call, batch_first)
        directions = 2 if bidirectional else 1
        each = len(params) // num_layers
        x = input.transpose(0, 1) if batch_first else input
        lasts: list[tuple[Tensor, ...]] = []
        for depth in range(num_layers):
            if depth > 0:
                # The mask's element order is that of the exported graph: [T, F, B].
                x = functional.dropout(x.transpose(1, 2), dropout, True).transpose(1, 2)
            rows = slice(depth * directions, (depth + 1) * directions)
            first = hx[rows] if isinstance(hx, Tensor) else tuple(state[rows] for state in hx)
            own = params[depth * each : (depth + 1) * each]
            x, *last = original(x, first, own, has_biases, 1, 0.0, train, bidirectional, False)
            lasts.append(tuple(last))
        y = x.transpose(0, 1) if batch_first else x
        return y, *(torch.cat(parts) for parts in zip(*lasts, strict=True))

    return run
