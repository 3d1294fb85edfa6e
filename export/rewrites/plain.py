"""What torch does beside a step's result, left out.

Checks of its own that read data, ways to the same result that save time or memory, reduced
precision, and what Python makes of a tensor's length.
"""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as functional
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from export.arguments import changed
from export.errors import ExportError
from export.insides import disable_current_modes
from export.rewrites import BESIDE, RECORDED

# Checks are expectations of values that no graph has while it is recorded, and that the values of a
# batch drawn anew need not meet.

_NO_AXES = torch.Size()
_torchs_own = Distribution.__init__


def _unvalidated(
    self: Distribution,
    batch_shape: Any = _NO_AXES,
    event_shape: Any = _NO_AXES,
    validate_args: bool | None = None,
) -> None:
    _torchs_own(self, batch_shape, event_shape, validate_args=False)


def _declared(mask: Tensor | None, is_causal: bool | None = None, size: Any = None) -> bool:
    """Whether a mask is causal: where the caller says so. Any other is a mask like another."""
    return bool(is_causal)


# Activation checkpointing is a plain call. A graph keeps what its backward pass needs; a
# recomputation during that would find the model without this step's tensors in it, and would draw
# other dropout masks.


def _plain(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _Plain:
    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


for _table in (RECORDED, BESIDE):
    _table.replaces(
        (Distribution, "__init__", _unvalidated),
        (Distribution, "_validate_args", False),
        (torch.nn.modules.transformer, "_detect_is_causal_mask", _declared),
        # What ``torch.utils.checkpoint.checkpoint`` looks up when it is called, in both its ways.
        # Since torch 2.14 the first has another name, and its old one is there for others alone.
        *(
            (torch.utils.checkpoint, name, _plain)
            for name in vars(torch.utils.checkpoint)
            if name.startswith("_checkpoint_without_reentrant_generator")
        ),
        (torch.utils.checkpoint, "CheckpointFunction", _Plain),
    )


# Gradients of tables without their zeros, logits of many classes by pieces.


def _without(own: Callable[..., Any], argument: str) -> Callable[..., Any]:
    def plain(*args: Any, **kwargs: Any) -> Any:
        given = signature(own).bind(*args, **kwargs)
        given.arguments.pop(argument, None)
        return own(**given.arguments)

    return plain


_BY_PIECES = getattr(functional, "linear_cross_entropy", None)  # since torch 2.13
for _table in (RECORDED, BESIDE):
    _table.equals({functional.embedding_bag: _without(functional.embedding_bag, "sparse")})
    if _BY_PIECES is not None:
        _table.equals({_BY_PIECES: _without(_BY_PIECES, "options")})
# Recorded, lookups are plain in ``lookups``.
BESIDE.equals({functional.embedding: _without(functional.embedding, "sparse")})


_len = len


def length(value: Any) -> Any:
    """``len``; of a tensor, its first size, of which Python's own would make a number."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() > 0 else _len(value)


RECORDED.replaces((builtins, "len", length))


# Reduced precision left out, autocast and casts: a device's step is float32 throughout.

_REDUCED = (torch.bfloat16, torch.float16)


# What one export has said.
_SAID: set[str] = set()


def _say(what: str, stacklevel: int) -> None:
    if what not in _SAID:
        _SAID.add(what)
        text = f"{what} the exported step, which computes in float32 throughout"
        warnings.warn(text, stacklevel=stacklevel + 1)


def _enter(self: torch.autocast) -> torch.autocast:
    return self


def _enter_and_say(self: torch.autocast) -> torch.autocast:
    if self._enabled:
        _say("autocast is left out of", 2)
    return self


def _leave(self: torch.autocast, *error: Any) -> None:
    """Nothing was entered."""


# With a warning for who asked for it.
RECORDED.replaces((torch.autocast, "__enter__", _enter_and_say))
BESIDE.replaces((torch.autocast, "__enter__", _enter))
for _table in (RECORDED, BESIDE):
    _table.replaces((torch.autocast, "__exit__", _leave))


class FullPrecision(TorchFunctionMode):
    """Inside, what is asked for in float16 or bfloat16 is float32, which it says if ``saying``.

    Numbers that the code itself gives (``torch.tensor(0.1, dtype=torch.bfloat16)``) are rounded.
    """

    def __init__(self, *, saying: bool) -> None:
        super().__init__()
        self._saying = saying

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        reduced: Any = {Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}.get(func)
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
        reduced = next((dtype for dtype in given if dtype in _REDUCED), reduced)
        if reduced is None:
            return func(*args, **kwargs)
        if func is Tensor.view:
            raise ExportError(
                f"the bits of a tensor are read as {reduced}, which a float32 step has not",
                operator="view",
                instead="a cast (x.to(...)), which the step leaves out",
            )
        if self._saying:
            _say(f"what the model computes as {reduced} is float32 in", 2)
        if func in (Tensor.half, Tensor.bfloat16):
            return args[0].float()
        args, kwargs = changed(_wider, (args, kwargs))
        if func is torch.tensor:
            args = (changed(lambda number: _rounded(number, reduced), args[0]), *args[1:])
        return func(*args, **kwargs)


def _wider(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in _REDUCED else value


def _rounded(number: Any, dtype: torch.dtype) -> Any:
    if not isinstance(number, float):
        return number
    with disable_current_modes():
        return torch.tensor(number, dtype=dtype).item()


@contextmanager
def held_in_float32(model: nn.Module) -> Iterator[None]:
    """Inside, parameters and buffers of float16 or bfloat16 are float32, of the same values.

    One export is inside: what is left out of it is said once.
    """
    reduced = [
        (name, tensor, tensor.data)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.dtype in _REDUCED
    ]
    try:
        for _, tensor, values in reduced:
            tensor.data = values.float()
        if reduced:
            name, _, values = reduced[0]
            more = f" (and {len(reduced) - 1} more of the model's)" if len(reduced) > 1 else ""
            _say(f"{name!r}, {values.dtype}{more}, is float32 in", 4)
        yield
    finally:
        _SAID.clear()
        for _, tensor, values in reduced:
            tensor.data = values
