"""The parts of a recurrent layer that run step after step, as opaque operators.

Each has a plain definition here (used to check gradients in double precision) and becomes one ONNX
``Scan``, or ONNX's own recurrent operator, in ``export.lowering.recurrent``. All that does not
depend on the step before is computed outside, for all steps at once. Where what they give is to be
differentiated (a second derivative of the layer), the plain definitions are recorded, step by step.

Layout: time first, features before batch, so that each step's product is ``weights @ state`` and
onnxruntime never has to repack the weights. ``T`` steps, ``F`` features, ``H`` units, ``B``
sequences; ``backwards`` runs from the last step to the first, with results at their own steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor


def _stacked(steps: Sequence[Tensor], backwards: bool) -> Tensor:
    """Along time, of what was found in that order."""
    return torch.stack([*reversed(steps)] if backwards else [*steps])


def _order(steps: int, backwards: bool) -> Iterator[int]:
    return iter(range(steps - 1, -1, -1) if backwards else range(steps))


_Definition = TypeVar("_Definition", bound=Callable[..., Any])


def opaque(
    *like: int, fake: Callable[..., Any] | None = None
) -> Callable[[_Definition], _Definition]:
    """Makes an operator of a definition, but where its gradient is recorded.

    ``fake`` tells torch the results' shapes; else they are those of the arguments at the places
    ``like``.
    """

    def shaped(*arguments: Any) -> Any:
        results = tuple(torch.empty_like(arguments[place]) for place in like)
        return results if len(results) > 1 else results[0]

    def made(definition: _Definition) -> _Definition:
        name = f"tessera::{definition.__name__}"
        operator: Any = torch.library.custom_op(name, definition, mutates_args=())
        operator.register_fake(fake or shaped)

        @wraps(definition)
        def called(*given: Any, **named: Any) -> Any:
            return (definition if torch.is_grad_enabled() else operator)(*given, **named)

        return cast(_Definition, called)

    return made


def _of_project(weight: Tensor, x: Tensor) -> Tensor:
    return x.new_empty([x.shape[0], weight.shape[0], x.shape[2]])


@opaque(fake=_of_project)
def project(weight: Tensor, x: Tensor) -> Tensor:
    """weight [M, F] times each step of x [T, F, B]: [T, M, B]."""
    return torch.matmul(weight, x)


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


@opaque(0)
def state_before(h: Tensor, h0: Tensor, backwards: bool) -> Tensor:
    """The state before each step, from all states [T, H, B] and the first [H, B]."""
    first = h0.unsqueeze(0)
    return torch.cat([h[1:], first]) if backwards else torch.cat([first, h[:-1]])


@opaque(0)
def rnn_scan(x: Tensor, h0: Tensor, weight: Tensor, relu: bool, backwards: bool) -> Tensor:
    """h_t = act(x_t + weight h_{t-1}); x [T, H, B], h0 [H, B], weight [H, H] -> h [T, H, B]."""
    h: list[Tensor] = []
    state = h0
    for t in _order(x.shape[0], backwards):
        state = x[t] + weight @ state
        state = state.relu() if relu else state.tanh()
        h.append(state)
    return _stacked(h, backwards)


@opaque(*[1] * 5)
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
    found: list[tuple[Tensor, ...]] = []
    state = h0
    for t in _order(candidate.shape[0], backwards):
        r, z = torch.sigmoid(gates[t] + weight_gates @ state).chunk(2)
        share = weight_candidate @ state + bias_candidate
        n = torch.tanh(candidate[t] + r * share)
        state = n + z * (state - n)
        found.append((state, r, z, n, share))
    h, *others = (_stacked(each, backwards) for each in zip(*found, strict=True))
    return h, others[0], others[1], others[2], others[3]


def _of_lstm_scan(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight_gates: Tensor,
    weight_candidate: Tensor,
    bias_gates: Tensor | None,
    bias_candidate: Tensor | None,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    steps, _, batch = x.shape
    h, i, f, o, g, kept, squashed = (x.new_empty([steps, h0.shape[0], batch]) for _ in range(7))
    pairs = x.new_empty([steps, weight_gates.shape[1], batch])
    return pairs, h, i, f, o, g, kept, squashed, torch.empty_like(c0)


@opaque(fake=_of_lstm_scan)
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
    found: list[tuple[Tensor, ...]] = []
    state, cell = h0, c0
    for t in _order(x.shape[0], backwards):
        pair = torch.cat([x[t], state])
        gates, candidate = weight_gates @ pair, weight_candidate @ pair
        if bias_gates is not None and bias_candidate is not None:
            gates, candidate = gates + bias_gates, candidate + bias_candidate
        i, f, o = torch.sigmoid(gates).chunk(3)
        g = torch.tanh(candidate)
        kept = f * cell
        cell = kept + i * g
        squashed = torch.tanh(cell)
        state = o * squashed
        found.append((pair, state, i, f, o, g, kept, squashed))
    pairs, h, i, f, o, g, kept, squashed = (
        _stacked(each, backwards) for each in zip(*found, strict=True)
    )
    return pairs, h, i, f, o, g, kept, squashed, cell.clone()


@opaque(0, 3, 1)
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
    totals: list[Tensor] = []
    blocks: list[Tensor] = []
    sent = last
    for t in _order(grad.shape[0], not backwards):
        total = grad[t] + sent
        block = slopes[t] * total
        sent = weight @ block.flatten(0, 1)
        if keep is not None:
            sent = sent + keep[t] * total
        totals.append(total)
        blocks.append(block)
    return _stacked(totals, not backwards), _stacked(blocks, not backwards), sent.clone()


def _of_cell_gradient_scan(
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


@opaque(fake=_of_cell_gradient_scan)
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
    blocks: list[Tensor] = []
    of_input: list[Tensor] = []
    sent_h, sent_c = last_h, last_c
    for t in _order(grad.shape[0], not backwards):
        total = grad[t] + sent_h
        cell = slope[t] * total + sent_c
        blocks.append(slopes[t] * torch.cat([cell, cell, cell, total]))
        inwards, sent_h = (weight @ blocks[-1]).split([features, units])
        of_input.append(inwards)
        sent_c = forget[t] * cell
    of_gates, of_inputs = (_stacked(each, not backwards) for each in (blocks, of_input))
    return of_gates, of_inputs, sent_h.clone(), sent_c.clone()
