"""Sizes that are expressions over the axes' symbols, and what can be said of them at any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from export.insides import SymT, symbol_is_type, tree_leaves

Dim = int | torch.SymInt


def expression(size: Dim) -> sympy.Expr:
    """The size as a sympy expression over the axes' symbols."""
    if isinstance(size, torch.SymInt):
        return size.node.expr
    return sympy.Integer(int(size))


def same(a: Dim, b: Dim) -> bool:
    """Whether two sizes are equal for every size of the axes."""
    return bool(expression(a) == expression(b))


def may_be_empty(size: Dim) -> bool:
    """Whether data decide a size: how many elements a mask selects."""
    return any(_by_data(symbol) for symbol in expression(size).free_symbols)


def _by_data(symbol: sympy.Symbol) -> bool:
    return symbol_is_type(symbol, SymT.UNBACKED_INT)


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are equal for every size of the axes."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def fixed(size: Dim) -> int | None:
    """The size as a number, or None where it depends on an axis."""
    value = expression(size)
    return int(value) if value.is_Integer else None


def never_negative(size: sympy.Expr) -> bool:
    """Whether a size is at least 0 for axes of every length from 1 up, and numbers from 0 up."""
    more = {
        n: sympy.Dummy(integer=True, nonnegative=True) + int(not _by_data(n))
        for n in size.free_symbols
    }
    return bool(sympy.expand(size.xreplace(more)).is_nonnegative)


def numbers_in(value: Any) -> list[sympy.Expr]:
    """The sizes of tensors, or the numbers that it is, as expressions; of a truth its symbol."""
    found: list[sympy.Expr] = []
    for leaf in tree_leaves(value):
        for part in leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,):
            if isinstance(part, torch.SymBool):
                found += part.node.expr.free_symbols
            elif isinstance(part, (torch.SymInt, torch.SymFloat)):
                found.append(part.node.expr)
    return found


def symbols_in(value: Any) -> set[sympy.Symbol]:
    """The symbols of a tensor's sizes, or of the number that it is."""
    return {symbol for size in numbers_in(value) for symbol in size.free_symbols}


def renamed(value: Any, again: Any) -> dict[sympy.Symbol, sympy.Expr]:
    """Other symbols for those that a value has, by the same value in another recording."""
    pairs = zip(numbers_in(value), numbers_in(again), strict=False)
    return {old: new for old, new in pairs if isinstance(old, sympy.Symbol) and old != new}
