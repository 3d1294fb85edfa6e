"""The closed table of lowerings: which aten operator becomes which ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter, signature
from typing import Any, TypeVar

import torch

from export.lowering.channels import followed

LoweringFunction = Callable[..., Any]
"""``lower(g, out, ...) -> str | tuple[str, ...]``, or without ``out``: ``lower(g, ...)``.

``g`` is the graph, ``out`` the operator's fake result (a tensor, or a tuple of them) with dtype and
symbolic shape. What follows are those of the operator's arguments that the lowering goes by, every
tensor as a ``Value``: by their places, or, behind a ``*``, by torch's names; ``settings`` are all
of them by torch's names. Returns the name of the ONNX value, or a tuple of names (None for a result
that nothing may use).
"""

_Function = TypeVar("_Function", bound=LoweringFunction)

_TABLE: dict[Any, LoweringFunction] = {}


def lowers(*operators: Any) -> Callable[[_Function], _Function]:
    """Register the decorated function for these aten overloads."""

    def register(function: _Function) -> _Function:
        for operator in operators:
            if operator in _TABLE:
                raise ValueError(f"{operator} has two lowerings")
            lowering = function if "out" in signature(function).parameters else _of_any(function)
            pointwise = torch.Tag.pointwise in operator.tags
            _TABLE[operator] = followed(lowering) if pointwise else lowering
        return function

    return register


def _of_any(function: LoweringFunction) -> LoweringFunction:
    """A lowering that its operator's result makes no difference to."""

    @wraps(function)
    def lower(g: Any, out: Any, *args: Any, **kwargs: Any) -> Any:
        return function(g, *args, **kwargs)

    return lower


def find(operator: Any) -> LoweringFunction | None:
    """The lowering of an operator overload, or None."""
    return _TABLE.get(operator)


def arguments(
    function: LoweringFunction, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """What a lowering takes of an operator's arguments."""
    taken = _parameters(function)
    if any(each.kind is each.VAR_POSITIONAL for each in taken):
        return args, {}
    declared = operator._schema.arguments
    given = {each.name: value for each, value in zip(declared, args, strict=False)} | dict(kwargs)
    every = {each.name: each.default_value for each in declared if each.has_default_value()} | given
    by_place = [each.name for each in declared if not each.kwarg_only]
    found: dict[str, Any] = {}
    for place, each in enumerate(taken):
        placed = each.kind is each.POSITIONAL_OR_KEYWORD and place < len(by_place)
        name = by_place[place] if placed else each.name
        if each.name == "settings":
            found["settings"] = every
        elif name in (every if each.default is each.empty else given):
            found[each.name] = every[name]
    return (), found


@cache
def _parameters(function: LoweringFunction) -> Sequence[Parameter]:
    _, *others = signature(function).parameters.values()
    return [each for each in others if each.name != "out"]


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
