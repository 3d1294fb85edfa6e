"""Random numbers as functions of the run-time seed, the step and the element's number.

A call's key is ``mix(mix(seed + 0x9E3779B9 call) + 0x85EBCA77 step)``, the bits of its element i
``mix(key + 0x9E3779B1 i)``, all modulo 2^32, where ``mix`` is the xor-shift-multiply of C.
Wellons' hash prospector ("lowbias32"). Whole-number arithmetic only, so that torch and onnxruntime
agree bit for bit at any thread count.

torch lacks 32-bit unsigned arithmetic, so the draws are operators of their own: in numpy, and as
ONNX nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor

from export.errors import ExportError
from export.insides import TorchDispatchMode
from export.lowering.graph import Graph, Value
from export.lowering.opaque import opaque
from export.symbols import Dim, fixed

Size = Sequence[int]
Number = int | float

CALL, STEP, ELEMENT = 0x9E3779B9, 0x85EBCA77, 0x9E3779B1
ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))
"""Of ``mix``: each an xor with the number shifted right, and a product. Then ``LAST_SHIFT``."""
LAST_SHIFT = 16
UNIFORM_BITS = 23
UNIFORM_UNIT = np.float32(2.0**-UNIFORM_BITS)
"""So many bits and their last place: each number, with its half, is one of float32's own."""

Words = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]


def _mix(x: Words) -> Words:
    for shift, factor in ROUNDS:
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(LAST_SHIFT)
    return x


def _bits(seed: Tensor, step: Tensor, call: int, size: Sequence[int]) -> Words:
    words = [np.array([number & 0xFFFFFFFF], np.uint32) for number in (int(seed), int(step))]
    key = _mix(words[0] + np.uint32(CALL * call & 0xFFFFFFFF))
    key = _mix(key + words[1] * np.uint32(STEP))
    number = np.arange(math.prod(size), dtype=np.uint32)
    number *= np.uint32(ELEMENT)
    number += key
    return _mix(number).reshape(size)


# The same in a graph, in 32-bit unsigned arithmetic: onnxruntime shifts, multiplies and compares
# these about four times as fast as 64-bit numbers that are divided and masked.

_KEYS = 64
"""So many calls' keys are computed as one vector: one by one, they would cost a node's overhead
20 times each."""


def _word(g: Graph, number: int | np.ndarray[Any, Any]) -> str:
    return g.constant(np.asarray(number & 0xFFFFFFFF, dtype=np.uint32))


def _as_word(g: Graph, number: Value | str) -> str:
    return g.op("Cast", number, to=TensorProto.UINT32)


def _shifted(g: Graph, x: str, places: int) -> str:
    return g.op("BitShift", x, _word(g, places), direction="RIGHT")


def _rounds(g: Graph, x: str) -> str:
    """``mix`` without its last xor."""
    for shift, factor in ROUNDS:
        x = g.op("Mul", g.op("BitwiseXor", x, _shifted(g, x, shift)), _word(g, factor))
    return x


def _mixed(g: Graph, x: str) -> str:
    x = _rounds(g, x)
    return g.op("BitwiseXor", x, _shifted(g, x, LAST_SHIFT))


def _key(g: Graph, seed: Value, step: Value, call: int) -> str:
    """The key of one call, as a vector of one."""
    block, place = divmod(call - 1, _KEYS)
    calls = np.arange(block * _KEYS + 1, (block + 1) * _KEYS + 1, dtype=np.uint64)
    keys = _mixed(g, g.op("Add", _as_word(g, seed), _word(g, calls * CALL)))
    progress = g.op("Mul", _as_word(g, step), _word(g, STEP))
    return g.op("Gather", _mixed(g, g.op("Add", keys, progress)), g.ints([place]), axis=0)


def _count(g: Graph, sizes: Sequence[Dim], step: int | str) -> str:
    """The first prod(sizes) multiples of ``step``."""
    total = g.op("Squeeze", g.dim(math.prod(sizes)), g.ints([0]))
    number = g.op("Range", g.scalar(0, torch.int64), total, g.scalar(1, torch.int64))
    factor = _word(g, step) if isinstance(step, int) else step
    return g.op("Mul", _as_word(g, number), factor)


