"""The parts of a recurrent layer that run step after step, as opaque operators.

Each has a plain definition here (used to check gradients in double precision) and becomes one ONNX
``Scan``, or ONNX's own recurrent operator, in ``export.lowering.recurrent``. All that does not
depend on the step before is computed outside, for all steps at once.

Layout: time first, features before batch, so that each step's product is ``weights @ state`` and
onnxruntime never has to repack the weights. ``T`` steps, ``F`` features, ``H`` units, ``B``
sequences; ``backwards`` runs from the last step to the first, with results at their own steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def _order(steps: int, backwards: bool) -> Iterator[int]:
    return iter(range(steps - 1, -1, -1) if backwards else range(steps))


def _shaped_as(operator: Any, *places: int) -> None:
    """Tell torch the results' shapes: those of the operator's arguments at these places."""

    def fake(*arguments: Any) -> Any:
        results = tuple(torch.empty_like(arguments[place]) for place in places)
        return results if len(results) > 1 else results[0]

    operator.register_fake(fake)


@torch.library.custom_op("tessera::project", mutates_args=())
def project(weight: Tensor, x: Tensor) -> Tensor:
    """weight [M, F] times each step of x [T, F, B]: [T, M, B]."""
    return torch.matmul(weight, x)


@project.register_fake
def _(weight: Tensor, x: Tensor) -> Tensor:
    return x.new_empty([x.shape[0], weight.shape[0], x.shape[2]])


@torch.library.custom_op("tessera::recurrent_layer", mutates_args=())
def recurrent_layer(
    kind: str,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: list[Tensor],
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One direction of a layer without its gradient, as ONNX has an operator for it.

    ``kind`` is RNN_TANH, RNN_RELU, GRU or LSTM; x [T, B, F], h0 and (LSTM only) c0 [B, H], torch's
    two weights and, where there are biases, two biases. Returns h [T, B, H], the last h and the
    last c (zeros without cells) [B, H].
    """
    own = x.flip(0) if backwards else x
    rest = (weights, len(weights) == 4, 1, 0.0, False, False, False)
    if c0 is not None:
        h, last, cell = torch.lstm(own, [h0.unsqueeze(0), c0.unsqueeze(0)], *rest)
    else:
        run = {"GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}[kind]
        h, last = run(own, h0.unsqueeze(0), *rest)
        cell = torch.zeros_like(last)
    return h.flip(0) if backwards else h.clone(), last[0].clone(), cell[0].clone()


@recurrent_layer.register_fake
def _(
    kind: str,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: list[Tensor],
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    h = x.new_empty([x.shape[0], x.shape[1], h0.shape[1]])
    shape = [x.shape[1], h0.shape[1]]
    return h, x.new_empty(shape), x.new_empty(shape)


@torch.library.custom_op("tessera::state_before", mutates_args=())
def state_before(h: Tensor, h0: Tensor, backwards: bool) -> Tensor:
    """The state before each step, from all states [T, H, B] and the first [H, B]."""
    first = h0.unsqueeze(0)
    return torch.cat([h[1:], first]) if backwards else torch.cat([first, h[:-1]])


_shaped_as(state_before, 0)


@torch.library.custom_op("tessera::rnn_scan", mutates_args=())
def rnn_scan(x: Tensor, h0: Tensor, weight: Tensor, relu: bool, backwards: bool) -> Tensor:
    """h_t = act(x_t + weight h_{t-1}); x [T, H, B], h0 [H, B], weight [H, H] -> h [T, H, B]."""
    h = torch.empty_like(x)
    state = h0
    for t in _order(x.shape[0], backwards):
        state = x[t] + weight @ state
        state = state.relu() if relu else state.tanh()
        h[t] = state
    return h


_shaped_as(rnn_scan, 0)


@torch.library.custom_op("tessera::gru_scan", mutates_args=())
def gru_scan(
    gates: Tensor,
    candidate: Tensor,
    h0: Tensor,
    weight_gates: Tensor,
    weight_candidate: Tensor,
    bias_candidate: Tensor,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gated recurrent unit as torch defines it (Cho et al. 2014, reset after the product).

    ``gates`` [T, 2H, B] and ``candidate`` [T, H, B] are the input's share of r, z and n with
    biases; ``weight_gates`` [2H, H], ``weight_candidate`` [H, H], ``bias_candidate`` [H, 1].
    Returns h, r, z, n and the state's share of n, each [T, H, B].
    """
    h, r, z, n, share = (torch.empty_like(candidate) for _ in range(5))
    state = h0
    for t in _order(candidate.shape[0], backwards):
        r[t], z[t] = torch.sigmoid(gates[t] + weight_gates @ state).chunk(2)
        share[t] = weight_candidate @ state + bias_candidate
        n[t] = torch.tanh(candidate[t] + r[t] * share[t])
        state = n[t] + z[t] * (state - n[t])
        h[t] = state
    return h, r, z, n, share


_shaped_as(gru_scan, *[1] * 5)


@torch.library.custom_op("tessera::lstm_scan", mutates_args=())
def lstm_scan(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight_gates: Tensor,
    weight_candidate: Tensor,
    bias_gates: Tensor | None,
    bias_candidate: Tensor | None,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with forget gates).

    x [T, F, B]; ``weight_gates`` [3H, F + H] of i, f and o, ``weight_candidate`` [H, F + H] of g,
    times input and state one under the other, with biases [3H, 1] and [H, 1]: the products of the
    input alone would be as much work, and be written out and read again. Returns that pair
    [T, F + H, B]; h, i, f, o, g, what f keeps of the cell and tanh(c), each [T, H, B]; and the last
    c [H, B].
    """
    steps, _, batch = x.shape
    h, i, f, o, g, kept, squashed = (x.new_empty([steps, h0.shape[0], batch]) for _ in range(7))
    pairs = x.new_empty([steps, weight_gates.shape[1], batch])
    state, cell = h0, c0
    for t in _order(steps, backwards):
        pairs[t] = torch.cat([x[t], state])
        gates, candidate = weight_gates @ pairs[t], weight_candidate @ pairs[t]
        if bias_gates is not None and bias_candidate is not None:
            gates, candidate = gates + bias_gates, candidate + bias_candidate
        i[t], f[t], o[t] = torch.sigmoid(gates).chunk(3)
        g[t] = torch.tanh(candidate)
        kept[t] = f[t] * cell
        cell = kept[t] + i[t] * g[t]
        squashed[t] = torch.tanh(cell)
        state = o[t] * squashed[t]
        h[t] = state
    return pairs, h, i, f, o, g, kept, squashed, cell.clone()


@lstm_scan.register_fake
def _(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight_gates: Tensor,
    weight_candidate: Tensor,
    bias_gates: Tensor | None,
    bias_candidate: Tensor | None,
    backwards: bool,
) -> tuple[Tensor, ...]:
    steps, _, batch = x.shape
    each = [x.new_empty([steps, h0.shape[0], batch]) for _ in range(7)]
    return x.new_empty([steps, weight_gates.shape[1], batch]), *each, torch.empty_like(c0)


@torch.library.custom_op("tessera::state_gradient_scan", mutates_args=())
def state_gradient_scan(
    grad: Tensor,
    last: Tensor,
    keep: Tensor | None,
    slopes: Tensor,
    weight: Tensor,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Back through time for RNN and GRU, whose only state is h.

    With a_t = grad_t + (what step t + 1 sends back, at first ``last``): the gradient of the K
    blocks of pre-activations is slopes_t * a_t, and weight @ that + keep_t * a_t goes on.
    ``grad`` and ``keep`` [T, H, B], ``last`` [H, B], ``slopes`` [T, K, H, B], ``weight`` [H, KH].
    ``backwards`` is the direction of the forward pass. Returns a [T, H, B], the blocks'
    gradients [T, K, H, B] and the gradient of the initial state [H, B].
    """
    total, blocks = torch.empty_like(grad), torch.empty_like(slopes)
    sent = last
    for t in _order(grad.shape[0], not backwards):
        total[t] = grad[t] + sent
        blocks[t] = slopes[t] * total[t]
        sent = weight @ blocks[t].flatten(0, 1)
        if keep is not None:
            sent = sent + keep[t] * total[t]
    return total, blocks, sent.clone()


_shaped_as(state_gradient_scan, 0, 3, 1)


@torch.library.custom_op("tessera::cell_gradient_scan", mutates_args=())
def cell_gradient_scan(
    grad: Tensor,
    last_h: Tensor,
    last_c: Tensor,
    slope: Tensor,
    forget: Tensor,
    slopes: Tensor,
    weight: Tensor,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Back through time for LSTM, whose state is h and c.

    With a_t = grad_t + sent h and e_t = slope_t * a_t + sent c: the gradient of the
    pre-activations of i, f, g, o is slopes_t * (e_t, e_t, e_t, a_t); weight @ that is the gradient
    of input (where ``weight`` has rows of it) and of h, one under the other; forget_t * e_t goes on
    to c. ``grad``, ``slope``, ``forget`` [T, H, B], ``slopes`` [T, 4H, B], ``last_h``,
    ``last_c`` [H, B], ``weight`` [F + H, 4H] or [H, 4H]. ``backwards`` is the direction of the
    forward pass. Returns the gradients of the pre-activations [T, 4H, B], of the input
    [T, F, B] or [T, 0, B], and of h0 and c0.
    """
    units = last_h.shape[0]
    features = weight.shape[0] - units
    blocks = torch.empty_like(slopes)
    of_input = grad.new_empty([grad.shape[0], features, grad.shape[2]])
    sent_h, sent_c = last_h, last_c
    for t in _order(grad.shape[0], not backwards):
        total = grad[t] + sent_h
        cell = slope[t] * total + sent_c
        blocks[t] = slopes[t] * torch.cat([cell, cell, cell, total])
        of_input[t], sent_h = (weight @ blocks[t]).split([features, units])
        sent_c = forget[t] * cell
    return blocks, of_input, sent_h.clone(), sent_c.clone()


@cell_gradient_scan.register_fake
def _(
    grad: Tensor,
    last_h: Tensor,
    last_c: Tensor,
    slope: Tensor,
    forget: Tensor,
    slopes: Tensor,
    weight: Tensor,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_input = grad.new_empty([grad.shape[0], weight.shape[0] - last_h.shape[0], grad.shape[2]])
    return torch.empty_like(slopes), of_input, torch.empty_like(last_h), torch.empty_like(last_c)
