"""The training settings that a broadcast of mutual learning carries, known to both ends."""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.manifest import Manifest
from device_sdk.fields import Within
from device_sdk.wire.arrays.exchange import TrainingSettings
from device_sdk.wire.arrays.tensors import BeyondWire, halved
from device_sdk.wire.codec.errors import WireError

# Samples that a device shows to the others, once: named arrays, compact.

SampleForm = Literal["uint8", "deflate", "float16", "float32"]

_PUBLIC = "_pub"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ATTACHMENT = re.compile(r"public\.([0-9a-f]{32})\.([0-9a-f]{16})")
_WHOLE_DTYPES = (np.uint8, np.uint16, np.int32, np.int64)
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
            raise BeyondWire(f"public {name!r} holds values that are not finite")
        elif form in ("uint8", "deflate"):
            low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
            # What the receiver will have: none where the values are closer than float32 can tell.
            step = float(np.float32((high - low) / 255)) or 1.0
            codes = np.rint((array - low) / step).astype(np.uint8)
            coded[f"{name}.low"] = np.asarray(low, dtype=np.float32)
            coded[f"{name}.step"] = np.asarray(step, dtype=np.float32)
            if form == "deflate":
                coded[f"{name}.count"] = np.asarray(len(codes), dtype=np.int32)
                codes = np.frombuffer(zlib.compress(codes.tobytes(), 9), dtype=np.uint8)
            coded[name] = codes
        else:
            coded[name] = halved(array) if form == "float16" else array.astype(form)
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
    for kind in _WHOLE_DTYPES:
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


# Soft labels, class probabilities a sample, as few bytes.
#
# ``float16`` takes two bytes a probability, ``uint8`` one: 255ths, rounded so that a row's sum
# stays 255 (largest remainders). With ``top`` only the largest ones travel, with their classes;
# the reader spreads what is missing to 1 evenly over the others.

LabelForm = Literal["float16", "uint8"]
# float16 rounds each of them by up to 2^-12 of its size, and small ones by 2^-25.
_SUM_ERROR = 0.01
_WHOLE = 255


def encode_soft_labels(
    probabilities: NDArray[np.float32], form: LabelForm, top: int = 0
) -> dict[str, NDArray[Any]]:
    """``labels`` [samples, classes or top], and with ``top`` ``classes`` of the same shape.

    Args:
        probabilities: [samples, classes], each row a distribution.

    Raises ValueError where a row is none.
    """
    sums = probabilities.sum(axis=1, keepdims=True, dtype=np.float64)
    if not np.isfinite(sums).all():
        raise BeyondWire("soft labels are not finite")
    if not ((probabilities >= 0).all() and (sums > 0).all()):
        raise ValueError("soft labels must be distributions: none negative, not all zero")
    exact = probabilities / sums
    if form == "float16":
        coded: NDArray[Any] = exact.astype(np.float16)
    else:
        coded = _in_255ths(exact)
    if top == 0:
        return {"labels": coded}
    order = np.argsort(-exact, axis=1, kind="stable")[:, :top]
    kind = np.uint8 if probabilities.shape[1] <= 256 else np.uint16
    return {
        "labels": np.take_along_axis(coded, order, axis=1),
        "classes": order.astype(kind),
    }


def decode_soft_labels(
    tensors: Mapping[str, NDArray[Any]], classes: int, form: LabelForm, top: int = 0
) -> NDArray[np.float32]:
    """Distributions, float32 [samples, classes], from what :func:`encode_soft_labels` made.

    Raises ``WireError("bad-labels")`` for other names, dtypes or shapes and for rows that are no
    distributions.
    """
    if set(tensors) != ({"labels", "classes"} if top else {"labels"}):
        raise WireError("bad-labels", f"expected labels{' and classes' if top else ''}")
    labels = tensors["labels"]
    width = top or classes
    if labels.dtype != np.dtype(form) or labels.ndim != 2 or labels.shape[1] != width:
        raise WireError(
            "bad-labels",
            f"labels are {labels.dtype} {labels.shape}; expected {form} [samples, {width}]",
        )
    values = labels.astype(np.float64)
    if form == "uint8":
        values /= _WHOLE
    sums = values.sum(axis=1)
    # NaN fails the comparisons too.
    lowest = 0.0 if top else 1 - _SUM_ERROR
    fits = (values >= 0).all() and (sums > 0).all() and (sums >= lowest).all()
    if not fits or not (sums <= 1 + _SUM_ERROR).all():
        raise WireError("bad-labels", "a row of the labels is no distribution")
    if top:
        values = _spread(values, tensors["classes"], classes)
    found: NDArray[np.float32] = (values / values.sum(axis=1, keepdims=True)).astype(np.float32)
    return found