def _unmixed(g: Graph, seed: Value, step: Value, call: int, size: Sequence[Dim]) -> str:
    """key + ELEMENT i for each element i, as rows and columns: i = row * columns + column.

    A sum of two vectors, of which that of the columns is mostly a constant.
    """
    key = _key(g, seed, step, call)
    lead = next((i for i, each in enumerate(size) if fixed(each) != 1), 0) + 1
    rows, columns = size[:lead], size[lead:]
    if fixed(math.prod(columns)) == 1:
        return g.op("Add", _count(g, rows, ELEMENT), key)
    width = g.op("Mul", _as_word(g, g.dim(math.prod(columns))), _word(g, ELEMENT))
    down = g.op("Add", _count(g, rows, width), key)
    return g.op(
        "Add",
        g.op("Unsqueeze", down, g.ints([1])),
        _count(g, columns, ELEMENT),
    )


def _lower_keep_mask(
    g: Graph, seed: Value, step: Value, call: int, size: Sequence[Dim], below: int
) -> str:
    if below >= 2**32:
        return g.full(size, True, torch.bool)
    bits = _rounds(g, _unmixed(g, seed, step, call, size))
    # The last xor is with the number's own upper half: among numbers of one upper half it matters
    # only to those of the bound's, so that a constant does; and to none where the bound is a
    # multiple of what an upper half counts, as that of 1/2 is.
    if below % 2**LAST_SHIFT:
        bits = g.op("BitwiseXor", bits, _word(g, below >> LAST_SHIFT))
    return g.op("Reshape", g.op("Less", bits, _word(g, below)), g.shape(size))


def _of_keep_mask(seed: Tensor, step: Tensor, call: int, size: Sequence[int], below: int) -> Tensor:
    return seed.new_empty(size, dtype=torch.bool)


@opaque(fake=_of_keep_mask, lowering=_lower_keep_mask, drawn=True)
def keep_mask(seed: Tensor, step: Tensor, call: int, size: Sequence[int], below: int) -> Tensor:
    """Bool [size]: whether an element's bits are less than ``below``, a number up to 2^32."""
    bits = _bits(seed, step, call, size)
    return torch.as_tensor(bits < below if below < 2**32 else np.full(bits.shape, True))


def _lower_uniform(g: Graph, seed: Value, step: Value, call: int, size: Sequence[Dim]) -> str:
    bits = _mixed(g, _unmixed(g, seed, step, call, size))
    upper = g.op("Cast", _shifted(g, bits, 32 - UNIFORM_BITS), to=TensorProto.FLOAT)
    drawn = g.op("Mul", upper, g.scalar(float(UNIFORM_UNIT), torch.float32))
    drawn = g.op("Add", drawn, g.scalar(float(UNIFORM_UNIT) / 2, torch.float32))
    return g.op("Reshape", drawn, g.shape(size))


def _of_uniform(seed: Tensor, step: Tensor, call: int, size: Sequence[int]) -> Tensor:
    return seed.new_empty(size, dtype=torch.float32)


@opaque(fake=_of_uniform, lowering=_lower_uniform, drawn=True)
def uniform(seed: Tensor, step: Tensor, call: int, size: Sequence[int]) -> Tensor:
    """Float32 [size]: (k + 1/2) / 2^23, where k are the upper 23 of an element's bits."""
    upper = (_bits(seed, step, call, size) >> np.uint32(32 - UNIFORM_BITS)).astype(np.float32)
    return torch.as_tensor(upper * UNIFORM_UNIT + UNIFORM_UNIT / 2, dtype=torch.float32)


