"""Samples that a device shows to the others, once: named arrays, compact."""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.manifest import Manifest
from device_sdk.wire.codec.errors import WireError

__all__ = [
    "SampleEntry",
    "SampleForm",
    "attachment_name",
    "decode_samples",
    "encode_samples",
    "owner_of",
    "sample_entries",
    "samples_mark",
]

SampleForm = Literal["uint8", "deflate", "float16", "float32"]

_PUBLIC = "_pub"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ATTACHMENT = re.compile(r"public\.([0-9a-f]{32})\.([0-9a-f]{16})")
_WHOLE = (np.uint8, np.uint16, np.int32, np.int64)
_LARGEST = 1e12
_MOST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class SampleEntry:
    """An array of samples: ``dtype`` of the batch entry, ``shape`` of one sample."""

    dtype: str
    shape: tuple[int, ...]


def sample_entries(manifest: Manifest) -> dict[str, SampleEntry]:
    """What a sample of a mutual-learning artifact consists of: batch entries ``x`` with ``x_pub``.

    Raises ValueError where there are none, or one of other than fixed shape behind the first axis.
    """
    ports = {port.of: port for port in manifest.graphs["train"].select("batch")}
    found: dict[str, SampleEntry] = {}
    for name, port in ports.items():
        if name + _PUBLIC not in ports:
            continue
        lengths = tuple(length for length in port.shape[1:] if isinstance(length, int))
        if not port.shape or len(lengths) != len(port.shape) - 1 or not _NAME.fullmatch(name):
            raise ValueError(
                f"the artifact's batch entry {name!r} cannot be shared between devices"
            )
        found[name] = SampleEntry(port.dtype, lengths)
    if not found:
        raise ValueError(
            "the artifact has no public samples (batch entries such as 'x_pub' beside 'x'): export "
            "it with export.models.mutual"
        )
    return found


def encode_samples(
    samples: Mapping[str, NDArray[Any]], form: SampleForm
) -> dict[str, NDArray[Any]]:
    """The arrays as they travel.

    Float arrays become ``uint8`` codes with ``<name>.low`` and ``<name>.step`` (value = low + code
    * step; exact for images of 8 bits), or float16 or float32. ``deflate`` packs the codes, all in
    one stream, and adds ``<name>.count``: a quarter of the bytes for drawings, little less for
    photos. Whole numbers take the narrowest dtype that holds them. Raises ValueError for values
    that are not finite.
    """
    coded: dict[str, NDArray[Any]] = {}
    for name, array in samples.items():
        if array.dtype == np.bool_:
            coded[name] = array
        elif array.dtype.kind in "iu":
            coded[name] = _narrowed(array)
        elif not np.isfinite(array).all():
            raise ValueError(f"public {name!r} holds values that are not finite")
        elif form in ("uint8", "deflate"):
            low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
            step = (high - low) / 255 or 1.0
            codes = np.rint((array - low) / step).astype(np.uint8)
            coded[f"{name}.low"] = np.asarray(low, dtype=np.float32)
            coded[f"{name}.step"] = np.asarray(step, dtype=np.float32)
            if form == "deflate":
                coded[f"{name}.count"] = np.asarray(len(codes), dtype=np.int32)
                codes = np.frombuffer(zlib.compress(codes.tobytes(), 9), dtype=np.uint8)
            coded[name] = codes
        else:
            coded[name] = array.astype(form)
    return coded


