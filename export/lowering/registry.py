"""The closed table of lowerings: which aten operator becomes which ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from export.lowering.channels import followed

LoweringFunction = Callable[..., Any]
"""``lower(graph, out, *args, **kwargs) -> str | tuple[str, ...]``.

``args`` and ``kwargs`` are the aten operator's, with every tensor as a ``Value``; ``out`` is the
operator's fake result (a tensor, or a tuple of them) with dtype and symbolic shape. Returns the
name of the ONNX value, or a tuple of names (None for a result that nothing may use).
"""

_Function = TypeVar("_Function", bound=LoweringFunction)

_TABLE: dict[Any, LoweringFunction] = {}


def lowers(*operators: Any) -> Callable[[_Function], _Function]:
    """Register the decorated function for these aten overloads."""

    def register(function: _Function) -> _Function:
        for operator in operators:
            if operator in _TABLE:
                raise ValueError(f"{operator} has two lowerings")
            pointwise = torch.Tag.pointwise in operator.tags
            _TABLE[operator] = followed(function) if pointwise else function
        return function

    return register


def find(operator: Any) -> LoweringFunction | None:
    """The lowering of an operator overload, or None."""
    return _TABLE.get(operator)


def operators() -> set[Any]:
    """Every operator overload that has a lowering."""
    return set(_TABLE)


_SIMPLER: dict[Any, Callable[..., Any]] = {}


def decomposes(functions: Mapping[Any, Callable[..., Any]]) -> None:
    """Register what breaks an operator up into simpler ones, where torch's own does not serve.

    One that gives NotImplemented leaves this use of the operator as it is.
    """
    for operator, function in functions.items():
        if _SIMPLER.setdefault(operator, function) is not function:
            raise ValueError(f"{operator} has two decompositions")


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Those that were registered, by operator."""
    return dict(_SIMPLER)
