"""Fourier transforms as products with constant matrices, and complex numbers as pairs of tensors.

A graph has no complex numbers. What torch's transforms return is a ``Pair`` here: an object that
answers to torch's functions with arithmetic on its two real tensors, which are recorded and
differentiated like all others. A function that it does not know raises ExportError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from export.errors import ExportError
from export.insides import disable_current_modes
from export.rewrites import RECORDED, taking
from export.rewrites.tables import sliced

# A matrix of a transform of this many points has 64 MiB.
_LONGEST = 4096

# What moves or adds up elements does the same to both parts.
_BOTH = {
    "reshape", "view", "permute", "transpose", "swapaxes", "movedim", "squeeze", "unsqueeze",
    "flatten", "unflatten", "contiguous", "clone", "detach", "sum", "mean", "expand", "repeat",
    "index_select", "gather", "roll", "flip", "narrow", "select", "cat", "stack", "t", "mT",
    "fftshift", "fft_fftshift", "fft_ifftshift", "pad", "zeros_like", "chunk", "split", "unbind",
}  # fmt: skip


class Pair:
    """A complex tensor: ``real`` and ``imag``, float32 of one shape."""

    dtype = torch.complex64
    device = torch.device("cpu")

    def __init__(self, real: Tensor, imag: Tensor) -> None:
        self.real = real
        self.imag = imag

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", str(function))
        given = kwargs or {}
        if name in _BOTH:
            real, imag = (function(*_parts(args, part), **given) for part in (0, 1))
            return _pairs(real, imag)
        if name == "einsum":
            return _einsum(function, *args)
        if name == "where":
            condition, a, b = args[0], pair(args[1]), pair(args[2])
            return Pair(function(condition, a.real, b.real), function(condition, a.imag, b.imag))
        own = getattr(args[0] if isinstance(args[0], Pair) else pair(args[0]), _OWN.get(name, name))
        return own(*args[1:], **given) if callable(own) else own

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # What others ask every object, as whether it is a named tuple.
            raise AttributeError(name)
        if name not in _BOTH:
            raise ExportError(
                f"{name!r} of complex numbers",
                operator=f"aten.{name}",
                instead="the real and the imaginary part (.real, .imag), two tensors",
            )

        def both(*args: Any, **kwargs: Any) -> Any:
            real, imag = getattr(self.real, name), getattr(self.imag, name)
            return _pairs(real(*args, **kwargs), imag(*args, **kwargs))

        return both

    @property
    def shape(self) -> torch.Size:
        return self.real.shape

    def size(self, axis: int | None = None) -> Any:
        return self.real.shape if axis is None else self.real.shape[axis]

    @property
    def ndim(self) -> int:
        return self.real.dim()

    def dim(self) -> int:
        return self.real.dim()

    def is_complex(self) -> bool:
        return True

    def to(self, *args: Any, **kwargs: Any) -> Pair:
        return self

    type = to

    def ones_like(self) -> Pair:
        return Pair(torch.ones_like(self.real), torch.zeros_like(self.imag))

    def __getitem__(self, key: Any) -> Pair:
        return Pair(self.real[key], self.imag[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.real[key], self.imag[key] = pair(value).real, pair(value).imag

    def __neg__(self) -> Pair:
        return Pair(-self.real, -self.imag)

    def __add__(self, other: Any) -> Pair:
        return Pair(self.real + pair(other).real, self.imag + pair(other).imag)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pair:
        return self + -pair(other)

    def __rsub__(self, other: Any) -> Pair:
        return pair(other) - self

    def __mul__(self, other: Any) -> Pair:
        if not is_complex(other):
            return Pair(self.real * other, self.imag * other)
        x, y = self, pair(other)
        return Pair(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Pair:
        if not is_complex(other):
            return Pair(self.real / other, self.imag / other)
        below = pair(other)
        square = below.real * below.real + below.imag * below.imag
        return self * below.conj() / square

    def __rtruediv__(self, other: Any) -> Pair:
        return pair(other) / self

    def __matmul__(self, other: Any) -> Pair:
        x, y = self, pair(other)
        return Pair(x.real @ y.real - x.imag @ y.imag, x.real @ y.imag + x.imag @ y.real)

    def __rmatmul__(self, other: Any) -> Pair:
        return pair(other) @ self

    def __pow__(self, power: int) -> Pair:
        if power != 2:
            raise ExportError(f"the power {power} of complex numbers", instead="products, or 2")
        return self * self

    def conj(self) -> Pair:
        return Pair(self.real, -self.imag)

    def exp(self) -> Pair:
        size = torch.exp(self.real)
        return Pair(size * torch.cos(self.imag), size * torch.sin(self.imag))

    def abs(self) -> Tensor:
        """The length, with torch's gradient of 0 where it is 0."""
        square = self.real * self.real + self.imag * self.imag
        nothing = square == 0
        return torch.sqrt(square.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)

    __abs__ = abs

    def angle(self) -> Tensor:
        return torch.atan2(self.imag, self.real)

    def view_as_real(self) -> Tensor:
        return torch.stack([self.real, self.imag], -1)


