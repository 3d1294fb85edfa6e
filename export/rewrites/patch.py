"""Puts the rewrites in place while a model is traced, and takes them out again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as functional
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from export.errors import ExportError
from export.rewrites import dropout, losses, normalisation, recurrent
from export.rewrites.activations import gelu
from export.rewrites.dropout import Randomness
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
        starts = offsets[:-1] if include_last_offset else offsets
        position = torch.arange(input.shape[0])
        bag = (position.unsqueeze(1) >= starts.unsqueeze(0)).sum(1) - 1
        empty = torch.zeros(starts.shape[0], weight.shape[1], dtype=weight.dtype)
        total = empty.index_add(0, bag, rows)
        count = torch.zeros(starts.shape[0], dtype=weight.dtype).index_add(0, bag, counted)
    if mode == "sum":
        return total
    return total / count.clamp(min=1).unsqueeze(-1)


# One-hot rows that refuse a class that is none.


def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """``torch.nn.functional.one_hot``, which is recorded as a comparison that is true of no class.

    As a lookup first, it refuses what torch refuses.
    """
    classes = torch.arange(num_classes)
    return (functional.embedding(input, classes.unsqueeze(1)) == classes).to(torch.int64)


class _InTraining(TorchFunctionMode):
    """By a mode, since torch's own are built-in functions, which a model may have imported itself
    or hold as an attribute."""

    _OURS: ClassVar[dict[Any, Callable[..., Tensor]]] = {
        functional.one_hot: one_hot,
        functional.gelu: gelu,
    }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._OURS.get(func, func)(*args, **(kwargs or {}))


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
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        *dropout.replacements(randomness),
        *recurrent.replacements(),
        *checkpoint_replacements(),
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
        (functional, "nll_loss", losses.nll_loss),
    ]
    with _LOCK, _patched(replacements), _plain_attention(), _plain_convolution():
        yield


@contextmanager
def trainable(randomness: Randomness) -> Iterator[None]:
    """Inside, all is recordable, and what torch refuses the recorded step will refuse, too."""
    with recordable(randomness), _InTraining():
        yield


@contextmanager
def seeded(randomness: Randomness) -> Iterator[None]:
    """Inside, dropout draws the masks that the exported graph draws; all else is torch's own."""
    own = dropout.replacements(randomness, own_attention=True)
    replacements = [*own, *recurrent.seeded_replacements(), *checkpoint_replacements()]
    with _LOCK, _patched(replacements), _plain_attention():
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


@contextmanager
def _plain_convolution() -> Iterator[None]:
    """Convolutions consider neither oneDNN nor NNPACK, which torch chooses by the batch's size."""
    mkldnn = torch.backends.mkldnn
    before = mkldnn.set_flags(_enabled=False, _fp32_precision=None)[0]
    try:
        with torch.backends.nnpack.flags(enabled=False):
            yield
    finally:
        mkldnn.set_flags(_enabled=before, _fp32_precision=None)
