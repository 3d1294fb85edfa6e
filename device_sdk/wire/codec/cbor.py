"""Canonical CBOR: the one encoding of control messages (RFC 8949, section 4.2.1, a subset).

The subset: integers of up to 64 bits, byte and text strings, arrays, maps with text keys, false,
true, null and finite floats in their shortest form. Refused: tags, indefinite lengths, undefined
and other simple values, NaN and infinities, duplicate or unsorted keys, integers and lengths that
are not in their shortest form, invalid UTF-8, trailing bytes, more than 16 levels, and anything
above the caller's size cap.

Written by hand because a general decoder has to be talked out of a dozen features one by one,
and each of them is a way for two readers to see two different messages in the same bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

from device_sdk.wire.codec.errors import WireError

CborValue = (
    None | bool | int | float | str | bytes | Sequence["CborValue"] | Mapping[str, "CborValue"]
)

MAX_DEPTH = 16
_FLOATS = ((25, ">e"), (26, ">f"), (27, ">d"))
_FLOAT_BYTES = {25: 2, 26: 4, 27: 8}
_WIDTHS = ((24, ">BB"), (25, ">BH"), (26, ">BI"), (27, ">BQ"))


def encode(value: CborValue) -> bytes:
    """The canonical bytes of ``value``. Raises ``ValueError`` for what the subset has no form for.

    Tuples are written as arrays, and ``bytearray`` and ``memoryview`` are refused: a value that
    can change while it is written has no canonical form.
    """
    out = bytearray()
    _write(out, value, MAX_DEPTH)
    return bytes(out)


def decode(data: bytes, *, limit_bytes: int) -> CborValue:
    """The value whose canonical encoding is exactly ``data``.

    Raises :class:`WireError`: ``too-large`` above ``limit_bytes``, else ``bad-cbor``.
    """
    if len(data) > limit_bytes:
        raise WireError("too-large", f"{len(data)} bytes of CBOR, at most {limit_bytes} allowed")
    reader = _CborReader(bytes(data))
    value = reader.value(MAX_DEPTH)
    if reader.position != len(data):
        raise _bad(f"{len(data) - reader.position} bytes follow the value")
    # The reader refuses each non-canonical form where it stands. This second look costs little
    # and does not share the reader's mistakes.
    if encode(value) != data:
        raise _bad("the value's canonical encoding differs from the bytes received")
    return value


def _bad(what: str) -> WireError:
    return WireError("bad-cbor", what)


def _head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes((major << 5 | argument,))
    for info, layout in _WIDTHS:
        if argument < 1 << (8 << (info - 24)):
            return struct.pack(layout, major << 5 | info, argument)
    raise ValueError("integer out of range: CBOR here holds -2^64 to 2^64 - 1")


def _write(out: bytearray, value: CborValue, depth: int) -> None:
    if depth < 0:
        raise ValueError(f"value nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, bytes):
        out += _head(2, len(value))
        out += value
    elif isinstance(value, str):
        out += _text(value)
    elif value is None:
        out.append(0xF6)
    elif isinstance(value, bool):
        out.append(0xF5 if value else 0xF4)
    elif isinstance(value, int):
        out += _head(0, value) if value >= 0 else _head(1, -1 - value)
    elif isinstance(value, float):
        _write_float(out, value)
    elif isinstance(value, (list, tuple)):
        out += _head(4, len(value))
        for item in value:
            _write(out, item, depth - 1)
    elif isinstance(value, dict):
        out += _head(5, len(value))
        if not all(isinstance(key, str) for key in value):
            raise ValueError("only text keys are allowed in a map")
        # Sorted by the keys' encodings: shorter keys first, then by their bytes.
        for encoded_key, key in sorted([(_text(key), key) for key in value]):
            out += encoded_key
            _write(out, value[key], depth - 1)
    else:
        raise ValueError(f"{type(value).__name__} has no form in canonical CBOR")


def _text(value: str) -> bytes:
    text = value.encode("utf-8")  # a lone surrogate raises UnicodeEncodeError, a ValueError
    return _head(3, len(text)) + text


def _write_float(out: bytearray, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{value} has no form in canonical CBOR: floats must be finite")
    for info, layout in _FLOATS:
        try:
            packed = struct.pack(layout, value)
        except OverflowError:
            continue
        if struct.unpack(layout, packed)[0] == value:
            out.append(7 << 5 | info)
            out += packed
            return


class _CborReader:
    """A cursor over untrusted bytes; every read checks what is left first."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise _bad(f"{count} bytes announced, {len(self.data) - self.position} are left")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def value(self, depth: int) -> CborValue:
        if depth < 0:
            raise _bad(f"nested deeper than {MAX_DEPTH} levels")
        initial = self.take(1)[0]
        major, argument = initial >> 5, initial & 31
        if major == 7:
            return self.simple(argument)
        if argument > 27:
            raise _bad("indefinite or reserved length")
        if argument > 23:
            width = 1 << (argument - 24)
            argument = int.from_bytes(self.take(width), "big")
            if argument < (24 if width == 1 else 1 << (4 * width)):
                raise _bad(f"{argument} is not in its shortest form")
        if major == 0:
            return argument
        if major == 1:
            return -1 - argument
        if major == 2:
            return self.take(argument)
        if major == 3:
            try:
                return self.take(argument).decode("utf-8")
            except UnicodeDecodeError as error:
                raise _bad("a text string is not UTF-8") from error
        if major == 6:
            raise _bad("tags are not allowed")
        # Every item takes at least a byte: refuse a huge count before any work is done for it.
        items, left = argument if major == 4 else 2 * argument, len(self.data) - self.position
        if items > left:
            raise _bad(f"{items} items announced, {left} bytes left")
        if major == 4:
            return [self.value(depth - 1) for _ in range(argument)]
        result: dict[str, CborValue] = {}
        previous = b""
        for _ in range(argument):
            start = self.position
            key = self.value(depth)
            if not isinstance(key, str):
                raise _bad("only text keys are allowed")
            encoded = self.data[start : self.position]
            if encoded <= previous:
                raise _bad("map keys are repeated or out of order")
            previous = encoded
            result[key] = self.value(depth - 1)
        return result

    def simple(self, info: int) -> CborValue:
        if info == 20:
            return False
        if info == 21:
            return True
        if info == 22:
            return None
        if info not in _FLOAT_BYTES:
            raise _bad(f"simple value {info} is not allowed")
        raw = self.take(_FLOAT_BYTES[info])
        number = struct.unpack({2: ">e", 4: ">f", 8: ">d"}[len(raw)], raw)[0]
        if not math.isfinite(number):
            raise _bad("floats must be finite")
        return float(number)
