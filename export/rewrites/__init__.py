"""What is called in place of torch's functions, while a step is recorded or compared with torch.

One table for each, which the files that hold rewrites fill; ``patch`` puts them in place. Nothing
here knows which files there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any

Replacement = tuple[Any, str, Any]
"""Owner and name of an attribute of a module or class, and what it is set to."""


class Rewrites:
    """What stands for torch's functions.

    Functions of C++ and methods of tensors, which no patched module would reach everywhere, have
    ``equals``; attributes of modules and classes are replaced.
    """

    def __init__(self) -> None:
        self._equals: dict[Any, Callable[..., Any]] = {}
        self._of: dict[Any, list[tuple[Callable[..., bool], Callable[..., Any]]]] = {}
        self.replaced: list[Replacement] = []
        self.added: list[Replacement] = []

    def equals(
        self, functions: Mapping[Any, Callable[..., Any]], *, of: Callable[..., bool] | None = None
    ) -> None:
        """By torch's own function, what is called in its place.

        ``of``: for those arguments alone of which this is true; else the next that is registered
        for the function is asked, at last torch's own.
        """
        for own, function in functions.items():
            if of is not None:
                self._of.setdefault(own, []).append((of, function))
            elif self._equals.setdefault(own, function) is not function:
                raise ValueError(f"{own} has two equals")

    def replaces(self, *replacements: Replacement) -> None:
        """Attributes that torch has."""
        self.replaced.extend(replacements)

    def adds(self, *replacements: Replacement) -> None:
        """Attributes that torch may lack."""
        self.added.extend(replacements)

    def calls(self) -> dict[Any, Callable[..., Any]]:
        """What is called, by torch's own function."""
        return {
            own: _first(self._of.get(own, ()), self._equals.get(own, own))
            for own in (*self._equals, *self._of)
        }


def _first(several: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    if not several:
        return otherwise

    def call(*args: Any, **kwargs: Any) -> Any:
        for of, function in several:
            if of(*args, **kwargs):
                return function(*args, **kwargs)
        return otherwise(*args, **kwargs)

    return call


def taking(own: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of a rewrite of ``own``, a function of Python's: it is called as torch's own is.

    It names those of torch's arguments that it goes by; ``settings`` are all of them, by name.
    """
    torchs = signature(own)

    def taken(function: Callable[..., Any]) -> Callable[..., Any]:
        names = [name for name in signature(function).parameters if name != "settings"]
        whole = len(names) < len(signature(function).parameters)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = torchs.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            settings = {"settings": given} if whole else {}
            return function(**{name: given[name] for name in names}, **settings)

        return call

    return taken


RECORDED = Rewrites()
"""While a function of torch is recorded."""

TRAINED = Rewrites()
"""Beside those, while a train step is: what torch refuses, the recorded step refuses, too."""

BESIDE = Rewrites()
"""While torch computes what a step is compared with: all else is its own."""
