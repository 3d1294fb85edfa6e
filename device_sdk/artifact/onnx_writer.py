"""Writes ONNX files without the onnx package: the inverse of ``onnx_reader``, as much as we need.

Field numbers are those of onnx.proto (ONNX IR version 10).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.onnx_reader import BYTES, FIXED32, VARINT
from device_sdk.artifact.parts import ONNX_ELEMENT_TYPES, Shape

_CODES = {name: code for code, name in ONNX_ELEMENT_TYPES.items()}
# AttributeProto.AttributeType
_FLOAT, _INT, _STRING, _GRAPH, _INTS = 1, 2, 3, 5, 7


class GraphWriter(bytes):
    """A graph's message, as the value of a node's attribute (a loop's body)."""


Attribute = int | float | str | Sequence[int] | GraphWriter


def number(field: int, value: int) -> bytes:
    """A field that holds an integer."""
    return _varint(field << 3 | VARINT) + _varint(value % 2**64)


def data(field: int, value: bytes | memoryview | str) -> bytes:
    """A field that holds bytes, a text or another message."""
    raw = value.encode() if isinstance(value, str) else value
    return b"".join((_varint(field << 3 | BYTES), _varint(len(raw)), raw))


def copied(field: int, wire: int, value: int | memoryview) -> bytes:
    """A field as :func:`~device_sdk.artifact.onnx_reader.fields` read it."""
    if isinstance(value, int):
        return number(field, value)
    return data(field, value) if wire == BYTES else _varint(field << 3 | wire) + bytes(value)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def tensor(name: str, array: NDArray[np.generic]) -> bytes:
    """A TensorProto. Raises ArtifactError for a dtype that no artifact has."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return _tensor_head(name, array) + data(9, little.tobytes())


def external_tensor(name: str, array: NDArray[np.generic], location: str) -> bytes:
    """A TensorProto whose data are what the file ``location`` holds."""
    where = data(13, data(1, "location") + data(2, location))
    return _tensor_head(name, array) + where + number(14, 1)


def _tensor_head(name: str, array: NDArray[np.generic]) -> bytes:
    if array.dtype.name not in _CODES:
        raise ArtifactError(f"{name!r}: dtype {array.dtype} cannot be written to an ONNX file")
    dims = b"".join(number(1, length) for length in array.shape)
    return dims + number(2, _CODES[array.dtype.name]) + data(8, name)


def value_info(name: str, dtype: str, shape: Shape) -> bytes:
    """A ValueInfoProto: a graph's input or output; a length may be a name, or None."""
    dims = b""
    for dim in shape:
        if dim is None:
            dims += data(1, b"")
        else:
            dims += data(1, data(2, dim) if isinstance(dim, str) else number(1, dim))
    kind = number(1, _CODES[dtype]) + data(2, dims)
    return data(1, name) + data(2, data(1, kind))


def node(
    operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Attribute
) -> bytes:
    """A NodeProto of the default domain; an input left out is the empty name."""
    parts = [data(1, each) for each in inputs] + [data(2, each) for each in outputs]
    parts.append(data(4, operator))
    parts += [data(5, _attribute(name, value)) for name, value in sorted(attributes.items())]
    return b"".join(parts)


def _attribute(name: str, value: Attribute) -> bytes:
    match value:
        case GraphWriter():
            held, kind = data(6, value), _GRAPH
        case int():
            held, kind = number(3, value), _INT
        case float():
            held, kind = _varint(2 << 3 | FIXED32) + struct.pack("<f", value), _FLOAT
        case str():
            held, kind = data(4, value), _STRING
        case _:
            held, kind = b"".join(number(8, each) for each in value), _INTS
    return data(1, name) + held + number(20, kind)


def graph(
    name: str,
    nodes: Iterable[bytes],
    inputs: Iterable[bytes],
    outputs: Iterable[bytes],
    initializers: Iterable[bytes] = (),
) -> GraphWriter:
    """A GraphProto of such parts."""
    parts = [data(1, each) for each in nodes]
    parts.append(data(2, name))
    parts += [data(5, each) for each in initializers]
    parts += [data(11, each) for each in inputs]
    parts += [data(12, each) for each in outputs]
    return GraphWriter(b"".join(parts))


def model(
    body: bytes,
    *,
    opset: int,
    ir_version: int,
    producer: tuple[str, str],
    metadata: Mapping[str, str],
) -> bytes:
    """A ModelProto around a graph: the file. ``producer``: a program's name and version."""
    opsets = data(1, "") + number(2, opset)
    head = number(1, ir_version) + data(2, producer[0]) + data(3, producer[1])
    notes = [data(14, data(1, key) + data(2, value)) for key, value in sorted(metadata.items())]
    return b"".join([head, data(7, body), data(8, opsets), *notes])