# torch's names for what Python or a Pair calls otherwise.
_OWN = {
    "mul": "__mul__", "multiply": "__mul__", "add": "__add__", "sub": "__sub__",
    "div": "__truediv__", "true_divide": "__truediv__", "matmul": "__matmul__",
    "mm": "__matmul__", "bmm": "__matmul__", "pow": "__pow__", "neg": "__neg__",
    "absolute": "abs", "conj_physical": "conj", "resolve_conj": "clone",
}  # fmt: skip


def pair(value: Any) -> Pair:
    """A complex number of any kind as a pair; a real one with an imaginary part of 0."""
    if isinstance(value, Pair):
        return value
    if isinstance(value, Tensor):
        if value.is_complex():
            # A constant of the model's: its parts are constants, too.
            with disable_current_modes():
                parts = torch.view_as_real(value)
                return Pair(parts[..., 0].clone(), parts[..., 1].clone())
        return Pair(value, torch.zeros_like(value))
    number = complex(value)
    return Pair(torch.tensor(number.real), torch.tensor(number.imag))


def is_complex(value: Any) -> bool:
    """Whether it is a complex number, a pair, or a complex tensor: a constant of the model's."""
    return isinstance(value, (Pair, complex)) or (isinstance(value, Tensor) and value.is_complex())


def _pairs(real: Any, imag: Any) -> Any:
    """Each real part with its imaginary one: of a tensor, or of several."""
    return Pair(real, imag) if isinstance(real, Tensor) else tuple(map(Pair, real, imag))


def _asks_for_complex(*args: Any, **kwargs: Any) -> bool:
    given = (*args, *kwargs.values())
    return any(isinstance(each, torch.dtype) and each.is_complex for each in given)


def _any_complex(*args: Any, **kwargs: Any) -> bool:
    return any(map(is_complex, args))


def _met(function: Any) -> Any:
    """A function of tensors that meets a complex number, and gives a pair."""

    def run(*args: Any, **kwargs: Any) -> Any:
        pairs = [pair(each) if is_complex(each) else each for each in args]
        return Pair.__torch_function__(function, (), tuple(pairs), kwargs)

    return run


def _read(table: Tensor, key: Any) -> Pair:
    parts = pair(table)
    return Pair(sliced(parts.real, key), sliced(parts.imag, key))


def _parts(value: Any, part: int) -> Any:
    """The same arguments with one part of each pair, also inside lists."""
    if isinstance(value, Pair):
        return value.imag if part else value.real
    if isinstance(value, (list, tuple)):
        return type(value)(_parts(each, part) for each in value)
    return value


def _einsum(einsum: Callable[..., Tensor], equation: str, *operands: Any) -> Pair:
    listed = operands[0] if len(operands) == 1 else operands
    if len(listed) != 2:
        raise ExportError("einsum of complex numbers of other than two", instead="two at a time")
    x, y = map(pair, listed)
    return Pair(
        einsum(equation, x.real, y.real) - einsum(equation, x.imag, y.imag),
        einsum(equation, x.real, y.imag) + einsum(equation, x.imag, y.real),
    )


# The transforms: X_k = sum_t x_t exp(-2 pi i k t / n) over one axis after another.


