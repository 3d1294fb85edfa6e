"""Runs a torch optimizer's step as a pure function, with no more passes over tensors than it takes.

torch's steps write into their tensors, and multiply them by numbers as these come. Here a tensor is
a place, and what was written there is noted beside it, as a number times a tensor: numbers are
multiplied with each other, and a tensor only where it has to be. A moving average m * beta + g * (1
- beta) is (1 - beta) * (m' * beta + g) with m = (1 - beta) * m': state that is kept so costs a pass
less at each step, and its square root or quotient none more.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Number = float | Tensor
"""A Python number, or a tensor without axes."""
Parts = tuple[Tensor, Number]
"""A tensor, and the number that it is to be multiplied by."""
Operand = tuple[Tensor | None, Number]
"""The same, or a number alone."""
Source = Hashable
"""Where in a program a function is called."""
_OfSign = tuple[Any, Any, Any]
"""What is where a tensor is above 0, below, and 0."""


class AsksForNumbers(Exception):
    """A step asks a tensor for its truth or for a number, which only a device knows."""


class _NoRule(Exception):
    """A function that has to be called as it is."""


class Places(TorchFunctionMode):
    """Inside, nothing is written: functions on these tensors see, and note, what would be there.

    Numbers that depend on the step stand beside tensors only where they stay positive and neither
    large nor small: ``numbers`` gets those that this is to be known of, by the place in the program
    that they come from, and those from the places ``plain`` are multiplied in at once.
    """

    def __init__(self, plain: Collection[Source] = ()) -> None:
        super().__init__()
        self._noted: dict[int, tuple[Tensor, Tensor, Parts]] = {}
        self._plain = plain
        self._differences: set[int] = set()
        self._quotients: dict[int, tuple[Tensor, Tensor | None, Tensor]] = {}
        self._sums: dict[int, tuple[Tensor, Operand, Parts, Tensor]] = {}
        self._signed: dict[int, tuple[Tensor, Tensor, _OfSign]] = {}
        self._source: Source = None
        self.numbers: dict[Source, list[Tensor]] = {}
        self.chooses = False
        """Whether a step does something else at some counts of steps than at others."""

    def place(self, base: Tensor, factor: Number = 1.0) -> Tensor:
        """A place that holds base * factor."""
        return self._result((base.detach(), factor))

    def value(self, place: Tensor) -> Tensor:
        """What is there."""
        noted = self._noted.get(id(place))
        return place if noted is None else noted[1]

    def parts(self, place: Tensor) -> Parts:
        """What is there, as a tensor and the number that it is to be multiplied by."""
        noted = self._noted.get(id(place))
        return (place, 1.0) if noted is None else noted[2]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs, caller = func.__name__, dict(kwargs or {}), sys._getframe(1)
        self._source = caller.f_code, caller.f_lasti
        if name in _NUMBERS:
            raise AsksForNumbers(name.strip("_"))
        if name in _SAME or func == _DATA.__get__:
            return args[0]
        if name == "item" or name == "bfloat16":
            # A number stays a tensor; what is rounded for a GPU's sake stays as exact as it is.
            return self.place(self.value(args[0]))
        if name == "__get__":
            owner = args[0] if func == _GRAD.__get__ else self.value(args[0])
            found = func(owner)
            return found if owner is args[0] else self._noted_result(found)
        if name == "__set__":
            return self._put(args[0], self.parts(args[1])) if func == _DATA.__set__ else func(*args)
        target = kwargs.pop("out", None)
        if name == "__setitem__":
            target, mask, new = args
            name, func, args = "where", torch.where, (mask, new, target)
        elif name in _IN_PLACE or (name[-1] == "_" != name[-2]):
            target, name = args[0], _IN_PLACE.get(name, name[:-1])
            func = _WRITES.get(name) or getattr(Tensor, name)
        found = self._computed(name.strip("_"), func, args, kwargs)
        return self._noted_result(found) if target is None else self._put(target, found)

    def _computed(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Parts where the result is a tensor."""
        self.chooses |= name in _CHOOSE and not all(map(has_axes, args[:1]))
        rule = _RULES.get(name)
        if any(map(has_axes, args)):
            try:
                if name in _OF_SIGNS:
                    return self._by_sign(_OF_SIGNS[name], args)
            except _NoRule:
                pass
            try:
                if rule is not None:
                    return rule(self, *args, **kwargs)
            except _NoRule:
                pass
        result = func(*self._values(args), **self._values(kwargs))
        return (result, 1.0) if isinstance(result, Tensor) else result

    def _values(self, of: Any) -> Any:
        if isinstance(of, Tensor):
            return self.value(of)
        if isinstance(of, dict):
            return {key: self._values(each) for key, each in of.items()}
        return type(of)(map(self._values, of)) if type(of) in (list, tuple) else of

    def _noted_result(self, found: Any) -> Any:
        if isinstance(found, Tensor):
            found = found, 1.0
        is_parts = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor)
        return self._result(found) if is_parts else found

    def _result(self, parts: Parts) -> Tensor:
        actual = _product(*parts)
        if id(actual) in self._noted:
            actual = actual.detach()
        self._noted[id(actual)] = actual, actual, parts
        return actual

    def _put(self, target: Tensor, found: Parts) -> Tensor:
        actual = _product(*found)
        if actual.dtype != target.dtype or actual.shape != target.shape:
            shape = torch.broadcast_shapes(actual.shape, target.shape)
            actual = actual.to(target.dtype).expand(shape)
            found = actual, 1.0
        self._noted[id(target)] = target, actual, found
        return target

    # What is done to numbers in place of tensors.

    def _operand(self, of: Any) -> Operand:
        if not isinstance(of, Tensor):
            return None, of
        if of.dim() == 0:
            return None, self.value(of)
        if not of.is_floating_point():
            raise _NoRule
        return self.parts(of)

    def _may_stand_apart(self, factor: Number) -> bool:
        if not isinstance(factor, Tensor):
            return factor > 0
        self.numbers.setdefault(self._source, []).append(factor)
        return self._source not in self._plain

    def mul(self, a: Any, b: Any) -> Parts:
        (left, f), (right, g) = self._operand(a), self._operand(b)
        for base, other in ((left, right), (right, left)):
            below = self._inverted(base)
            if below is not None and other is not None:
                return self._quotient(other, below), f * g
        return _times((left, f), (right, g))

    def div(self, a: Any, b: Any, rounding_mode: str | None = None) -> Parts:
        (base, factor), (below, divisor) = self._operand(a), self._operand(b)
        if rounding_mode is not None:
            raise _NoRule
        if below is None:
            if not isinstance(divisor, Tensor) and divisor == 0:
                raise _NoRule
            return _times((base, factor), (None, 1 / divisor))
        if not self._may_stand_apart(divisor):
            below, divisor = _product(below, divisor), 1.0
        return self._quotient(base, below), factor / divisor

    def _quotient(self, base: Tensor | None, below: Tensor) -> Tensor:
        found = torch.reciprocal(below) if base is None else base / below
        self._quotients[id(found)] = found, base, below
        return found

    def _inverted(self, base: Tensor | None) -> Tensor | None:
        """What this is one through."""
        _, above, below = self._quotients.get(id(base), (None, None, None))
        return below if above is None else None

    def add(self, a: Any, b: Any, alpha: Any = 1) -> Parts:
        """Sums of quotients with one divisor are divided once: a + n / d + m / d."""
        left, (right, g) = self._operand(a), self._operand(b)
        g = g * self._operand(alpha)[1]
        _, above, below = self._quotients.get(id(right), (None, None, None))
        if left[0] is None or above is None or below is None:
            return self._sum(left, (right, g))
        _, first, numerator, divisor = self._sums.get(id(left[0]), (None, left, None, None))
        if numerator is None or divisor is not below or not _is_one(left[1]):
            first, numerator = (left[0], left[1]), (above, g)
            found = self._sum(left, (right, g))
        else:
            above, g = numerator = self._sum(numerator, (above, g))
            found = self._sum(first, (self._quotient(above, below), g))
        if _is_one(found[1]):
            self._sums[id(found[0])] = found[0], first, numerator, below
        return found

    def _sum(self, a: Operand, b: Operand) -> Parts:
        """Of two tensors that both are to be multiplied, one is, by the quotient."""
        (left, f), (right, g) = a, b
        if left is None or right is None:
            base, factor, number = (left, f, g) if right is None else (right, g, f)
            assert base is not None
            if not self._may_stand_apart(factor):
                base, factor = _product(base, factor), 1.0
            return base + number / factor, factor
        if _is_one(f) and _is_minus_one(g):
            return left - right, 1.0
        if _is_one(f) or _is_one(g) or (isinstance(f, Tensor) and isinstance(g, Tensor)):
            return _product(left, f) + _product(right, g), 1.0
        if isinstance(g, Tensor) or g == 0 or (_is_positive(f) and not _is_positive(g)):
            (left, f), (right, g) = (right, g), (left, f)
        if g == 0:
            raise _NoRule
        share = f / g
        found = right - left if _is_minus_one(share) else _product(left, share) + right
        if not isinstance(share, Tensor) and share < 0:
            self._differences.add(id(found))
        return found, g

    def sub(self, a: Any, b: Any, alpha: Any = 1) -> Parts:
        return self.add(a, b, -self._operand(alpha)[1])

    def addcmul(self, a: Any, b: Any, c: Any, value: Any = 1) -> Parts:
        return self.add(a, self._result(self.mul(b, c)), value)

    def addcdiv(self, a: Any, b: Any, c: Any, value: Any = 1) -> Parts:
        return self.add(a, self._result(self.div(b, c)), value)

    def lerp(self, a: Any, b: Any, weight: Any) -> Parts:
        if has_axes(weight):
            raise _NoRule
        rest = 1 - self._operand(weight)[1]
        return self.add(self._result(self.mul(a, rest)), self._result(self.mul(b, weight)))

    def sign(self, a: Any) -> Parts:
        base, factor = self._operand(a)
        if base is None or not _is_positive(factor):
            raise _NoRule
        found = torch.sign(base)
        self._signed[id(found)] = found, base, (1.0, -1.0, 0.0)
        return found, 1.0

    def _by_sign(self, function: Callable[..., Any], args: Sequence[Any]) -> Parts:
        """A function of numbers and of what depends on the sign of one tensor: so does it."""
        known = [self._signed.get(id(self.value(a))) if has_axes(a) else a for a in args]
        bases = [each[1] for each in known if isinstance(each, tuple)]
        numbers = all(isinstance(each, tuple | float | int) for each in known)
        if not numbers or any(base is not bases[0] for base in bases):
            raise _NoRule
        of = [each[2] if isinstance(each, tuple) else [each] * 3 for each in known]
        above, below, zero = values = tuple(map(function, *of))
        sign = bases[0]
        if not isinstance(above, bool):
            rest = torch.where(sign < 0, below, zero)
            found = torch.where(sign > 0, above, rest).to(sign.dtype)
        elif sum(values) == 1:
            found = sign > 0 if above else sign < 0 if below else sign == 0
        else:
            raise _NoRule
        self._signed[id(found)] = found, sign, values
        return found, 1.0

    def neg(self, a: Any) -> Parts:
        return self.mul(a, -1)

    def sqrt(self, a: Any) -> Parts:
        base, factor = self._operand(a)
        assert base is not None
        if not self._may_stand_apart(factor):
            base, factor = _product(base, factor), 1.0
        if id(base) in self._differences:
            # Rounding may fall below 0 where both are equal; torch makes NaN of that.
            base = torch.clamp(base, min=0.0)
        root = torch.sqrt(factor) if isinstance(factor, Tensor) else math.sqrt(factor)
        return torch.sqrt(base), root

    def pow(self, a: Any, exponent: Any) -> Parts:
        if has_axes(exponent) or not has_axes(a) or exponent not in (0.5, 2):
            raise _NoRule
        return self.sqrt(a) if exponent == 0.5 else self.mul(a, a)

    def clone(self, a: Any, memory_format: Any = None) -> Parts:
        base, factor = self.parts(a)
        return base.detach(), factor

    def copy(self, a: Any, b: Any, non_blocking: bool = False) -> Parts:
        return self.parts(b)

    def full_like(self, like: Tensor, fill_value: Any, **how: Any) -> Parts:
        """One number, that stands for as many as there are."""
        return torch.ones([1] * like.dim(), dtype=like.dtype), self._operand(fill_value)[1]

    def where(self, condition: Tensor, a: Any, b: Any) -> Parts:
        (base, factor), (other, number) = self._operand(a), self._operand(b)
        if condition.dim() > 0 or base is None or other is not None:
            raise _NoRule
        chosen, dtype = self.value(condition), torch.float64
        number, factor = (torch.as_tensor(each, dtype=dtype) for each in (number, factor))
        below, factor = self._inverted(base), torch.where(chosen, factor, number)
        if below is not None:
            return self._quotient(None, torch.where(chosen, below, 1.0)), factor
        return torch.where(chosen, base, 1.0), factor

    def maximum(self, a: Any, b: Any) -> Parts:
        (left, f), (right, g) = self._operand(a), self._operand(b)
        if left is None or right is None or not (_is_positive(f) and _is_positive(g)):
            raise _NoRule
        return torch.maximum(_product(left, f / g), right), g


