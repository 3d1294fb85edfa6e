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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from device_sdk.wire.codec.errors import WireError

CborValue = (
    None | bool | int | float | str | bytes | Sequence["CborValue"] | Mapping[str, "CborValue"]
)

MAX_DEPTH = 16
_FLOATS = {25: struct.Struct(">e"), 26: struct.Struct(">f"), 27: struct.Struct(">d")}
_WIDTHS = ((25, ">BH"), (26, ">BI"), (27, ">BQ"))
_SHORT_TEXT = [bytes((3 << 5 | length,)) for length in range(24)]  # heads of most of the items
_SIMPLE = {20: False, 21: True, 22: None}


def encode(value: CborValue) -> bytes:
    """The canonical bytes of ``value``. Raises ``ValueError`` for what the subset has no form for.

    Tuples are written as arrays, and ``bytearray`` and ``memoryview`` are refused: a value that
    can change while it is written has no canonical form.
    """
    out = bytearray()
    # What is left to write of each container that is open, the innermost last.
    rest: list[Iterator[CborValue]] = [iter((value,))]
    while rest:
        for item in rest[-1]:
            if isinstance(item, str):
                text = item.encode("utf-8")  # a lone surrogate's UnicodeEncodeError is a ValueError
                out += _SHORT_TEXT[len(text)] if len(text) < 24 else _head(3, len(text))
                out += text
            elif isinstance(item, bytes):
                out += _head(2, len(item))
                out += item
            elif item is None:
                out.append(0xF6)
            elif isinstance(item, bool):
                out.append(0xF5 if item else 0xF4)
            elif isinstance(item, int):
                out += _head(0, item) if item >= 0 else _head(1, -1 - item)
            elif isinstance(item, float):
                out += _float(item)
            elif isinstance(item, (list, tuple, dict)):
                if item and len(rest) > MAX_DEPTH:
                    raise ValueError(f"value nested deeper than {MAX_DEPTH} levels")
                if isinstance(item, dict):
                    out += _head(5, len(item))
                    rest.append(_in_turn(item))
                else:
                    out += _head(4, len(item))
                    rest.append(iter(item))
                break
            else:
                raise ValueError(f"{type(item).__name__} has no form in canonical CBOR")
        else:
            rest.pop()
    return bytes(out)


def _in_turn(mapping: dict[str, CborValue]) -> Iterator[CborValue]:
    """Each key and then its value, sorted by the keys' encodings: shorter first, then by bytes."""
    try:
        keys = sorted(sorted(map(str.encode, mapping)), key=len)
    except TypeError as error:
        raise ValueError("only text keys are allowed in a map") from error
    names = [key.decode() for key in keys]
    return iter([each for name in names for each in (name, mapping[name])])


def decode(data: bytes, *, limit_bytes: int) -> CborValue:
    """The value whose canonical encoding is exactly ``data``.

    Raises :class:`WireError`: ``too-large`` above ``limit_bytes``, else ``bad-cbor``.
    """
    if len(data) > limit_bytes:
        raise WireError("too-large", f"{len(data)} bytes of CBOR, at most {limit_bytes} allowed")
    value = _read(bytes(data))
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
    if argument < 256:
        return bytes((major << 5 | 24, argument))
    for info, layout in _WIDTHS:
        if argument < 1 << (8 << (info - 24)):
            return struct.pack(layout, major << 5 | info, argument)
    raise ValueError("integer out of range: CBOR here holds -2^64 to 2^64 - 1")


def _float(value: float) -> bytes:
    for info, layout in _FLOATS.items():
        try:
            packed = layout.pack(value)
        except OverflowError:
            continue
        if math.isfinite(value) and layout.unpack(packed)[0] == value:
            return bytes((7 << 5 | info,)) + packed
    raise ValueError(f"{value} has no form in canonical CBOR: floats must be finite")


def _read(data: bytes) -> CborValue:
    """The one value that fills ``data``. Every read checks what is left first."""
    at, size = 0, len(data)
    # The container being read: its items so far (a map's keys and values in turn), how many are
    # still to come, whether it is a map, the encoding of its last key. ``outer``: those around it.
    items: list[Any] = []
    left, in_map, last_key = 1, False, b""
    outer: list[tuple[list[Any], int, bool, bytes]] = []
    while left or outer:
        if not left:
            whole = dict(zip(items[::2], items[1::2], strict=True)) if in_map else items
            items, left, in_map, last_key = outer.pop()
            items.append(whole)
            continue
        left -= 1
        start = at
        if at >= size:
            raise _bad("1 bytes announced, 0 are left")
        major, argument = data[at] >> 5, data[at] & 31
        at += 1
        is_key = in_map and left % 2 == 1
        if is_key and major != 3:
            raise _bad("only text keys are allowed")
        if argument > 23 and major != 7:
            if argument > 27:
                raise _bad("indefinite or reserved length")
            width = 1 << (argument - 24)
            if at + width > size:
                raise _bad(f"{width} bytes announced, {size - at} are left")
            argument = int.from_bytes(data[at : at + width], "big")
            at += width
            if argument < (24 if width == 1 else 1 << (4 * width)):
                raise _bad(f"{argument} is not in its shortest form")
        if major in (2, 3):
            end = at + argument
            if end > size:
                raise _bad(f"{argument} bytes announced, {size - at} are left")
            raw = data[at:end]
            at = end
            if major == 2:
                items.append(raw)
                continue
            try:
                items.append(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise _bad("a text string is not UTF-8") from error
            if is_key:
                if data[start:at] <= last_key:
                    raise _bad("map keys are repeated or out of order")
                last_key = data[start:at]
        elif major < 2:
            items.append(-1 - argument if major else argument)
        elif major < 6:
            count = argument if major == 4 else 2 * argument
            # Every item takes at least a byte: refuse a huge count before any work is done for it.
            if count > size - at:
                raise _bad(f"{count} items announced, {size - at} bytes left")
            if count and len(outer) >= MAX_DEPTH:
                raise _bad(f"nested deeper than {MAX_DEPTH} levels")
            outer.append((items, left, in_map, last_key))
            items, left, in_map, last_key = [], count, major == 5, b""
        elif major == 6:
            raise _bad("tags are not allowed")
        elif argument in _SIMPLE:
            items.append(_SIMPLE[argument])
        else:
            if argument not in _FLOATS:
                raise _bad(f"simple value {argument} is not allowed")
            layout = _FLOATS[argument]
            if at + layout.size > size:
                raise _bad(f"{layout.size} bytes announced, {size - at} are left")
            (number,) = layout.unpack_from(data, at)
            at += layout.size
            if not math.isfinite(number):
                raise _bad("floats must be finite")
            items.append(number)
    if at != size:
        raise _bad(f"{size - at} bytes follow the value")
    return items[0]  # type: ignore[no-any-return]