def _spread(values: NDArray[np.float64], order: NDArray[Any], classes: int) -> NDArray[np.float64]:
    kind = np.uint8 if classes <= 256 else np.uint16
    if order.dtype != kind or order.shape != values.shape:
        raise WireError("bad-labels", f"classes are {order.dtype} {order.shape}")
    ranked = np.sort(order, axis=1)
    if order.size and (int(order.max()) >= classes or (ranked[:, 1:] == ranked[:, :-1]).any()):
        raise WireError("bad-labels", "classes must be distinct in a row, and known")
    missing = np.maximum(0.0, 1 - values.sum(axis=1, keepdims=True))
    full = np.repeat(missing / max(1, classes - values.shape[1]), classes, axis=1)
    np.put_along_axis(full, order.astype(np.int64), values, axis=1)
    return full


def _in_255ths(exact: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    scaled = exact.astype(np.float64) * _WHOLE
    codes = np.floor(scaled)
    left = np.rint(_WHOLE - codes.sum(axis=1)).astype(np.int64)
    order = np.argsort(codes - scaled, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(exact.shape[1])[None, :], axis=1)
    codes += ranks < left[:, None]
    return codes.astype(np.uint8)


Combine = Literal["own", "mean"]
Schedule = Literal["alternate", "joint", "in_turn"]


@dataclass(frozen=True, slots=True)
class MutualTraining(TrainingSettings):
    """How every device learns from the others in a round.

    MAFML (papers/mafml) is the default. FedMD (Li and Wang 2019) is ``combine="mean"``,
    ``schedule="in_turn"``, ``weight_ce=0``, ``project=False`` and ``use_confidence=False``.

    Attributes:
        classes: number of classes.
        combine: ``own``: a device's soft labels are about its own public samples, and all learn
            from each other's; ``mean``: all label all public samples, and learn from the mean.
        schedule: ``alternate``: each local step is followed by a public one, as in algorithm 1;
            ``joint``: one step along the sum of both, which costs one pass over the local batch
            less; ``in_turn``: all public steps, then all local ones.
        local_steps: a round's.
        public_steps: a round's with ``in_turn``; 0 for as many as local ones.
        batch_size: local samples a step.
        public_batch: public samples a step and owner (fewer where an owner shares fewer).
        learning_rate, public_rate: of local and of public steps (beta and eta of algorithm 1); 0
            for the artifact's own, or for the local one's. ``joint`` uses the first alone.
        weight_kl, weight_ce: of the two parts of equation 6. Where nobody's soft labels are known
            yet, the labels' weight is 1.
        project: take out of the public gradient what opposes the local one (equation 7).
        per_teacher: a public step for each owner, as algorithm 1 is printed; else one for all, the
            mean over owners (equations 3 and 5).
        use_confidence: weight an owner's soft labels by how many of its samples they get right (A
            of equation 3).
        least_confidence: soft labels of owners below it are not used.
        top_classes: of a soft label only so many largest probabilities travel; 0 for all.
        label_form: how a probability travels.
        sample_form: how public samples' float arrays travel, once.
        target: name of the batch entry that holds the class.
        output: name of the artifact's prediction that holds the probabilities.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    classes: Annotated[int, Within(2, 65_536)]
    combine: Combine = "own"
    schedule: Schedule = "alternate"
    local_steps: Annotated[int, Within(1, 1_000_000)] = 20
    public_steps: Annotated[int, Within(0, 1_000_000)] = 0
    batch_size: Annotated[int, Within(1, 65_536)] = 32
    public_batch: Annotated[int, Within(1, 65_536)] = 16
    learning_rate: Annotated[float, Within(0, 1e3)] = 0.0
    public_rate: Annotated[float, Within(0, 1e3)] = 0.0
    weight_kl: Annotated[float, Within(0, 1e3)] = 1.0
    weight_ce: Annotated[float, Within(0, 1e3)] = 1.0
    project: bool = True
    per_teacher: bool = False
    use_confidence: bool = True
    least_confidence: Annotated[float, Within(0, 1)] = 0.0
    top_classes: Annotated[int, Within(0, 65_535)] = 0
    label_form: LabelForm = "float16"
    sample_form: SampleForm = "uint8"
    target: str = "y"
    output: str = "probabilities"

    def check(self) -> None:
        """Raises ValueError for settings that do not go together."""
        for name in ("target", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a name")
        if self.top_classes >= self.classes:
            raise ValueError(
                f"top_classes is {self.top_classes} of {self.classes} classes; expected fewer, or "
                "0 for all"
            )
        if self.combine == "mean" and self.top_classes:
            raise ValueError("top_classes needs combine='own': a mean takes all probabilities")
        if self.schedule == "joint" and self.per_teacher:
            raise ValueError("per_teacher needs a public step of its own: not schedule='joint'")
