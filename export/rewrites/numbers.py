"""Python numbers that are made of tensors and of free sizes: each step makes them anew.

``item()`` gives such a number. ``int()``, ``float()`` and ``range()`` cannot: Python's
own take or return a number that is known. A recording that meets one of them ends, and begins again
with equals of all in that file (``ReadInFile``); files that ask for none are left alone.
"""

from __future__ import annotations

import builtins
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from export.errors import ExportError
from export.insides import (
    OpOverload,
    SymNode,
    SymT,
    disable_current_modes,
    get_proxy_mode,
    get_proxy_slot,
    is_fake,
    maybe_get_fake_mode,
    symbol_is_type,
    torch_sympy,
    tree_leaves,
)
from export.mutation import nodes_behind
from export.rewrites import RECORDED
from export.sizes import Sizes

File = dict[str, Any]
"""A module's globals."""


class ReadInFile(BaseException):
    """A file's code makes a number of what is known in a step only; no error that code catches."""

    def __init__(self, file: File) -> None:
        super().__init__("a number of Python's of what only a step knows")
        self.file = file


class _ReadType(type):
    """What is asked of a number's type is asked of Python's own."""

    own: type
    made: Callable[[Any], Any]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.own)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.own)

    def __eq__(cls, other: Any) -> bool:
        return other is cls or other is cls.own

    def __hash__(cls) -> int:
        return hash(cls.own)

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if any(isinstance(each, (Tensor, *_SYMBOLIC)) for each in given):
            return cls.made(*given)
        return cls.own(*given, **named)


def _whole(value: Any) -> Any:
    if isinstance(value, torch.SymFloat):
        return torch.sym_int(value)
    if isinstance(value, Tensor):
        return _item(value.detach().to(torch.int64))
    return value


