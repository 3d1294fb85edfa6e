"""Puts the rewrites in place while a model is traced, and takes them out again."""

from __future__ import annotations

import builtins
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import isbuiltin, signature
from typing import Any

import torch
import torch.nn.functional as functional
import torch.utils.checkpoint
from torch import Tensor
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from export.errors import ExportError
from export.rewrites import (
    ctc,
    distances,
    dropout,
    experts,
    fourier,
    losses,
    normalisation,
    products,
    quantisation,
    recurrent,
    sampling,
    sparse,
    tables,
)
from export.rewrites.activations import gelu
from export.rewrites.randomness import RandomFunctions, Randomness
from export.rewrites.upsampling import interpolate

# The joint projection of self-attention as one product and a split.
#
# torch folds query, key and value into a stacked axis; the gradient of taking that apart is
# three padded tensors and two sums. A split's gradient is one concatenation.

_torchs_own: Callable[..., list[Tensor]] = vars(functional)["_in_projection_packed"]


def in_projection_packed(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None
) -> list[Tensor]:
    """``torch.nn.functional._in_projection_packed``: w [3 * e, e], b [3 * e] or None."""
    if q is k and k is v:
        # Of a transposed tensor torch would add the bias apart from the product.
        parts = functional.linear(q.contiguous(), w, b).split(q.shape[-1], dim=-1)
        return [part.contiguous() for part in parts]
    return _torchs_own(q, k, v, w, b)


# Activation checkpointing as a plain call.
#
# A graph keeps what its backward pass needs. A recomputation during the backward pass would
# find the model without this step's tensors in it, and would draw other dropout masks.


