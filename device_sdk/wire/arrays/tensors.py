"""Named arrays as bytes: fixed layout, little-endian, every length known from the headers.

``count 2``, then for each array, by name in increasing order of its bytes: ``name length 1 | name |
form 1 | rank 1 | dimensions 4 each | payload``. Nothing is aligned or padded.

Float rows may travel as codes of eight or four bits with a scale each, rounded stochastically
(unbiased). A scale is stored as the upper 16 bits of a float32 (bfloat16), rounded up: the range of
float32 in two bytes, for a quantisation step at most 0.8 % coarser. That holds for four bits as
well: a row of 64 codes takes 32 bytes, and a byte less for its scale would save 3 % at the cost of
range.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.codec.errors import WireError

LEAST_SCALE = 1e-30
LARGEST_VALUE = 1e12
"""Values above are refused on both ends: no model that trains has any."""
EIGHT_BITS = 127
"""The largest code of eight bits; -128 is not used."""
FOUR_BITS = 7
"""The largest code of four bits; -8 is not used."""
# Little-endian wherever this runs: the upper half of a float is the second one.
_UPPER_HALF, _FLOAT32 = np.dtype("<u2"), np.dtype("<f4")
_LARGEST_SCALES = {code: LARGEST_VALUE / code * 1.01 for code in (EIGHT_BITS, FOUR_BITS)}
# As bfloat16: the least one that is not below LEAST_SCALE, and the largest not above the largest
# scale.
_LEAST_BITS = (int(np.float32(LEAST_SCALE).view(np.uint32)) + 0xFFFF) >> 16
_LARGEST_BITS = {
    code: int(np.float32(scale).view(np.uint32)) >> 16 for code, scale in _LARGEST_SCALES.items()
}
_UNUSED = {code: (255 - code).to_bytes(1, "little") for code in _LARGEST_SCALES}
"""The code below the least, as a byte."""


def quantise(
    values: NDArray[np.float32], rng: np.random.Generator, largest_code: int = EIGHT_BITS
) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    """Scales (bfloat16 bits, [rows]) and codes (int8 up to ``largest_code``, [rows, columns]).

    Each code is floor(value / scale + u) with u uniform in [0, 1), so its mean is the value; scale
    = largest magnitude of the row / ``largest_code``, rounded up. A row whose scale would be below
    1e-30 becomes zero. ``largest_code``: ``EIGHT_BITS`` or ``FOUR_BITS``. Values are finite, and at
    most 1e12.
    """
    largest = np.abs(values).max(axis=1, initial=0.0).astype(np.float32)
    raw = (largest / np.float32(largest_code)).view(np.uint32)
    scales = ((raw.astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16)
    scales[scale_values(scales) < LEAST_SCALE] = 0
    divisors = scale_values(scales)
    divisors[divisors == 0] = np.inf
    draws = rng.random(values.shape, dtype=np.float32)
    codes = np.floor(values / divisors[:, None] + draws)
    # The largest code plus a draw just below 1 may round to the next integer in float32.
    return scales, np.clip(codes, -largest_code, largest_code).astype(np.int8)


def dequantise(
    scales: NDArray[np.uint16], codes: NDArray[np.int8], largest_code: int = EIGHT_BITS
) -> NDArray[np.float32]:
    """float32 [rows, columns]. Raises ``WireError("bad-values")`` unless scales are 0 or sane.

    Also refused: the code below minus ``largest_code``, which the encoder never writes, and a code
    other than 0 in a row of scale 0: the same values would have two encodings.
    """
    # A third of the cost of finding the least.
    codes_used = _UNUSED[largest_code] not in codes.tobytes()
    factors = scale_values(scales)
    # Positive floats are in the order of their bits, negative ones and NaN lie above: that settles
    # the common case. To find a place costs a quarter of finding a value.
    if (
        codes_used
        and scales.size
        and int(scales[scales.argmin()]) >= _LEAST_BITS
        and int(scales[scales.argmax()]) <= _LARGEST_BITS[largest_code]
    ):
        return codes * factors[:, None]
    most = _LARGEST_SCALES[largest_code]
    usable = (factors == 0) | ((factors >= LEAST_SCALE) & (factors <= most))
    if not usable.all():  # NaN and negative numbers fail the comparisons too
        raise WireError(
            "bad-values", f"a row's scale is neither 0 nor in {LEAST_SCALE} to {most:.1g}"
        )
    # Minus zero compares equal to zero: look at the bits.
    if (scales == 0x8000).any():
        raise WireError("bad-values", "a row's scale is minus zero")
    if not codes_used:
        raise WireError("bad-values", f"code {-largest_code - 1} is not used")
    silent = factors == 0
    if silent.any() and codes[silent].any():
        raise WireError("bad-values", "a row of scale 0 holds codes other than 0")
    return codes * factors[:, None]


def scale_values(scales: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 bits, one-dimensional, as float32."""
    halves = np.zeros(2 * len(scales), dtype=_UPPER_HALF)
    halves[1::2] = scales
    return halves.view(_FLOAT32)


