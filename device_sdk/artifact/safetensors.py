"""The safetensors format: named arrays and string metadata in one flat file, without pickle.

Written here because a device needs 100 lines of it, not a compiled dependency. Reading is strict:
the tensors must fill the data section exactly, as the format's reference implementation demands.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact import strict_json
from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.parts import MAX_ELEMENTS, MAX_RANK
from device_sdk.fields import Declared, Key, Length, Misfit, OneOf, Within, plain, read

Array = NDArray[Any]

_NAMES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_CODES: Final = {np.dtype(name): code for code, name in _NAMES.items()}
MAX_HEADER_BYTES: Final = 64 * 2**20

if sys.byteorder != "little":  # pragma: no cover - no such device is supported
    raise ImportError("safetensors files are little-endian, and so must this machine be")


Count = Annotated[int, Within(0, 2**63 - 1)]


@dataclass(frozen=True, slots=True)
class _Entry(Declared):
    """What the header says of a tensor."""

    dtype: Annotated[str, OneOf(tuple(_NAMES))]
    shape: Annotated[tuple[Count, ...], Length(0, MAX_RANK)]
    offsets: Annotated[tuple[Count, ...], Length(2), Key("data_offsets")]


@dataclass(frozen=True)
class Decoded:
    """Arrays (read-only views of the bytes they came from) and metadata of a file."""

    tensors: Mapping[str, Array]
    metadata: Mapping[str, str]


def encode(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """The file's bytes; tensors in the order given. Raises ArtifactError for an unusable dtype."""
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    arrays, end = [], 0
    for name, array in tensors.items():
        if array.dtype not in _CODES:
            raise ArtifactError(f"{name!r}: dtype {array.dtype} cannot be stored")
        if name == "__metadata__":
            raise ArtifactError("'__metadata__' is not allowed as a tensor's name")
        entry = _Entry(_CODES[array.dtype], array.shape, (end, end + array.nbytes))
        header[name] = plain(entry)
        # A 0-d array would become 1-d under ascontiguousarray; tobytes has no such habit.
        arrays.append(array.tobytes())
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    # Spaces bring the data to a multiple of 8 bytes, so that views of it are aligned.
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *arrays])


def decode(data: bytes) -> Decoded:
    """Read a file's bytes. Raises ArtifactError for anything but a valid file."""
    if len(data) < 8:
        raise ArtifactError("safetensors file: cut off before the header")
    size = int.from_bytes(data[:8], "little")
    if size > min(MAX_HEADER_BYTES, len(data) - 8):
        raise ArtifactError("safetensors file: cut off inside the header")
    text, body = data[8 : 8 + size], memoryview(data)[8 + size :]
    header = strict_json.decoded(text, "safetensors header", MAX_HEADER_BYTES)
    if not isinstance(header, dict):
        raise ArtifactError("safetensors header: expected an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ArtifactError("safetensors header: metadata maps names to strings")
    found = [_tensor(name, value, body) for name, value in header.items()]
    found.sort(key=itemgetter(0, 1))
    position = 0
    for begin, end, name, _ in found:
        if begin != position:
            raise ArtifactError(f"safetensors file: {name!r:.80} overlaps another or leaves a gap")
        position = end
    if position != len(body):
        raise ArtifactError("safetensors file: the tensors do not fill the data section")
    return Decoded({name: array for _, _, name, array in found}, metadata)


def _tensor(name: str, value: object, body: memoryview) -> tuple[int, int, str, Array]:
    where = f"safetensors tensor {name!r:.80}"
    try:
        entry = read(_Entry, value)
    except Misfit as misfit:
        raise ArtifactError(f"{where}: {misfit}") from None
    dtype, shape = np.dtype(_NAMES[entry.dtype]), entry.shape
    (begin, end), count = entry.offsets, math.prod(shape)
    if count > MAX_ELEMENTS:
        raise ArtifactError(f"{where}: has too many elements")
    if end > len(body) or end - begin != count * dtype.itemsize:
        raise ArtifactError(f"{where}: its offsets do not match its shape or the file's size")
    if count == 0:
        return begin, end, name, np.empty(shape, dtype)
    if entry.dtype == "BOOL" and np.frombuffer(body[begin:end], np.uint8).max() > 1:
        raise ArtifactError(f"{where}: holds a byte that is neither true nor false")
    array = np.frombuffer(body[begin:end], dtype=dtype, count=count).reshape(shape)
    return begin, end, name, array
