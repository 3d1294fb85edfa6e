"""The protobuf wire format, as much as reading an ONNX file needs.

Written for hostile bytes: every length is checked before it is used, nothing is copied but short
strings, and a budget bounds the number of fields, hence time and memory. What an honest serialiser
never writes (groups, a singular field given twice) is refused: other parsers resolve it by rules of
their own, and a checker must see what the runtime will see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from device_sdk.artifact.errors import ArtifactError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


@dataclass
class Budget:
    """How many more fields may be read."""

    fields: int = 500_000

    def spend(self) -> None:
        """Count one field. Raises ArtifactError once there are too many."""
        self.fields -= 1
        if self.fields < 0:
            raise ArtifactError("ONNX file: more fields than any real train step has")


def fields(data: memoryview, budget: Budget) -> Iterator[tuple[int, int, int | memoryview]]:
    """(field number, wire type, value) of a message, in order; a value is an int or a view."""
    position, end = 0, len(data)
    while position < end:
        budget.spend()
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if number == 0 or number >= 2**29:
            raise ArtifactError("ONNX file: a field number is out of range")
        if wire == VARINT:
            value, position = _varint(data, position)
            yield number, wire, value
            continue
        if wire == BYTES:
            size, position = _varint(data, position)
        elif wire == FIXED64:
            size = 8
        elif wire == FIXED32:
            size = 4
        else:
            raise ArtifactError(f"ONNX file: wire type {wire} is not used by ONNX")
        if size > end - position:
            raise ArtifactError("ONNX file: a field runs past the end of its message")
        yield number, wire, data[position : position + size]
        position += size


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    result = shift = 0
    end = len(data)
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            if result >= 2**64:
                raise ArtifactError("ONNX file: a number has more than 64 bits")
            return result, position
        shift += 7
    raise ArtifactError("ONNX file: a number is cut off or too long")


def message(wire: int, value: int | memoryview, what: str) -> memoryview:
    """The bytes of an embedded message."""
    if wire != BYTES or not isinstance(value, memoryview):
        raise ArtifactError(f"ONNX file: {what} has the wrong wire type")
    return value


def text(wire: int, value: int | memoryview, what: str, max_bytes: int = 4096) -> str:
    """A UTF-8 string."""
    view = message(wire, value, what)
    if len(view) > max_bytes:
        raise ArtifactError(f"ONNX file: {what} has {len(view)} bytes, more than {max_bytes}")
    try:
        return bytes(view).decode("utf-8")
    except UnicodeDecodeError:
        raise ArtifactError(f"ONNX file: {what} is not UTF-8") from None


def integer(wire: int, value: int | memoryview, what: str) -> int:
    """A signed 64-bit integer."""
    if wire != VARINT or not isinstance(value, int):
        raise ArtifactError(f"ONNX file: {what} has the wrong wire type")
    return value - 2**64 if value >= 2**63 else value


class Once:
    """Refuses a singular field that is given twice in one message."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._seen: set[int] = set()

    def __call__(self, number: int) -> None:
        if number in self._seen:
            raise ArtifactError(f"ONNX file: field {number} of {self._what} is given twice")
        self._seen.add(number)
