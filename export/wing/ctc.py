"""Connectionist temporal classification (Graves et al. 2006) in log space, all samples at once.

A label sequence of length L has 2 L + 1 places: its labels with a blank before, between and after.
``T`` steps, ``N`` samples, ``C`` classes, ``S`` places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.lowering.opaque import Step, Tensors, scanned
from export.rewrites import RECORDED, taking
from export.short_gradients import ShortGradient

# Stands in for log 0: far below any sum of log probabilities, and no infinity, whose difference
# from itself is no number.
NEVER = -1e30


def _scanned(backwards: bool) -> Step:
    """Logs of the sums over all ways to be at a place at a step, with that step's emission.

    The state [N, S]; parts are the emissions [N, S] and whether the step counts, bool [N, 1] (one
    that does not leaves its sample as it was). What is held, [N, S], is 0 where a place is also
    reached from two places before it, else ``NEVER``. ``backwards`` is from the last place to the
    first. The result is the new state.
    """

    def moved(state: Tensor, places: int) -> Tensor:
        """The state of ``places`` before each place (behind it, where ``backwards``)."""
        nothing = torch.full_like(state[:, :places], NEVER)
        if backwards:
            return torch.cat([state[:, places:], nothing], 1)
        return torch.cat([nothing, state[:, : state.shape[1] - places]], 1)

    def ctc(states: Tensors, parts: Tensors, held: Tensors) -> tuple[Tensors, Tensors]:
        (state,), (emission, active), (skips,) = states, parts, held
        ways = [state, moved(state, 1), moved(state, 2) + skips]
        new = (torch.logsumexp(torch.stack(ways), 0) + emission).clamp(min=NEVER)
        state = torch.where(active, new, state)
        return [state], [state]

    ctc.__name__ = "ctc_back" if backwards else "ctc"
    return ctc


_scans = {backwards: scanned(_scanned(backwards)) for backwards in (False, True)}


def _log(mask: Tensor, like: Tensor) -> Tensor:
    return torch.where(mask, 0.0, NEVER).to(like.dtype)


class _Ctc(ShortGradient):
    """-log P(labels) [N] of log_probs [T, N, C], places' classes [N, S] and lengths [N].

    As in torch, the gradient is exp(log_probs) less the labels' share: that of what log_softmax
    was taken of, which log_softmax's own gradient leaves as it is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        log_probs: Tensor,
        classes: Tensor,
        input_lengths: Tensor,
        target_lengths: Tensor,
        zero_infinity: bool,
    ) -> Tensor:
        steps, places = log_probs.shape[0], classes.shape[1]
        emissions = log_probs.gather(2, classes.expand(steps, -1, -1)).clamp(min=NEVER)
        active = (torch.arange(steps).unsqueeze(1) < input_lengths).unsqueeze(2)
        place = torch.arange(places)
        differs = torch.cat([classes[:, :2] < 0, classes[:, 2:] != classes[:, :-2]], 1)
        skips = _log(differs & (place % 2 == 1), log_probs)
        first = _log((place == 0).expand(classes.shape), log_probs)
        (last,), (alpha,) = _scans[False]([first], [emissions, active], [skips], False)
        end = 2 * target_lengths.unsqueeze(1)
        ends = _log((place == end) | (place == end - 1), log_probs)
        total = torch.logsumexp(last + ends, 1)
        ctx.save_for_backward(
            log_probs, classes, target_lengths, emissions, active, skips, alpha, total
        )
        ctx.zero_infinity = zero_infinity
        impossible = total < NEVER / 2
        return torch.where(impossible, 0.0 if zero_infinity else math.inf, -total)

    @staticmethod
    def only_once(*inputs: Any) -> str:
        return "torch has none either"

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        log_probs, classes, target_lengths, emissions, active, skips, alpha, total = (
            ctx.saved_tensors
        )
        place = torch.arange(classes.shape[1])
        first = _log(place == 2 * target_lengths.unsqueeze(1), log_probs)
        ahead = torch.cat([skips[:, 2:], torch.full_like(skips[:, :2], NEVER)], 1)
        _, (beta,) = _scans[True]([first], [emissions, active], [ahead], True)
        share = torch.exp(alpha + beta - emissions - total.unsqueeze(1))
        hot = (classes.unsqueeze(2) == torch.arange(log_probs.shape[2])).to(log_probs.dtype)
        labels = (share.transpose(0, 1) @ hot).transpose(0, 1)
        of_each = torch.where(active, torch.exp(log_probs) - labels, 0.0)
        if ctx.zero_infinity:
            of_each = torch.where((total < NEVER / 2).unsqueeze(1), 0.0, of_each)
        return of_each * grad.unsqueeze(1), None, None, None, None


def _places(targets: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """[N, 2 L + 1] classes of the places, from targets [N, L] or one after the other [total]."""
    if targets.dim() == 1:
        number = torch.arange(targets.shape[0])
        starts = (lengths.cumsum(0) - lengths).unsqueeze(1)
        targets = targets[(starts + number).clamp(max=targets.shape[0] - 1)]
    number = torch.arange(targets.shape[1])
    labels = torch.where(number < lengths.unsqueeze(1), targets, blank)
    pairs = torch.stack([torch.full_like(labels, blank), labels], 2).flatten(1)
    return torch.cat([pairs, torch.full_like(labels[:, :1], blank)], 1)


@taking(functional.ctc_loss)
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    settings: Mapping[str, Any],
) -> Tensor:
    """``torch.nn.functional.ctc_loss``: log_probs [T, N, C] or [T, C].

    A length beyond the log probabilities or the targets, where torch raises, makes the loss NaN.
    """
    single = log_probs.dim() == 2
    if single:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
    steps, lengths = (
        torch.as_tensor(given).reshape(-1).to(torch.int64)
        for given in (input_lengths, target_lengths)
    )
    classes = _places(targets.to(torch.int64), lengths, settings["blank"])
    losses: Tensor = _Ctc.apply(log_probs, classes, steps, lengths, settings["zero_infinity"])
    longest = targets.shape[-1]
    losses = torch.where((steps > log_probs.shape[0]) | (lengths > longest), math.nan, losses)
    reduction = settings["reduction"]
    if reduction == "none":
        return losses[0] if single else losses
    if reduction == "sum":
        return losses.sum()
    return (losses / lengths.clamp(min=1).to(losses.dtype)).mean()


RECORDED.replaces((functional, "ctc_loss", ctc_loss))
