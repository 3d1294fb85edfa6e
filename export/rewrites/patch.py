"""Puts the rewrites in place while a model is traced, and takes them out again."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import isbuiltin
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from export.errors import ExportError
from export.rewrites import (
    Equals,
    Replacement,
    activations,
    attention,
    bags,
    checkpointing,
    checks,
    classes,
    ctc,
    distances,
    dropout,
    experts,
    fourier,
    inverses,
    lengths,
    losses,
    normalisation,
    numbers,
    plain_ways,
    pooling,
    precision,
    products,
    quantisation,
    recurrent,
    sampling,
    sparse,
    tables,
    upsampling,
)
from export.rewrites.randomness import RandomFunctions, Randomness

# While a step is recorded; what files say of themselves.
_REPLACED: Sequence[Replacement] = (
    *attention.REPLACED,
    *bags.REPLACED,
    *checkpointing.REPLACED,
    *checks.REPLACED,
    *ctc.REPLACED,
    *lengths.REPLACED,
    *losses.REPLACED,
    *normalisation.REPLACED,
    *numbers.REPLACED,
    *precision.REPLACED,
    *sparse.REPLACED,
    *upsampling.REPLACED,
)
_EQUALS: Equals = {
    **distances.EQUALS,
    **experts.EQUALS,
    **fourier.EQUALS,
    **inverses.EQUALS,
    **numbers.EQUALS,
    **plain_ways.EQUALS,
    **pooling.EQUALS,
    **products.EQUALS,
    **quantisation.EQUALS,
    **sampling.EQUALS,
    **sparse.EQUALS,
    **tables.EQUALS,
    **bags.EQUALS,  # in place of the plain way to look rows up
}
_REFUSING: Equals = {**activations.EQUALS, **classes.EQUALS}
# While torch computes what a step is compared with: all else is its own.
_REPLACED_BESIDE: Sequence[Replacement] = (
    *checkpointing.REPLACED,
    *checks.REPLACED,
    *precision.QUIETLY,
    *sparse.REPLACED_BESIDE,
)
# torch's own of experts and quantisation exist in float32 only.
_EQUALS_BESIDE: Equals = {**experts.EQUALS, **plain_ways.EQUALS, **quantisation.EQUALS}


class _Replaced(TorchFunctionMode):
    """Calls equals of some of torch's functions, however a model came to hold those."""

    def __init__(self, equals: Equals) -> None:
        super().__init__()
        self._equals = equals

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._equals.get(func, func)(*args, **(kwargs or {}))


_LOCK = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Holds other threads' exports back: recording patches torch, and torch's tracer is global."""
    with _LOCK:
        yield


@contextmanager
def recordable(randomness: Randomness) -> Iterator[None]:
    """Inside, torch's functions that cannot be recorded are replaced by equals that can."""
    drawing = dropout.replacements(randomness)
    layers = (*recurrent.replacements(), *quantisation.replacements())
    full = precision.FullPrecision(saying=True)
    with _in_place(randomness, drawing, (*layers, *_REPLACED), _EQUALS, numbers.ADDED), full:
        yield


@contextmanager
def trainable(randomness: Randomness) -> Iterator[None]:
    """Inside, all is recordable, and what torch refuses the recorded step will refuse, too."""
    with recordable(randomness), _Replaced(_REFUSING):
        yield


@contextmanager
def seeded(randomness: Randomness) -> Iterator[None]:
    """Inside, torch draws the numbers that the exported graph draws; all else is torch's own."""
    drawing = dropout.replacements(randomness, own_attention=True)
    replaced = (*recurrent.seeded_replacements(), *_REPLACED_BESIDE)
    full = precision.FullPrecision(saying=False)
    with _in_place(randomness, drawing, replaced, _EQUALS_BESIDE), full:
        yield


@contextmanager
def _in_place(
    randomness: Randomness,
    drawing: Sequence[Replacement],
    replaced: Sequence[Replacement],
    equals: Equals,
    added: Sequence[Replacement] = (),
) -> Iterator[None]:
    """Patches module attributes, so it holds a lock: one export at a time in a process."""
    by_own = {getattr(owner, name, None): function for owner, name, function in drawing}
    # A model may have imported those of C++ before.
    held = {own: function for own, function in by_own.items() if isbuiltin(own)}
    with (
        _LOCK,
        patched((*drawing, *replaced), added),
        _plain_attention(),
        RandomFunctions(randomness),
        _Replaced({**equals, **held}),
    ):
        yield


@contextmanager
def patched(
    replacements: Sequence[Replacement], added: Sequence[Replacement] = ()
) -> Iterator[None]:
    """Inside, each owner's attribute of that name is another one, or is there at all.

    Raises ExportError where torch has none to replace: torch would call its own, under a new name.
    """
    gone = [
        f"{owner.__name__}.{name}" for owner, name, _ in replacements if not hasattr(owner, name)
    ]
    if gone:
        raise ExportError(
            f"torch {torch.__version__} has no {', '.join(gone)}, which recording a step replaces",
            instead="pip install --upgrade 'tessera-edge[export]', "
            "which installs a torch that this release was run with",
        )
    every = (*replacements, *added)
    # What an owner has of its own: it inherits or finds the others again.
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in every]
    try:
        for owner, name, function in every:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, own in before:
            if own is not _ABSENT:
                setattr(owner, name, own)
            elif name in vars(owner):
                delattr(owner, name)


_ABSENT = object()


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Attention layers take the path of plain products instead of a fused inference kernel."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