class Randomness:
    """Hands each call inside one train step its own stream.

    ``seed`` and ``step`` are int64 scalars; the order of the calls numbers the streams.
    """

    def __init__(self, seed: Tensor, step: Tensor) -> None:
        self._seed = seed
        self._step = step
        self._calls = 0

    def keep_mask(self, shape: Size, keep_probability: float) -> Tensor:
        """Bool tensor of ``shape``, True with ``keep_probability``, independent for each call."""
        self._calls += 1
        below = round(keep_probability * 2**32)
        mask: Tensor = keep_mask(self._seed, self._step, self._calls, list(shape), below)
        return mask

    def uniform(self, shape: Size) -> Tensor:
        """Float32 tensor of ``shape``, uniform between 0 and 1, without either."""
        self._calls += 1
        drawn: Tensor = uniform(self._seed, self._step, self._calls, list(shape))
        return drawn

    def normal(self, shape: Size) -> Tensor:
        """Standard normal numbers by Box and Muller (1958): sqrt(-2 ln u) cos(2 pi v)."""
        radius = torch.sqrt(-2 * torch.log(self.uniform(shape)))
        return radius * torch.cos(2 * math.pi * self.uniform(shape))

    def integers(self, shape: Size, low: int, high: int) -> Tensor:
        """Int64 tensor of ``shape``, each number from ``low`` up to, not including, ``high``."""
        span = high - low
        if isinstance(span, int) and not 0 < span <= 2**UNIFORM_BITS:
            raise ExportError(
                f"whole random numbers from {low} up to {high}",
                instead=f"a span from 1 to 2^{UNIFORM_BITS}",
            )
        upper = (self.uniform(shape) * 2**UNIFORM_BITS).to(torch.int64)
        return torch.div(upper * span, 2**UNIFORM_BITS, rounding_mode="trunc") + low


# torch's random functions, from the step's stream. Below autograd all of them, of torch.nn,
# torch.distributions and models alike, are some of these few operators.

_Draw = Callable[..., Any]


class RandomFunctions(TorchDispatchMode):
    """Inside, torch draws from ``randomness``; ExportError for a function that cannot."""

    def __init__(self, randomness: Randomness) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = _draws(randomness)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what asks torch.compile to keep out costs as much as the call itself

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # Attention without dropout has the tag, too; with it, it is one of the rewrites.
        if torch.Tag.nondeterministic_seeded not in func.tags or "attention" in func.__name__:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if _generator(func, args, kwargs) is not None:
            raise ExportError(
                "a random function with a generator of its own, whose numbers the graph cannot "
                "draw",
                operator=str(func),
                instead="no generator=: inside a step, torch draws from the trainer's seed",
            )
        draw = self._draws.get(name)
        if draw is None:
            raise ExportError(
                "random numbers of this kind cannot be drawn in the graph",
                operator=str(func),
                instead="numbers drawn before the step, given as a batch entry",
            )
        kwargs.pop("generator", None)
        return draw(*args, **kwargs)


def _generator(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    places = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(places, args, strict=False)), **kwargs}.get("generator")


