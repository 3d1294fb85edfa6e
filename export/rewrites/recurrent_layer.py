"""One direction of one recurrent layer with its gradient: few large products, short scans.

The products of input and weights, and the gradients of all weights, are taken over all steps at
once; only what needs the step before runs inside a scan. Layout as in ``recurrent_scans``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from export.rewrites.recurrent_scans import (
    cell_gradient_scan,
    gru_scan,
    lstm_scan,
    project,
    rnn_scan,
    state_before,
    state_gradient_scan,
)
from export.short_gradients import ShortGradient


@dataclass(frozen=True)
class Weights:
    """torch's weights of one direction of one layer: [K H, F], [K H, H] and two [K H] or None.

    Where an LSTM's output is projected to P numbers: [4 H, P] of the state, and [P, H].
    """

    input: Tensor
    state: Tensor
    input_bias: Tensor | None
    state_bias: Tensor | None
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


def _only_once(x: Tensor) -> str:
    if isinstance(x.shape[0], int):
        return ""
    return "it is recorded step by step, and its number of steps is free"


def _or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


class _Rnn(ShortGradient):
    """h_t = act(W x_t + b + U h_{t-1} + c), act tanh or relu."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h0: Tensor,
        weight: Tensor,
        state_weight: Tensor,
        bias: Tensor | None,
        state_bias: Tensor | None,
        relu: bool,
        backwards: bool,
    ) -> Tensor:
        gates = _projected(weight, x, _both(bias, state_bias))
        h: Tensor = rnn_scan(gates, h0, state_weight, relu, backwards)
        ctx.save_for_backward(x, h0, weight, state_weight, h)
        ctx.settings = relu, backwards, bias is not None
        return h

    @staticmethod
    def only_once(*inputs: Any) -> str:
        return _only_once(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, h0, weight, state_weight, h = ctx.saved_tensors
        relu, backwards, biased = ctx.settings
        slopes = (h > 0).to(h.dtype) if relu else 1 - h * h
        _, blocks, grad_h0 = state_gradient_scan(
            grad, torch.zeros_like(h0), None, slopes.unsqueeze(1), state_weight.t(), backwards
        )
        flat = _flat(blocks.squeeze(1))
        grad_bias = flat.sum(1) if biased else None
        return (
            _input_gradient(weight, flat, x) if ctx.needs_input_grad[0] else None,
            grad_h0,
            flat @ _flat(x).t(),
            flat @ _flat(state_before(h, h0, backwards)).t(),
            grad_bias,
            grad_bias,
            None,
            None,
        )


class _Gru(ShortGradient):
    """The equations of torch.nn.GRU for one layer and direction."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h0: Tensor,
        weight: Tensor,
        state_weight: Tensor,
        bias: Tensor | None,
        state_bias: Tensor | None,
        backwards: bool,
    ) -> Tensor:
        units = h0.shape[0]
        cut = 2 * units
        if bias is None or state_bias is None:
            gate_bias, candidate_bias = None, None
            share_bias = torch.zeros_like(state_weight[:units, :1])
        else:
            gate_bias, candidate_bias = bias[:cut] + state_bias[:cut], bias[cut:]
            share_bias = state_bias[cut:].unsqueeze(1)
        h: Tensor
        h, r, z, n, share = gru_scan(
            _projected(weight[:cut], x, gate_bias),
            _projected(weight[cut:], x, candidate_bias),
            h0,
            state_weight[:cut],
            state_weight[cut:],
            share_bias,
            backwards,
        )
        ctx.save_for_backward(x, h0, weight, state_weight, h, r, z, n, share)
        ctx.settings = backwards, bias is not None
        return h

    @staticmethod
    def only_once(*inputs: Any) -> str:
        return _only_once(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, h0, weight, state_weight, h, r, z, n, share = ctx.saved_tensors
        backwards, biased = ctx.settings
        units = h0.shape[0]
        cut = 2 * units
        before = state_before(h, h0, backwards)
        slope_n = (1 - z) * (1 - n * n)
        slope_share = slope_n * r
        slope_r = slope_share * (1 - r) * share
        slope_z = z * (before - h)  # is (before - n) (1 - z) z
        slopes = torch.stack([slope_r, slope_z, slope_share], dim=1)
        total, blocks, grad_h0 = state_gradient_scan(
            grad, torch.zeros_like(h0), z, slopes, state_weight.t(), backwards
        )
        steps, batch = x.shape[0], x.shape[2]
        state_flat = _flat(blocks.reshape(steps, 3 * units, batch))
        candidate_flat = _flat(total * slope_n)
        flat = torch.cat([state_flat[:cut], candidate_flat])
        grad_bias, grad_state_bias = None, None
        if biased:  # the gates' two biases have one gradient
            grad_state_bias = state_flat.sum(1)
            grad_bias = torch.cat([grad_state_bias[:cut], candidate_flat.sum(1)])
        return (
            _input_gradient(weight, flat, x) if ctx.needs_input_grad[0] else None,
            grad_h0,
            flat @ _flat(x).t(),
            state_flat @ _flat(before).t(),
            grad_bias,
            grad_state_bias,
            None,
        )


class _Lstm(ShortGradient):
    """The equations of torch.nn.LSTM for one layer and direction, without projection."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        weight: Tensor,
        state_weight: Tensor,
        bias: Tensor | None,
        state_bias: Tensor | None,
        backwards: bool,
    ) -> tuple[Tensor, Tensor]:
        units = h0.shape[0]
        both = _both(bias, state_bias)

        def gates(w: Tensor) -> Tensor:
            return torch.cat([w[: 2 * units], w[3 * units :]])

        def candidate(w: Tensor) -> Tensor:
            return w[2 * units : 3 * units]

        pairs, h, *saved, last_c = lstm_scan(
            x,
            h0,
            c0,
            torch.cat([gates(weight), gates(state_weight)], 1),
            torch.cat([candidate(weight), candidate(state_weight)], 1),
            None if both is None else gates(both).unsqueeze(1),
            None if both is None else candidate(both).unsqueeze(1),
            backwards,
        )
        ctx.save_for_backward(pairs, c0, weight, state_weight, h, *saved)
        ctx.settings = backwards, bias is not None
        ctx.set_materialize_grads(False)
        return h, last_c

    @staticmethod
    def only_once(*inputs: Any) -> str:
        return _only_once(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_c: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs, c0, weight, state_weight, h, i, f, o, g, kept, squashed = ctx.saved_tensors
        backwards, biased = ctx.settings
        features = weight.shape[1]
        to_cell = i * g
        slopes = torch.cat(
            [
                to_cell * (1 - i),
                kept * (1 - f),
                i - to_cell * g,
                h * (1 - o),
            ],
            dim=1,
        )
        inwards = ctx.needs_input_grad[0]
        back = state_weight.t()
        blocks, grad_x, grad_h0, grad_c0 = cell_gradient_scan(
            _or_zero(grad, h),
            torch.zeros_like(c0),
            _or_zero(grad_c, c0),
            o - h * squashed,
            f,
            slopes,
            torch.cat([weight.t(), back]) if inwards else back,
            backwards,
        )
        flat = _flat(blocks)
        grad_bias = flat.sum(1) if biased else None
        of_weights = flat @ _flat(pairs).t()
        return (
            grad_x if inwards else None,
            grad_h0,
            grad_c0,
            of_weights[:, :features],
            of_weights[:, features:],
            grad_bias,
            grad_bias,
            None,
        )


def rnn_layer(x: Tensor, h0: Tensor, weights: Weights, relu: bool, backwards: bool) -> Tensor:
    """All hidden states [T, H, B] of x [T, F, B] from h0 [H, B]."""
    w = weights
    h: Tensor = _Rnn.apply(x, h0, w.input, w.state, w.input_bias, w.state_bias, relu, backwards)
    return h


def gru_layer(x: Tensor, h0: Tensor, weights: Weights, backwards: bool) -> Tensor:
    """All hidden states [T, H, B] of x [T, F, B] from h0 [H, B]."""
    w = weights
    h: Tensor = _Gru.apply(x, h0, w.input, w.state, w.input_bias, w.state_bias, backwards)
    return h


def lstm_layer(
    x: Tensor, h0: Tensor, c0: Tensor, weights: Weights, backwards: bool
) -> tuple[Tensor, Tensor]:
    """All hidden states [T, H, B] of x [T, F, B] from h0 and c0 [H, B], and the last cell."""
    w = weights
    h: Tensor
    last: Tensor
    h, last = _Lstm.apply(x, h0, c0, w.input, w.state, w.input_bias, w.state_bias, backwards)
    return h, last