class BeyondWire(ValueError):
    """Values that no codec carries: not finite, or above 1e12 in magnitude."""


def largest_of(values: NDArray[np.floating]) -> float:
    """The largest magnitude, 0 of none. Raises :class:`BeyondWire` unless all values are finite and
    at most 1e12."""
    largest = float(np.abs(values).max(initial=0.0))
    # NaN fails the comparison.
    if not largest <= LARGEST_VALUE:
        raise BeyondWire(
            "a value is not finite or exceeds 1e12 in magnitude: look at the scale of the data, "
            "and at the learning rate"
        )
    return largest


# Rows of codes in four bits each: two to a byte, the first in the lower half.
#
# A row of an odd number of codes ends with four zero bits, so that each row starts on a byte.


def row_bytes(columns: int) -> int:
    """Bytes of a row of ``columns`` codes."""
    return -(-columns // 2)


def pack_rows(codes: NDArray[np.int8]) -> bytes:
    """The bytes of int8 [rows, columns]; codes are -8 to 7."""
    rows, columns = codes.shape
    halves = np.zeros((rows, 2 * row_bytes(columns)), dtype=np.uint8)
    halves[:, :columns] = codes.view(np.uint8) & 15
    packed: NDArray[np.uint8] = halves[:, 0::2] | halves[:, 1::2] << np.uint8(4)
    return packed.tobytes()


def unpack_rows(data: bytes | memoryview, rows: int, columns: int) -> NDArray[np.int8]:
    """int8 [rows, columns], of exactly ``rows * row_bytes(columns)`` bytes.

    Raises ``WireError("bad-values")`` where what fills up an odd row is not zero.
    """
    packed = np.frombuffer(data, dtype=np.uint8).reshape(rows, row_bytes(columns))
    if columns % 2 and (packed[:, -1] > 15).any():
        raise WireError("bad-values", "four bits behind an odd row are not zero")
    codes = np.empty((rows, packed.shape[1], 2), dtype=np.int8)
    signed = packed.view(np.int8)
    # Four bits' sign, in eight: shifting a signed number to the right repeats its sign.
    np.right_shift(np.left_shift(signed, 4), 4, out=codes[:, :, 0])
    np.right_shift(signed, 4, out=codes[:, :, 1])
    return codes.reshape(rows, 2 * packed.shape[1])[:, :columns]


LARGEST_TO_HAND_ON = 9e11
"""A value up to this may be handed on, whatever codecs made of it on its way: below 1e12."""

_NAME = re.compile(rb"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")
_MOST_RANK = 8
_INT8_ROWS = 32
_HALF = 33
_INT4_ROWS = 34
_ROWS = {_INT8_ROWS: EIGHT_BITS, _INT4_ROWS: FOUR_BITS}
"""Forms of codes with a scale a row, and the largest code of each."""
# Forms below 32 are stored as they are, and decoded to the same dtype.
_PLAIN = {
    1: "<f4",
    2: "<f2",
    3: "<i8",
    4: "<i4",
    5: "<i2",
    6: "<i1",
    7: "<u1",
    8: "<u2",
    9: "?",
}
_FORM_OF = {np.dtype(dtype).name: form for form, dtype in _PLAIN.items()}


class Codec(IntEnum):
    """How float32 arrays travel, the widest first. All other dtypes travel as they are, and so does
    what has no axis.

    An array that a codec does not hold travels in the next wider one that does. ``FLOAT16`` holds
    what is at most 65,504, and not so small throughout that eight bits would be as fine; the codes
    of a scale a row hold what does not mostly become 0.
    """

    FLOAT32 = 1
    FLOAT16 = 2
    """Rounded to the nearest float16; decoded to float32."""
    INT8 = 3
    """A scale for each row along the last axis, stochastic rounding; decoded to float32."""
    INT4 = 4
    """As ``INT8``, with codes of -7 to 7, two to a byte."""


_FORMS = {
    Codec.FLOAT32: 1,
    Codec.FLOAT16: _HALF,
    Codec.INT8: _INT8_ROWS,
    Codec.INT4: _INT4_ROWS,
}
_CODES = {Codec.INT8: EIGHT_BITS, Codec.INT4: FOUR_BITS}
_LARGEST_HALF = 65_504.0
_LEAST_HALF = 2.0**-17
"""A unit of float16's least ones, 2^-24, is as fine as eight bits of this."""
_HALF_BITS, _HALF_BIAS = np.int32(-0x70002000), np.float32(2.0**112)
_BEYOND_HALF = 65_536.0
_LOST = 4, 3
"""Codes do not hold values of which, but for zeros, as many as 3 of 4 become 0."""


def encode_values(
    values: NDArray[np.float32], codec: Codec, rng: np.random.Generator | None
) -> tuple[Codec, list[bytes]]:
    """The first of ``codec`` and those that are wider which holds values [rows, columns], and what
    it makes of them; ``rng`` is needed for ``INT8`` and ``INT4``.

    Raises :class:`BeyondWire` for values that none does.
    """
    largest = largest_of(values)
    if codec in _CODES:
        if rng is None:
            raise ValueError(
                f"{codec.name} rounds stochastically: pass a numpy.random.Generator as rng"
            )
        scales, codes = quantise(values, rng, _CODES[codec])
        if not _are_lost(values, codes):
            packed = pack_rows(codes) if codec is Codec.INT4 else codes.tobytes()
            return codec, [scales.astype("<u2").tobytes(), packed]
    elif codec is Codec.FLOAT32:
        return codec, [values.astype("<f4").tobytes()]
    elif _fit_halves(largest):
        return codec, [values.astype("<f2").tobytes()]
    return encode_values(values, Codec(codec - 1), rng)


def halved(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """As float16 where that holds them, else as float32. Raises :class:`BeyondWire` where neither
    does."""
    return values.astype(np.float16 if _fit_halves(largest_of(values)) else np.float32)


def singles(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """The same numbers as float32, a new array. Of float16 in a fraction of NumPy's time."""
    if values.dtype != np.float16:
        return values.astype(np.float32)
    # Sign, exponent and fraction at their places; then only the exponent's bias is another.
    bits = values.view(np.int16).astype(np.int32)
    bits <<= 13
    bits &= _HALF_BITS
    found = bits.view(np.float32)
    found *= _HALF_BIAS
    flat = found.reshape(-1)
    if flat @ flat < _BEYOND_HALF**2:
        return found
    return values.astype(np.float32)  # perhaps not finite


def _fit_halves(largest: float) -> bool:
    return largest == 0 or _LEAST_HALF <= largest <= _LARGEST_HALF


def _are_lost(values: NDArray[np.float32], codes: NDArray[np.int8]) -> bool:
    whole, most = _LOST
    zeros = codes.size - np.count_nonzero(codes)
    if zeros * whole < codes.size * most:
        return False  # mostly, and bytes are quickly counted
    there = np.count_nonzero(values)
    return bool(there > 0 and (zeros - (values.size - there)) * whole >= there * most)


@dataclass(frozen=True, slots=True)
class TensorLimits:
    """What a decoder accepts."""

    most_arrays: int = 256
    most_bytes: int = 256 << 20
    """Of all decoded arrays together."""


def encode_tensors(
    tensors: Mapping[str, NDArray[Any]],
    codec: Codec,
    rng: np.random.Generator | None = None,
    *,
    exact: Collection[str] = (),
) -> bytes:
    """The bytes of ``tensors``; ``rng`` is needed for ``INT8`` and ``INT4`` only. Those named in
    ``exact`` travel as they are.

    Each array travels in the first of ``codec`` and those that are wider which holds it. Raises
    ValueError for bad names or dtypes, :class:`BeyondWire` for values that are not finite or exceed
    1e12.
    """
    if len(tensors) > 65_535:
        raise ValueError(f"{len(tensors)} arrays; at most 65,535 fit")
    parts = [struct.pack("<H", len(tensors))]
    for name in sorted(tensors, key=str.encode):
        encoded_name = name.encode()
        if not _NAME.fullmatch(encoded_name) or len(encoded_name) > 255:
            raise ValueError(f"{name!r} is no name for an array; expected such as 'items.weight'")
        parts.append(struct.pack("<B", len(encoded_name)) + encoded_name)
        try:
            own = Codec.FLOAT32 if name in exact else codec
            parts.extend(_encode_array(np.asarray(tensors[name]), own, rng))
        except ValueError as error:
            raise type(error)(f"array {name!r}: {error}") from error
    return b"".join(parts)


def require_encodable(tensors: Mapping[str, NDArray[Any]]) -> None:
    """Raises :class:`BeyondWire`, as :func:`encode_tensors` would."""
    for name, array in tensors.items():
        if array.dtype.kind == "f":
            try:
                largest_of(array)
            except BeyondWire as error:
                raise BeyondWire(f"array {name!r}: {error}") from error


def decode_tensors(data: bytes, *, limits: TensorLimits | None = None) -> dict[str, NDArray[Any]]:
    """The arrays in ``data``: fresh, writable, in native byte order.

    Raises ``WireError``: ``truncated``, ``too-large``, ``bad-name``, ``bad-format``, ``bad-shape``,
    ``bad-values``, ``bad-length``. No more memory is taken than ``limits`` allows and than a small
    multiple of ``len(data)``.
    """
    limits = limits if limits is not None else TensorLimits()
    reader = _Reader(memoryview(data), limits.most_bytes)
    (count,) = struct.unpack("<H", reader.take(2))
    if count > limits.most_arrays:
        raise WireError("too-large", f"{count} arrays, at most {limits.most_arrays} allowed")
    tensors: dict[str, NDArray[Any]] = {}
    previous = b""
    for _ in range(count):
        name = bytes(reader.take(reader.take(1)[0]))
        if not _NAME.fullmatch(name) or name <= previous:
            raise WireError("bad-name", "names must be words in strictly increasing order")
        previous = name
        tensors[name.decode()] = _decode_array(reader)
    if reader.left:
        raise WireError("bad-length", f"{len(reader.left)} bytes follow the last array")
    return tensors


@dataclass(slots=True)
class _Reader:
    """A cursor that checks what is left, and what decoded arrays may take."""

    left: memoryview
    most_bytes: int

    def take(self, count: int) -> memoryview:
        if count > len(self.left):
            raise WireError("truncated", f"{count} bytes announced, {len(self.left)} are left")
        taken, self.left = self.left[:count], self.left[count:]
        return taken

    def spend(self, decoded_bytes: int) -> None:
        self.most_bytes -= decoded_bytes
        if self.most_bytes < 0:
            raise WireError("too-large", "the arrays take more memory than is allowed")


def _encode_array(
    array: NDArray[Any], codec: Codec, rng: np.random.Generator | None
) -> list[bytes]:
    form = _FORM_OF.get(array.dtype.name)
    if form is None:
        raise ValueError(f"dtype {array.dtype} has no form; expected one of {sorted(_FORM_OF)}")
    if array.ndim > _MOST_RANK or any(size >= 2**32 for size in array.shape):
        raise ValueError(f"shape {array.shape}; expected rank up to {_MOST_RANK}")
    if array.dtype == np.float32 and form == _FORMS[Codec.FLOAT32]:
        own = codec if array.ndim else Codec.FLOAT32
        used, payload = encode_values(array.reshape(_rows(array.shape)), own, rng)
        form = _FORMS[used]
    else:
        if array.dtype.kind == "f":
            largest_of(array)
        payload = [array.astype(_PLAIN[form]).tobytes()]
    return [struct.pack(f"<BB{array.ndim}I", form, array.ndim, *array.shape), *payload]


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def _decode_array(reader: _Reader) -> NDArray[Any]:
    form, rank = reader.take(2)
    if form not in _PLAIN and form not in _ROWS and form != _HALF:
        raise WireError("bad-format", f"form {form} of an array is unknown")
    if rank > _MOST_RANK or (form in _ROWS and rank == 0):
        raise WireError("bad-shape", f"rank {rank}; expected at most {_MOST_RANK}")
    shape = struct.unpack(f"<{rank}I", reader.take(4 * rank))
    if 0 in shape and math.prod(max(1, size) for size in shape) >= 2**31:
        # It would take no memory, but numpy has no array of such a shape.
        raise WireError("bad-shape", "an empty array with absurd dimensions")
    elements = math.prod(shape)
    dtype = np.dtype(_PLAIN.get(form, "<f4"))
    reader.spend(elements * dtype.itemsize)
    if form in _ROWS:
        rows, columns = _rows(shape)
        reader.spend(rows)  # an empty last axis must not make the scales free
        scales = np.frombuffer(reader.take(2 * rows), dtype="<u2")
        if form == _INT4_ROWS:
            codes = unpack_rows(reader.take(rows * row_bytes(columns)), rows, columns)
        else:
            codes = np.frombuffer(reader.take(elements), dtype=np.int8).reshape(rows, columns)
        return dequantise(scales, codes, _ROWS[form]).reshape(shape)
    stored = np.dtype("<f2") if form == _HALF else dtype
    raw = reader.take(elements * stored.itemsize)
    if stored.kind == "b" and elements and np.frombuffer(raw, dtype=np.uint8).max() > 1:
        raise WireError("bad-values", "a truth value is neither 0 nor 1")
    array = np.frombuffer(raw, dtype=stored).reshape(shape)
    if stored.kind == "f" and array.size and not float(np.abs(array).max()) <= LARGEST_VALUE:
        raise WireError("bad-values", "a value is not finite or exceeds 1e12")
    return array.astype(dtype.newbyteorder("="))