def decode_samples(
    tensors: Mapping[str, NDArray[Any]],
    entries: Mapping[str, SampleEntry],
    *,
    most: int | None = None,
) -> dict[str, NDArray[Any]]:
    """Arrays of the entries' dtypes, a row for each sample, from :func:`encode_samples`'s.

    No more than ``most`` samples are unpacked, where that is given. Raises
    ``WireError("bad-public")`` where names, dtypes, shapes or values do not fit.
    """
    found: dict[str, NDArray[Any]] = {}
    rest = dict(tensors)
    for name, entry in entries.items():
        coded = rest.pop(name, None)
        if coded is None:
            raise WireError("bad-public", f"public samples lack {name!r}")
        count = rest.pop(f"{name}.count", None)
        if count is not None:
            coded = _inflated(coded, count, entry.shape, most)
        if coded.ndim == 0 or coded.shape[1:] != entry.shape:
            raise WireError(
                "bad-public", f"public {name!r} is {coded.shape}; expected [n, *{entry.shape}]"
            )
        wanted = np.dtype(entry.dtype)
        if wanted.kind == "f" and coded.dtype == np.uint8:
            low, step = (_scalar(rest.pop(f"{name}.{part}", None)) for part in ("low", "step"))
            values: NDArray[Any] = low + coded.astype(np.float32) * step
        elif wanted.kind == coded.dtype.kind or (wanted.kind in "iu" and coded.dtype.kind in "iu"):
            values = coded
        else:
            raise WireError("bad-public", f"public {name!r} is {coded.dtype}, not {entry.dtype}")
        if wanted.kind == "f" and values.size and not float(np.abs(values).max()) <= _LARGEST:
            raise WireError("bad-public", f"public {name!r} is not finite or absurdly large")
        found[name] = values.astype(wanted)
    if rest:
        raise WireError("bad-public", f"public samples hold the unknown {sorted(rest)[0]!r}")
    if len({len(array) for array in found.values()}) > 1:
        raise WireError("bad-public", "public samples differ in their number")
    return found


def samples_mark(coded: Mapping[str, NDArray[Any]]) -> str:
    """16 hexadecimal digits that change when the samples do."""
    digest = hashlib.sha256()
    for name in sorted(coded):
        array = np.ascontiguousarray(coded[name])
        digest.update(f"{name}|{array.dtype.name}|{array.shape}|".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def attachment_name(sender: str, mark: str) -> str:
    """``public.<sender>.<mark>``: new samples are another attachment."""
    return f"public.{sender}.{mark}"


def owner_of(attachment: str) -> str | None:
    """The sender whose public samples an attachment holds; None for other attachments."""
    found = _ATTACHMENT.fullmatch(attachment)
    return found.group(1) if found else None


def _inflated(
    stream: NDArray[Any], count: NDArray[Any], shape: tuple[int, ...], most: int | None
) -> NDArray[np.uint8]:
    if stream.dtype != np.uint8 or stream.ndim != 1 or count.shape != () or count.dtype.kind != "i":
        raise WireError("bad-public", "a packed public array is no stream of bytes with its count")
    # Known before anything is unpacked: a small stream may hold a thousand times its size.
    size = int(count) * math.prod(shape)
    if not 0 <= size <= _MOST_BYTES or (most is not None and int(count) > most):
        raise WireError("bad-public", "a packed public array is too large")
    unpacker = zlib.decompressobj()
    try:
        found = unpacker.decompress(stream.tobytes(), size + 1)
    except zlib.error as error:
        raise WireError("bad-public", "a packed public array cannot be unpacked") from error
    if len(found) != size or not unpacker.eof or unpacker.unused_data:
        raise WireError("bad-public", "a packed public array is not of the length that it names")
    return np.frombuffer(found, dtype=np.uint8).reshape(int(count), *shape)


def _narrowed(array: NDArray[Any]) -> NDArray[Any]:
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    for kind in _WHOLE:
        bounds = np.iinfo(kind)
        if bounds.min <= low and high <= bounds.max:
            return array.astype(kind)
    return array


def _scalar(value: NDArray[Any] | None) -> np.float32:
    if value is None or value.shape != () or value.dtype.kind != "f":
        raise WireError("bad-public", "a public array in 8 bits lacks its low and step")
    if not math.isfinite(float(value)) or abs(float(value)) > _LARGEST:
        raise WireError("bad-public", "a public array's scale is not finite or absurdly large")
    return np.float32(value)