def _draws(randomness: Randomness) -> dict[str, _Draw]:
    """What each of torch's random operators is, by its name."""
    r = randomness

    def chance(x: Tensor, p: Number | Tensor) -> Tensor:
        """Ones with probability ``p``, of the dtype of ``x``."""
        if isinstance(p, Tensor):
            return (r.uniform(x.shape) < p).to(x.dtype)
        return r.keep_mask(x.shape, p).to(x.dtype)

    def factory(drawn: Tensor, dtype: torch.dtype | None) -> Tensor:
        return drawn.to(dtype or torch.get_default_dtype())

    def normal(
        mean: Number | Tensor, std: Number | Tensor = 1.0, size: Size | None = None,
        *, dtype: torch.dtype | None = None, **where: Any,
    ) -> Tensor:  # fmt: skip
        if size is not None:
            return factory(r.normal(size) * std + mean, dtype)
        tensors = [each for each in (mean, std) if isinstance(each, Tensor)]
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        return (r.normal(shape) * std + mean).to(tensors[0].dtype)

    def randint(
        first: int, *rest: Any, dtype: torch.dtype | None = torch.int64, **where: Any
    ) -> Tensor:
        low, high, size = (first, *rest) if len(rest) == 2 else (0, first, *rest)
        return r.integers(size, low, high).to(dtype or torch.int64)

    def randint_like(
        x: Tensor, first: int, *rest: int, dtype: torch.dtype | None = None, **where: Any
    ) -> Tensor:
        low, high = (first, *rest) if rest else (0, first)
        return r.integers(x.shape, low, high).to(dtype or x.dtype)

    def random_(x: Tensor, first: int | None = None, to: int | None = None) -> Tensor:
        if first is None or (to is None and first <= 0):
            raise ExportError("random_ without bounds", instead="x.random_(low, high)")
        return x.copy_(r.integers(x.shape, *((0, first) if to is None else (first, to))))

    def randperm(n: int, *, dtype: torch.dtype | None = torch.int64, **where: Any) -> Tensor:
        return torch.sort(r.uniform([n]), stable=True).indices.to(dtype or torch.int64)

    def multinomial(p: Tensor, count: int, replacement: bool = False) -> Tensor:
        if count > 1 and not replacement:
            # Efraimidis and Spirakis (2006): the largest of u^(1/p), here as p / -ln u.
            return torch.topk(p / -torch.log(r.uniform(p.shape)), count).indices
        reached = torch.cumsum(p, -1).unsqueeze(-2)
        drawn = r.uniform([*p.shape[:-1], count]).unsqueeze(-1) * reached[..., -1:]
        return (reached <= drawn).sum(-1)

    def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        kept = r.keep_mask(x.shape, 1 - p)
        return x * (kept.to(x.dtype) * (1 / (1 - p) if p < 1 else 0.0)), kept

    def rrelu(
        x: Tensor, noise: Tensor, lower: Number = 1 / 8, upper: Number = 1 / 3,
        training: bool = False,
    ) -> Tensor:  # fmt: skip
        if not training:
            return torch.where(x > 0, x, x * ((lower + upper) / 2))
        slopes = r.uniform(x.shape).to(x.dtype) * (upper - lower) + lower
        return x * noise.copy_(torch.where(x > 0, torch.ones_like(x), slopes))

    def exponential(x: Tensor, rate: float = 1.0) -> Tensor:
        return -torch.log(r.uniform(x.shape)) / rate

    def like(draw: Callable[[Size], Tensor]) -> _Draw:
        def drawn(x: Tensor, *, dtype: torch.dtype | None = None, **where: Any) -> Tensor:
            return draw(x.shape).to(dtype or x.dtype)

        return drawn

    def in_place(draw: Callable[..., Tensor]) -> _Draw:
        return lambda x, *settings, **named: x.copy_(draw(x, *settings, **named))

    def sized(draw: Callable[[Size], Tensor]) -> _Draw:
        def drawn(size: Size, *, dtype: torch.dtype | None = None, **where: Any) -> Tensor:
            return factory(draw(size), dtype)

        return drawn

    return {
        "rand": sized(r.uniform),
        "randn": sized(r.normal),
        "rand_like": like(r.uniform),
        "randn_like": like(r.normal),
        "randint": randint,
        "randint_like": randint_like,
        "random_": random_,
        "randperm": randperm,
        "multinomial": multinomial,
        "bernoulli": lambda x, p=None: chance(x, x if p is None else p),
        "bernoulli_": in_place(lambda x, p=0.5: chance(x, p)),
        "normal": normal,
        "normal_": in_place(lambda x, mean=0.0, std=1.0: r.normal(x.shape) * std + mean),
        "log_normal_": in_place(
            lambda x, mean=1.0, std=2.0: torch.exp(r.normal(x.shape) * std + mean)
        ),
        "uniform_": in_place(lambda x, low=0.0, high=1.0: r.uniform(x.shape) * (high - low) + low),
        "exponential_": in_place(exponential),
        "geometric_": in_place(lambda x, p: torch.ceil(exponential(x, -math.log1p(-p)))),
        "cauchy_": in_place(
            lambda x, median=0.0, sigma=1.0: (
                torch.tan(math.pi * (r.uniform(x.shape) - 0.5)) * sigma + median
            )
        ),
        "native_dropout": native_dropout,
        "rrelu_with_noise": rrelu,
        "rrelu_with_noise_": in_place(rrelu),
    }
