"""Runs a model in float64 although parts of it ask for float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


def _widened(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        return value.to(torch.float64)
    return value


class _Widening(TorchDispatchMode):
    """Below autograd, float32 tensors and requests for float32 become float64."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map(_widened, args), **tree_map(_widened, kwargs or {}))


@contextmanager
def in_double() -> Iterator[None]:
    """Inside, all float32 arithmetic is float64: ``x.float()``, ``torch.zeros(3)``, constants.

    A model whose parameters are float64 would fail on these, or lose the digits that make it a
    reference.
    """
    default = torch.get_default_dtype()
    if default == torch.float32:
        torch.set_default_dtype(torch.float64)
    try:
        with _Widening():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(default)