def _plain(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _Plain:
    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def checkpoint_replacements() -> list[tuple[Any, str, Any]]:
    """What ``torch.utils.checkpoint.checkpoint`` looks up when it is called, in both its ways."""
    module = torch.utils.checkpoint
    return [
        (module, "_checkpoint_without_reentrant_generator", _plain),
        (module, "CheckpointFunction", _Plain),
    ]


# Bags of embeddings as a lookup and a sum.


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """``torch.nn.functional.embedding_bag`` in modes sum and mean.

    input int64 [bags, n], or [total] with ``offsets`` [bags]; result float32 [bags, dim].
    """
    if mode not in ("sum", "mean"):
        raise ExportError(
            f"embedding bags in mode {mode!r}", operator="embedding_bag", instead="sum or mean"
        )
    if max_norm is not None or scale_grad_by_freq:
        raise ExportError(
            "max_norm and scale_grad_by_freq change the table outside the optimizer",
            operator="embedding_bag",
            instead="a penalty in the loss",
        )
    rows = functional.embedding(input, weight)
    counted = torch.ones_like(input).to(weight.dtype)
    if padding_idx is not None:
        counted = (input != padding_idx % weight.shape[0]).to(weight.dtype)
        rows = rows * counted.unsqueeze(-1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if offsets is None:
        total, count = rows.sum(1), counted.sum(1)
    else:
        # A lookup that refuses the offsets that torch refuses: those beyond the input.
        ends = torch.zeros(input.shape[0] + 1, dtype=offsets.dtype)
        offsets = offsets + ends.index_select(0, offsets)
        starts = offsets[:-1] if include_last_offset else offsets
        position = torch.arange(input.shape[0])
        bag = (position.unsqueeze(1) >= starts.unsqueeze(0)).sum(1) - 1
        empty = torch.zeros(starts.shape[0], weight.shape[1], dtype=weight.dtype)
        total = empty.index_add(0, bag, rows)
        count = torch.zeros(starts.shape[0], dtype=weight.dtype).index_add(0, bag, counted)
    if mode == "sum":
        return total
    return total / count.clamp(min=1).unsqueeze(-1)


# Ways to the same result that save torch time or memory: gradients of tables without their zeros,
# logits of many classes by pieces.


def _without(own: Callable[..., Any], argument: str) -> Callable[..., Any]:
    def plain(*args: Any, **kwargs: Any) -> Any:
        given = signature(own).bind(*args, **kwargs)
        given.arguments.pop(argument, None)
        return own(**given.arguments)

    return plain


_THE_PLAIN_WAY: dict[Any, Callable[..., Any]] = {
    own: _without(own, argument)
    for own, argument in (
        (functional.embedding, "sparse"),
        (functional.embedding_bag, "sparse"),
        # Since torch 2.13.
        (getattr(functional, "linear_cross_entropy", None), "options"),
    )
    if own is not None
}


# torch's checks of its own, which read data: an expectation of values that no graph has while it is
# recorded, and that the values of a batch drawn anew need not meet.


_NO_AXES = torch.Size()


def unchecked_replacements() -> list[tuple[Any, str, Any]]:
    """Distributions without validation, and masks that are causal where the caller says so.

    A causal mask that nobody declared is a mask like any other.
    """
    own = Distribution.__init__

    def init(
        self: Distribution,
        batch_shape: Any = _NO_AXES,
        event_shape: Any = _NO_AXES,
        validate_args: bool | None = None,
    ) -> None:
        own(self, batch_shape, event_shape, validate_args=False)

    def declared(mask: Tensor | None, is_causal: bool | None = None, size: Any = None) -> bool:
        return bool(is_causal)

    return [
        (Distribution, "__init__", init),
        (Distribution, "_validate_args", False),
        (torch.nn.modules.transformer, "_detect_is_causal_mask", declared),
    ]


# Autocast, which is left out: a device's step is float32 throughout.


def float32_replacements(*, say: bool) -> list[tuple[Any, str, Any]]:
    """``torch.autocast`` as nothing; with ``say``, a warning for who asked for it."""

    def enter(self: torch.autocast) -> torch.autocast:
        if say and self._enabled:
            warnings.warn(
                "autocast is left out of the exported step, which computes in float32 throughout",
                stacklevel=2,
            )
        return self

    def leave(self: torch.autocast, *error: Any) -> None:
        """Nothing was entered."""

    return [(torch.autocast, "__enter__", enter), (torch.autocast, "__exit__", leave)]


# One-hot rows that refuse a class that is none.


def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """``torch.nn.functional.one_hot``, which is recorded as a comparison that is true of no class.

    As a lookup first, it refuses what torch refuses.
    """
    classes = torch.arange(num_classes)
    return (functional.embedding(input, classes.unsqueeze(1)) == classes).to(torch.int64)


# The length of a tensor whose first axis is free: Python's own makes a number of it.

_len = len


def length(value: Any) -> Any:
    """``len``; of a tensor, its first size."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() > 0 else _len(value)


# Means over images whose channels come last: torch would set the strides of a mean over all places.

_torchs_mean: Callable[..., Tensor] = functional.adaptive_avg_pool2d


def adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Tensor:
    """``torch.nn.functional.adaptive_avg_pool2d``."""
    return _torchs_mean(input.contiguous(), output_size)


class _Replaced(TorchFunctionMode):
    """Calls equals of some of torch's functions, however a model came to hold those."""

    def __init__(self, equals: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._equals = equals

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._equals.get(func, func)(*args, **(kwargs or {}))


# Functions of C++ and methods of tensors, which a patched module would not reach everywhere.
_EQUALS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: tables.sliced,
    Tensor.__setitem__: tables.assigned,
    _torchs_mean: adaptive_avg_pool2d,
    functional.pdist: distances.pdist,
    torch.cdist: distances.cdist,
    torch.pdist: distances.pdist,
    Tensor.masked_select: tables.masked_select,
    torch.masked_select: tables.masked_select,
    Tensor.masked_scatter: tables.masked_scatter,
    torch.masked_scatter: tables.masked_scatter,
    Tensor.fill_diagonal_: tables.fill_diagonal_,
    **experts.EQUALS,
    **fourier.EQUALS,
    **products.EQUALS,
    **quantisation.EQUALS,
    **sampling.EQUALS,
    **sparse.EQUALS,
    **_THE_PLAIN_WAY,
}


def _held(
    replacements: list[tuple[Any, str, Callable[..., Any]]],
) -> dict[Any, Callable[..., Any]]:
    """By torch's functions of C++, what stands for them; a model may have imported them before."""
    found = {getattr(owner, name): function for owner, name, function in replacements}
    return {own: function for own, function in found.items() if isbuiltin(own)}


_LOCK = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Holds other threads' exports back: recording patches torch, and torch's tracer is global."""
    with _LOCK:
        yield


@contextmanager
def recordable(randomness: Randomness) -> Iterator[None]:
    """Inside, torch's functions that cannot be recorded are replaced by equals that can.

    Patches module attributes, so it holds a lock: one export at a time in a process.
    """
    drops = dropout.replacements(randomness)
    held = _held(drops)
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        *drops,
        *recurrent.replacements(),
        *checkpoint_replacements(),
        *quantisation.replacements(),
        *unchecked_replacements(),
        *float32_replacements(say=True),
        (builtins, "len", length),
        (functional, "batch_norm", normalisation.batch_norm),
        (torch.nn.modules.batchnorm._BatchNorm, "forward", normalisation.batch_norm_layer_forward),
        (functional, "embedding_bag", embedding_bag),
        (functional, "group_norm", normalisation.group_norm),
        (functional, "instance_norm", normalisation.instance_norm),
        (functional, "interpolate", interpolate),
        (functional, "layer_norm", normalisation.layer_norm),
        (functional, "_in_projection_packed", in_projection_packed),
        (
            functional,
            "binary_cross_entropy_with_logits",
            losses.binary_cross_entropy_with_logits,
        ),
        (functional, "cross_entropy", losses.cross_entropy),
        (functional, "ctc_loss", ctc.ctc_loss),
        (functional, "nll_loss", losses.nll_loss),
        (functional, "gaussian_nll_loss", losses.gaussian_nll_loss),
    ]
    with (
        _LOCK,
        _patched(replacements),
        _plain_attention(),
        RandomFunctions(randomness),
        _Replaced({**_EQUALS, **held}),
    ):
        yield


@contextmanager
def trainable(randomness: Randomness) -> Iterator[None]:
    """Inside, all is recordable, and what torch refuses the recorded step will refuse, too."""
    with recordable(randomness), _Replaced({functional.one_hot: one_hot, functional.gelu: gelu}):
        yield


@contextmanager
def seeded(randomness: Randomness) -> Iterator[None]:
    """Inside, torch draws the numbers that the exported graph draws; all else is torch's own."""
    drops = dropout.replacements(randomness, own_attention=True)
    held = _held(drops)
    replacements = [
        *drops,
        *recurrent.seeded_replacements(),
        *checkpoint_replacements(),
        *unchecked_replacements(),
        *float32_replacements(say=False),
    ]
    with (
        _LOCK,
        _patched(replacements),
        _plain_attention(),
        RandomFunctions(randomness),
        # torch's own exist in float32 only.
        _Replaced({**experts.EQUALS, **quantisation.EQUALS, **_THE_PLAIN_WAY, **held}),
    ):
        yield


@contextmanager
def _patched(replacements: list[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, function in replacements:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Attention layers take the path of plain products instead of a fused inference kernel."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