def _real(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _item(value.detach().to(torch.promote_types(value.dtype, torch.float32)))
    return torch.sym_float(value)


def _item(tensor: Tensor) -> Any:
    """``tensor.item()``: a number, where it is one in every step."""
    known = value_of(tensor)
    return tensor.item() if known is None else known.item()


def _listed(tensor: Tensor) -> Any:
    """``tensor.tolist()``."""
    known = value_of(tensor)
    return tensor.tolist() if known is None else known.tolist()


def _is_true(value: Any) -> bool:
    """Whether a number, or a tensor of one, is no zero."""
    if isinstance(value, Tensor):
        known = value_of(value)
        return (
            bool(value if value.dtype == torch.bool else value != 0)
            if known is None
            else (bool(known))
        )
    return bool(value != 0)


def _rounds(*given: Any) -> Iterator[Any]:
    """``range`` of ends that data may decide: the code asks before each round whether there is one.

    A step of more rounds than are recorded is refused.
    """
    start, stop, step = (0, *given, 1) if len(given) == 1 else (*given, 1)[:3]
    (shape_env,) = {each.node.shape_env for each in given if isinstance(each, torch.SymInt)}
    if not isinstance(step, int):
        raise ExportError(
            "a range whose step data decide", operator="range", instead="a step that is a number"
        )
    for done in itertools.count():
        at = start + done * step
        if not shape_env.has_round(done, stop - at if step > 0 else at - stop):
            return
        yield at


def _ranged(*given: Any) -> Any:
    """``range``, also up to a number that only a step knows."""
    ends = list(map(_whole, given))
    return _rounds(*ends) if any(map(_is_read, ends)) else range(*ends)


def _parts(own: Callable[..., Any]) -> Callable[..., Any]:
    """``unbind``, also of as many rows as data decide: what iterating over a tensor takes."""

    def parts(input: Tensor, dim: int = 0) -> Any:
        if not _is_read(input.shape[dim]):
            return own(input, dim)
        return tuple(input.select(dim, place) for place in _rounds(input.shape[dim]))

    return parts


class _ReadInt(int, metaclass=_ReadType):
    own, made = int, _whole


class _ReadFloat(float, metaclass=_ReadType):
    own, made = float, _real


class _ReadRange(metaclass=_ReadType):
    own, made = range, _ranged


_EQUALS = {"int": _ReadInt, "float": _ReadFloat, "range": _ReadRange}


@contextmanager
def read_in(files: list[File]) -> Iterator[None]:
    """Inside, these files make numbers of what only a step knows, and count by them.

    So do functions of ``math`` that they import by name.
    """
    before = [(file, {n: f for n, f in file.items() if id(f) in _BY_OWN}) for file in files]
    try:
        for file, own in before:
            file.update(_EQUALS)
            file.update({name: _BY_OWN[id(function)] for name, function in own.items()})
        yield
    finally:
        for file, own in before:
            file.update(own)
            for name in _EQUALS:
                del file[name]


def _ask_anew(frame: FrameType | None) -> None:
    """End the recording, where the file that this code is of is not read by our equals yet."""
    file = frame.f_globals if frame is not None else _EQUALS
    if not _EQUALS.keys() & file.keys():
        raise ReadInFile(file)


def _user(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _is_not_the_users(frame):
        frame = frame.f_back
    return frame


def _is_not_the_users(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).split(".")[0] in ("torch", "export")


def _of_tensor(own: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def converted(tensor: Tensor) -> Any:
        if is_fake(tensor):
            _ask_anew(_user(sys._getframe()))
        return own(tensor)

    return converted


def _index_of_size(size: torch.SymInt) -> int:
    _ask_for_size(size)
    return int(_INDEX_OF_SIZE(size))


def _int_of_size(size: torch.SymInt | torch.SymFloat) -> int:
    _ask_for_size(size)
    return int(_INT_OF_SIZE[type(size)](size))


def _float_of_size(size: torch.SymInt | torch.SymFloat) -> float:
    _ask_for_size(size)
    return float(_FLOAT_OF_SIZE[type(size)](size))


def _ask_for_size(size: torch.SymInt | torch.SymFloat) -> None:
    asking = sys._getframe(2)
    while asking.f_back is not None and asking.f_globals["__name__"] == "export.rewrites.patch":
        asking = asking.f_back  # what is between a caller and what replaces a function
    if not size.node.expr.is_number and not _is_not_the_users(asking):
        _ask_anew(asking)


def _tensor(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.tensor`` or ``as_tensor``, of numbers that may be free sizes or read from tensors."""

    def tensor(data: Any, dtype: Any = None, device: Any = None, **named: Any) -> Tensor:
        if not any(isinstance(each, _SYMBOLIC) for each in _numbers(data)):
            return own(data, dtype=dtype, device=device, **named)
        return _stacked(data, dtype or reduce(torch.promote_types, _types(data)))

    return tensor


def _new_tensor(like: Tensor, data: Any, dtype: torch.dtype | None = None, **named: Any) -> Tensor:
    if not any(isinstance(each, _SYMBOLIC) for each in _numbers(data)):
        return like.new_tensor(data, dtype=dtype, **named)
    return _stacked(data, dtype or like.dtype)


def _numbers(data: Any) -> Iterator[Any]:
    """The numbers in lists in lists."""
    if isinstance(data, (list, tuple)):
        for each in data:
            yield from _numbers(each)
    else:
        yield data


def _types(data: Any) -> Iterator[torch.dtype]:
    for number in _numbers(data):
        if isinstance(number, Tensor):
            yield number.dtype
        else:
            whole = isinstance(number, (int, torch.SymInt))
            yield torch.int64 if whole else torch.get_default_dtype()


def _stacked(data: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(each, dtype) for each in data])
    if isinstance(data, Tensor):
        return data.detach().to(dtype)
    return torch.scalar_tensor(data, dtype=dtype)


def _text(value: Any, spec: str) -> str:
    """What a log says of a number that only a step knows."""
    return str(value) if isinstance(value, _SYMBOLIC) or is_fake(value) else _FORMAT(value, spec)


def _equal(input: Tensor, other: Tensor) -> Any:
    """``torch.equal``."""
    return input.shape == other.shape and _item((input == other).all())


def _allclose(
    input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> Any:
    """``torch.allclose``."""
    return _item(torch.isclose(input, other, rtol, atol, equal_nan).all())


def _of_number(name: str) -> Callable[..., Any]:
    """A function of ``math``, also of a number that only a step knows."""
    own, function = getattr(math, name), getattr(torch_sympy, f"OpaqueUnaryFn_{name}")

    def made(value: Any, *more: Any) -> Any:
        if is_fake(value):
            value = _real(value)
        if not isinstance(value, _SYMBOLIC):
            return own(value, *more)
        if more:  # the base of a logarithm
            return made(value) / made(*more)
        node = torch.sym_float(value).node
        return torch.SymFloat(SymNode(function(node.expr), node.shape_env, float, None))

    return made


def _power(base: Any, exponent: Any) -> Any:
    numbers = [_real(each) if is_fake(each) else each for each in (base, exponent)]
    if not any(isinstance(each, _SYMBOLIC) for each in numbers):
        return _POW(base, exponent)
    return torch.sym_float(numbers[0]) ** torch.sym_float(numbers[1])


def _extreme(own: Callable[..., Any], of_two: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def extreme(*given: Any, **named: Any) -> Any:
        if named:
            return own(*given, **named)
        values = given if len(given) > 1 else list(*given)
        return reduce(of_two, values) if any(map(_is_read, values)) else own(values)

    return extreme


def _is_read(value: Any) -> bool:
    """Whether it is a Python number that was read from a tensor of the step."""
    return isinstance(value, _SYMBOLIC) and any(
        symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))
        for symbol in value.node.expr.free_symbols
    )


_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_POW = math.pow
_MATH = {
    "pow": _power,
    **{n: _of_number(n) for n in ("exp", "log", "log2", "sqrt", "sin", "cos", "tanh")},
}
_BY_OWN = {id(getattr(math, name)): made for name, made in _MATH.items()}
_FORMAT: Any = Tensor.__format__
_INT_OF_SIZE: dict[type, Any] = {kind: kind.__int__ for kind in _SYMBOLIC}
# A SymInt has none: Python takes its whole number.
_FLOAT_OF_SIZE: dict[type, Any] = {
    torch.SymInt: torch.SymInt.__int__,
    torch.SymFloat: torch.SymFloat.__float__,
}

_INDEX_OF_SIZE: Any = torch.SymInt.__index__


RECORDED.equals(
    {
        Tensor.item: _item,
        Tensor.tolist: _listed,
        Tensor.__bool__: _is_true,
        Tensor.__index__: _of_tensor(Tensor.__index__),
        **dict.fromkeys((torch.unbind, Tensor.unbind), _parts(torch.unbind)),
        Tensor.__int__: _of_tensor(Tensor.__int__),
        Tensor.__float__: _of_tensor(Tensor.__float__),
        _FORMAT: _text,
        torch.tensor: _tensor(torch.tensor),
        torch.as_tensor: _tensor(torch.as_tensor),
        Tensor.new_tensor: _new_tensor,
        **dict.fromkeys((torch.equal, Tensor.equal), _equal),
        **dict.fromkeys((torch.allclose, Tensor.allclose), _allclose),
    }
)
RECORDED.replaces(
    *((kind, "__int__", _int_of_size) for kind in _SYMBOLIC),
    (torch.SymFloat, "__float__", _float_of_size),
    (torch.SymFloat, "__bool__", _is_true),
    (torch.SymInt, "__index__", _index_of_size),
    *((kind, "__format__", _text) for kind in _SYMBOLIC),
    *((math, name, made) for name, made in _MATH.items()),
    (builtins, "max", _extreme(max, torch.sym_max)),
    (builtins, "min", _extreme(min, torch.sym_min)),
)
RECORDED.adds(
    (torch.SymInt, "__float__", _float_of_size),
    # Which numpy's functions ask for.
    *((kind, name, _MATH[name]) for kind in _SYMBOLIC for name in _MATH),
)


# Values that are known while a step is recorded: what is made of constants alone.
#
# Those are tensors that the model holds beside its state, those that the loss makes of numbers, and
# state that a step leaves as it is. Code may branch on them, count by them and list them as it does
# in torch. Where state comes in, a device that holds another value refuses the step.


def value_of(tensor: Tensor) -> Tensor | None:
    """A recorded tensor's value, or None where only a step knows it."""
    if not is_fake(tensor):
        return tensor
    mode: Any = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    sizes = getattr(maybe_get_fake_mode(tensor), "shape_env", None)
    if slot is None or mode is None or not isinstance(sizes, Sizes):
        return None
    node = slot.proxy.node
    needed = _deciding(node)
    placed = [each for each in node.graph.nodes if each.op == "placeholder"]
    held = {each: sizes.held[n] for n, each in enumerate(placed) if n in sizes.held}
    if not all(each in held or _is_of_constants(each) for each in needed):
        return None
    value: Tensor = _computed(node, needed, held, mode.tracer.root)
    if held.keys() & needed:
        if value.is_floating_point() and bool(value.isnan().any()):
            return None
        same = (tensor == value).all().item()
        if isinstance(same, torch.SymBool):  # else it is noted already
            sizes.needed.update({symbol - 1: None for symbol in same.node.expr.free_symbols})
    return value


def _is_of_constants(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return node.op == "call_function" and getattr(target, "__name__", "") == "getitem"
    leaves = tree_leaves(node.meta.get("val"))
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not random and all(isinstance(each, Tensor) for each in leaves)


def _deciding(node: fx.Node) -> set[fx.Node]:
    """The nodes that a value is made of, with all that was written into the memory of one of them.

    Views lie in one memory, so a write into anything that is made of the same nodes counts.
    """
    needed = nodes_behind({node})
    writes = {each: into for each in node.graph.nodes if (into := _written(each))}
    while found := [each for each, into in writes.items() if nodes_behind(into) & needed]:
        for each in found:
            del writes[each]
            needed |= nodes_behind({each})
    return needed


def _written(node: fx.Node) -> set[fx.Node]:
    """The tensors that an operator writes into."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    pairs = zip(schema.arguments, node.args, strict=False)
    return {
        given
        for argument, given in pairs
        if isinstance(given, fx.Node) and argument.alias_info is not None
    }


def _computed(node: fx.Node, needed: set[fx.Node], held: dict[fx.Node, Tensor], root: Any) -> Any:
    found: dict[fx.Node, Any] = {}
    with disable_current_modes(), torch.no_grad():
        for each in (one for one in node.graph.nodes if one in needed):
            if each in held:
                found[each] = held[each]
            elif each.op == "get_attr":
                found[each] = getattr(root, str(each.target)).clone()
            else:
                args, kwargs = fx.map_arg((each.args, dict(each.kwargs)), found.__getitem__)
                found[each] = each.target(*args, **kwargs)
    return found[node]