_DATA: Any = Tensor.data
_GRAD: Any = Tensor.grad
_NUMBERS = frozenset(
    ("__bool__", "__float__", "__int__", "__index__", "tolist", "numpy", "is_nonzero", "equal")
)
_CHOOSE = frozenset(("where", "gt", "ge", "lt", "le", "maximum", "minimum"))
_OF_SIGNS: Mapping[str, Callable[..., Any]] = {
    "gt": operator.gt, "lt": operator.lt, "eq": operator.eq,
    "where": lambda condition, a, b: a if condition else b,
}  # fmt: skip
_SAME = frozenset(("detach", "detach_", "contiguous", "requires_grad_"))
_IN_PLACE = {
    "__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div",
    "__idiv__": "div", "__ipow__": "pow",
}  # fmt: skip
_WRITES: Mapping[str, Callable[..., Tensor]] = {
    "copy": lambda target, source, *how: source,
    "zero": torch.zeros_like,
    "fill": lambda target, value: torch.zeros_like(target) + value,
}


def _swapped(rule: Callable[..., Parts]) -> Callable[..., Parts]:
    return lambda places, a, b: rule(places, b, a)


_RULES: Mapping[str, Callable[..., Parts]] = {
    "add": Places.add, "radd": Places.add, "sub": Places.sub, "rsub": _swapped(Places.sub),
    "subtract": Places.sub, "mul": Places.mul, "multiply": Places.mul, "rmul": Places.mul,
    "div": Places.div, "divide": Places.div, "true_divide": Places.div, "truediv": Places.div,
    "rdiv": _swapped(Places.div), "rtruediv": _swapped(Places.div), "addcmul": Places.addcmul,
    "addcdiv": Places.addcdiv, "lerp": Places.lerp, "neg": Places.neg, "negative": Places.neg,
    "sqrt": Places.sqrt, "pow": Places.pow, "clone": Places.clone, "copy": Places.copy,
    "square": lambda places, a: places.mul(a, a), "maximum": Places.maximum,
    "where": Places.where, "sign": Places.sign, "full_like": Places.full_like,
}  # fmt: skip


def _times(a: Operand, b: Operand) -> Parts:
    bases = [base for base in (a[0], b[0]) if base is not None]
    return (bases[0] if len(bases) == 1 else bases[0] * bases[1]), a[1] * b[1]


def _product(base: Tensor, factor: Number) -> Tensor:
    return base if _is_one(factor) else base * factor


def _is_one(factor: Number) -> bool:
    return not isinstance(factor, Tensor) and factor == 1


def _is_minus_one(factor: Number) -> bool:
    return not isinstance(factor, Tensor) and factor == -1


def _is_positive(factor: Number) -> bool:
    return not isinstance(factor, Tensor) and factor > 0


def has_axes(of: Any) -> bool:
    """Whether it is a tensor, and no number."""
    return isinstance(of, Tensor) and of.dim() > 0
