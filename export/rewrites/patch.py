"""Puts the rewrites in place while a model is traced, and takes them out again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import isbuiltin
from threading import get_ident
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import export.rewrites.losses
import export.rewrites.normalisation
import export.rewrites.numbers
import export.rewrites.pictures
import export.rewrites.plain
import export.rewrites.recurrent
import export.rewrites.tables  # noqa: F401
from export.errors import ExportError
from export.rewrites import BESIDE, RECORDED, TRAINED, Replacement, Rewrites
from export.rewrites.attention import replacements
from export.rewrites.plain import FullPrecision
from export.rewrites.randomness import RandomFunctions, Randomness


class _Replaced(TorchFunctionMode):
    """Calls equals of some of torch's functions, however a model came to hold those."""

    def __init__(self, equals: Mapping[Any, Callable[..., Any]]) -> None:
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
    with _in_place(randomness, RECORDED, replacements(randomness), saying=True):
        yield


@contextmanager
def trainable(randomness: Randomness) -> Iterator[None]:
    """Inside, all is recordable, and what torch refuses the recorded step will refuse, too."""
    with recordable(randomness), _Replaced(TRAINED.calls()):
        yield


@contextmanager
def seeded(randomness: Randomness) -> Iterator[None]:
    """Inside, torch draws the numbers that the exported graph draws; all else is torch's own."""
    drawing = replacements(randomness, own_attention=True)
    with _in_place(randomness, BESIDE, drawing, saying=False):
        yield


@contextmanager
def _in_place(
    randomness: Randomness, rewrites: Rewrites, drawing: Sequence[Replacement], *, saying: bool
) -> Iterator[None]:
    """Patches module attributes, so it holds a lock: one export at a time in a process."""
    by_own = {getattr(owner, name, None): function for owner, name, function in drawing}
    # A model may have imported those of C++ before.
    held = {own: function for own, function in by_own.items() if isbuiltin(own)}
    with (
        _LOCK,
        patched((*drawing, *rewrites.replaced), rewrites.added),
        without_fast_path(),
        RandomFunctions(randomness),
        _Replaced({**rewrites.calls(), **held}),
        FullPrecision(saying=saying),
    ):
        yield


@contextmanager
def patched(
    replacements: Sequence[Replacement], added: Sequence[Replacement] = ()
) -> Iterator[None]:
    """Inside, each owner's attribute of that name is another one, or is there at all.

    A function is another one for this thread alone: others' calls are the owner's own meanwhile,
    and wait only to replace anything themselves.

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
    with one_at_a_time():
        # What an owner has of its own: it inherits or finds the others again.
        before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in every]
        try:
            for owner, name, value in every:
                setattr(owner, name, _here(getattr(owner, name, _ABSENT), value))
            yield
        finally:
            for owner, name, own in before:
                if own is not _ABSENT:
                    setattr(owner, name, own)
                elif name in vars(owner):
                    delattr(owner, name)


_ABSENT = object()


def _here(own: Any, value: Any) -> Any:
    """The value; of two functions, one that is the value in this thread and the own in others."""
    if not callable(own) or not isinstance(value, FunctionType):
        return value
    here = get_ident()

    @wraps(value)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (value if get_ident() == here else own)(*args, **kwargs)

    return either


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Attention layers take the path of plain products instead of a fused inference kernel."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