def _waves(points: Any, rows: Any, columns: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 pi r c / points, [rows, columns]; angles from exact whole numbers.

    A cosine is the sine a quarter of a turn later: onnxruntime 1.24 has none of float64.
    """
    if isinstance(points, int) and points > _LONGEST:
        raise ExportError(
            f"a Fourier transform of {points} points, whose matrix would take "
            f"{points * points * 4 >> 20} MiB",
            operator="aten.fft",
            instead=f"at most {_LONGEST} points: frames (torch.stft), or features made before",
        )
    quarters = 4 * ((torch.arange(rows).unsqueeze(1) * torch.arange(columns)) % points)

    def sine(quarters: Tensor) -> Tensor:
        angle = quarters.to(torch.float64) * (math.pi / (2 * points))
        return torch.sin(angle).to(like.dtype)

    return sine((quarters + points) % (4 * points)), sine(quarters)


def _scale(norm: str | None, points: Any, *, inverse: bool) -> Any:
    if norm == "ortho":
        return points**-0.5
    return 1 / points if (norm == "forward") != inverse else 1.0


def _resized(x: Tensor, size: Any) -> Tensor:
    """Cropped, or followed by zeros, along the last axis."""
    have = x.shape[-1]
    if size is None or size is have or (isinstance(size, int) and size == have):
        return x
    return x[..., :size] if size < have else functional.pad(x, (0, size - have))


def _transform(x: Any, n: Any, dim: int, norm: str | None, *, inverse: bool, half: bool) -> Pair:
    """Along one axis; ``half`` keeps the frequencies up to the middle one."""
    axis = dim % x.dim()
    real = _resized(_parts(x, 0).movedim(axis, -1), n)
    points = real.shape[-1]
    cosine, sine = _waves(points, points, points // 2 + 1 if half else points, real)
    factor = _scale(norm, points, inverse=inverse)
    cosine, sine = cosine * factor, sine * (factor if inverse else -factor)
    if not isinstance(x, Pair):
        result = Pair(real @ cosine, real @ sine)
    else:
        imag = _resized(x.imag.movedim(axis, -1), n)
        result = Pair(real @ cosine - imag @ sine, real @ sine + imag @ cosine)
    return result.movedim(-1, axis)  # type: ignore[no-any-return]


def fft(input: Any, n: Any = None, dim: int = -1, norm: str | None = None) -> Pair:
    """``torch.fft.fft``."""
    return _transform(input, n, dim, norm, inverse=False, half=False)


def ifft(input: Any, n: Any = None, dim: int = -1, norm: str | None = None) -> Pair:
    """``torch.fft.ifft``."""
    return _transform(input, n, dim, norm, inverse=True, half=False)


def rfft(input: Tensor, n: Any = None, dim: int = -1, norm: str | None = None) -> Pair:
    """``torch.fft.rfft``."""
    return _transform(input, n, dim, norm, inverse=False, half=True)


def irfft(input: Any, n: Any = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """``torch.fft.irfft``: each frequency but the first and the middle one stands for two."""
    half = pair(input)
    axis = dim % half.dim()
    points = 2 * (half.shape[axis] - 1) if n is None else n
    real, imag = (_resized(p.movedim(axis, -1), points // 2 + 1) for p in (half.real, half.imag))
    cosine, sine = _waves(points, points // 2 + 1, points, real)
    number = torch.arange(points // 2 + 1).unsqueeze(1)
    once = (number == 0) | (2 * number == points)
    weight = torch.where(once, 1.0, 2.0).to(real.dtype) * _scale(norm, points, inverse=True)
    result: Tensor = (real @ (cosine * weight) - imag @ (sine * weight)).movedim(-1, axis)
    return result


def _over_axes(each: Callable[..., Any], last: Callable[..., Any], *, last_first: bool) -> Any:
    """A transform over several axes: ``last`` over the last of them, ``each`` over the others."""

    def run(
        input: Any, s: Sequence[Any] | None = None, dim: Any = (-2, -1), norm: str | None = None
    ) -> Any:
        axes = list(range(input.dim())) if dim is None else list(dim)
        sizes = [None] * len(axes) if s is None else list(s)
        steps = [(last if i == len(axes) - 1 else each, i) for i in range(len(axes))]
        x = input
        for transform, i in reversed(steps) if last_first else steps:
            x = transform(x, sizes[i], axes[i], norm)
        return x

    return run


@taking(torch.stft)
def stft(input: Tensor, n_fft: int, window: Tensor | None, settings: Mapping[str, Any]) -> Any:
    """``torch.stft`` of [length] or [b, length]: [.., frequencies, frames], complex or in pairs."""
    hop = settings["hop_length"] or n_fft // 4
    x = input
    if settings["center"]:
        batched = x.reshape(-1, 1, x.shape[-1])
        padded = functional.pad(batched, (n_fft // 2, n_fft // 2), mode=settings["pad_mode"])
        x = padded.reshape(*x.shape[:-1], padded.shape[-1])
    frames = x.unfold(-1, n_fft, hop) * _window(window, settings["win_length"], n_fft, x)
    one_side = settings["onesided"] in (None, True)
    spectrum = (rfft if one_side else fft)(frames, norm="ortho" if settings["normalized"] else None)
    result: Pair = spectrum.transpose(-1, -2)
    return result if settings["return_complex"] else result.view_as_real()


def _window(window: Tensor | None, length: int | None, n_fft: int, like: Tensor) -> Tensor:
    size = n_fft if length is None else length
    shape = torch.ones(size, dtype=like.dtype) if window is None else window.to(like.dtype)
    left = (n_fft - size) // 2
    return functional.pad(shape, (left, n_fft - size - left))


def istft(
    input: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """``torch.istft`` of [.., frequencies, frames]: frames added up over the windows' squares."""
    if return_complex or onesided is False:
        raise ExportError("istft of two sides", operator="aten.istft", instead="onesided=True")
    hop = n_fft // 4 if hop_length is None else hop_length
    spectrum = view_as_complex(input) if isinstance(input, Tensor) else input
    frames = irfft(spectrum.transpose(-1, -2), n_fft, norm="ortho" if normalized else None)
    shape = _window(window, win_length, n_fft, frames)
    count = frames.shape[-2]
    total = n_fft + hop * (count - 1)
    places = (torch.arange(count).unsqueeze(1) * hop + torch.arange(n_fft)).reshape(-1)
    joined = (frames * shape).reshape(-1, count * n_fft)
    sums = torch.zeros(joined.shape[0], total, dtype=joined.dtype).index_add(1, places, joined)
    squares = (shape * shape).expand(count, n_fft).reshape(-1)
    weights = torch.zeros(total, dtype=joined.dtype).index_add(0, places, squares)
    start = n_fft // 2 if center else 0
    end = total - start if length is None else start + length
    kept = functional.pad(sums, (0, n_fft))[:, start:end]
    below = functional.pad(weights, (0, n_fft), value=1.0)[start:end]
    return (kept / below).reshape(*frames.shape[:-2], kept.shape[-1])


def view_as_complex(input: Tensor) -> Pair:
    """``torch.view_as_complex``: [.., 2] to [..]."""
    return Pair(input[..., 0], input[..., 1])


def polar(abs: Tensor, angle: Tensor) -> Pair:
    """``torch.polar``."""
    return Pair(abs * torch.cos(angle), abs * torch.sin(angle))


def _zeros(*size: Any, dtype: torch.dtype | None = None, **like: Any) -> Any:
    """``torch.zeros`` of complex numbers."""
    return Pair(torch.zeros(*size), torch.zeros(*size))


_fftn = _over_axes(fft, fft, last_first=False)
_ifftn = _over_axes(ifft, ifft, last_first=False)
_rfftn = _over_axes(fft, rfft, last_first=True)
_irfftn = _over_axes(ifft, irfft, last_first=False)


def _all_axes(transform: Any) -> Any:
    def run(input: Any, s: Any = None, dim: Any = None, norm: str | None = None) -> Any:
        if dim is None and s is not None:
            dim = range(-len(s), 0)
        return transform(input, s, dim, norm)

    return run


# What meets complex numbers of Python's (1j * x) and complex tensors.
_MEETING = (
    torch.mul, torch.add, torch.sub, torch.div, torch.matmul, torch.einsum, torch.exp, torch.abs,
    *(getattr(Tensor, name) for name in (
        "mul", "__mul__", "__rmul__", "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__",
        "div", "__truediv__", "__rtruediv__", "matmul", "__matmul__", "__rmatmul__", "exp", "abs",
    )),
)  # fmt: skip

RECORDED.equals({function: _met(function) for function in _MEETING}, of=_any_complex)
RECORDED.equals(
    dict.fromkeys((Tensor.to, Tensor.type), lambda tensor, *how, **named: pair(tensor)),
    of=_asks_for_complex,
)
RECORDED.equals({torch.zeros: _zeros}, of=_asks_for_complex)
RECORDED.equals({Tensor.__getitem__: _read}, of=_any_complex)
RECORDED.equals(
    {
        torch.fft.fft: fft,
        torch.fft.ifft: ifft,
        torch.fft.rfft: rfft,
        torch.fft.irfft: irfft,
        torch.fft.fft2: _fftn,
        torch.fft.ifft2: _ifftn,
        torch.fft.rfft2: _rfftn,
        torch.fft.irfft2: _irfftn,
        torch.fft.fftn: _all_axes(_fftn),
        torch.fft.ifftn: _all_axes(_ifftn),
        torch.fft.rfftn: _all_axes(_rfftn),
        torch.fft.irfftn: _all_axes(_irfftn),
        torch.stft: stft,
        torch.istft: istft,
        torch.complex: Pair,
        torch.polar: polar,
        torch.view_as_complex: view_as_complex,
    }
)
