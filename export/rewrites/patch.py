"""Puts the rewrites in place while a model is traced, and takes them out again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as functional

from export.rewrites import (
    attention_projection,
    batch_norm,
    batch_norm_layer,
    binary_cross_entropy,
    checkpoint,
    cross_entropy,
    dropout,
    embedding_bag,
    group_norm,
    layer_norm,
    recurrent,
)
from export.rewrites.randomness import Randomness

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
        *checkpoint.replacements(),
        (functional, "batch_norm", batch_norm.batch_norm),
        (torch.nn.modules.batchnorm._BatchNorm, "forward", batch_norm_layer.forward),
        (functional, "embedding_bag", embedding_bag.embedding_bag),
        (functional, "group_norm", group_norm.group_norm),
        (functional, "instance_norm", group_norm.instance_norm),
        (functional, "layer_norm", layer_norm.layer_norm),
        (functional, "_in_projection_packed", attention_projection.in_projection_packed),
        (
            functional,
            "binary_cross_entropy_with_logits",
            binary_cross_entropy.binary_cross_entropy_with_logits,
        ),
        (functional, "cross_entropy", cross_entropy.cross_entropy),
        (functional, "nll_loss", cross_entropy.nll_loss),
    ]
    with _LOCK, _patched(replacements), _plain_attention(), _plain_convolution():
        yield


@contextmanager
def seeded(randomness: Randomness) -> Iterator[None]:
    """Inside, dropout draws the masks that the exported graph draws; all else is torch's own."""
    own = dropout.replacements(randomness, own_attention=True)
    replacements = [*own, *recurrent.seeded_replacements(), *checkpoint.replacements()]
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
