"""A model's parameters as one flat vector, and where a narrower model lies in a wider one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.manifest import Manifest

Floats = NDArray[np.float32]
Places = NDArray[np.int64]

_RECURRENT = re.compile(r"(?P<layer>(.*\.)?)(weight|bias)_(ih|hh)(?P<end>_l\d+(_reverse)?)$")


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """One parameter: torch's name, shape, and the number of equal gate blocks along axis 0.

    A GRU's matrices hold three gates below one another (an LSTM's four), so a narrower layer's
    rows are not the first rows of a wider one's, but the first of each block.
    """

    name: str
    shape: tuple[int, ...]
    gates: int = 1

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape):
            raise ValueError(f"{self.name!r} has the shape {self.shape}; expected positive sizes")
        if self.gates < 1 or (self.gates > 1 and (not self.shape or self.shape[0] % self.gates)):
            raise ValueError(f"{self.name!r}, {self.shape}, does not divide into {self.gates}")

    @property
    def group(self) -> str:
        """The module that the parameter belongs to; attention is paid group by group."""
        return self.name.rpartition(".")[0]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """Which parameter lies where in a flat float32 vector.

    Parameters are ordered by group and name, so the order depends on neither torch's nor the
    artifact's own. Raises ValueError for no parameters, for repeated names or another order.
    """

    entries: tuple[FlatEntry, ...]

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        if not names or len(set(names)) != len(names):
            raise ValueError("a layout needs parameters, each with a name of its own")
        if list(self.entries) != sorted(self.entries, key=lambda entry: (entry.group, entry.name)):
            raise ValueError("the parameters must be ordered by group and name: use flat_layout()")

    @cached_property
    def size(self) -> int:
        """p, the vector's length."""
        return sum(entry.size for entry in self.entries)

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups, in the vector's order."""
        return tuple(dict.fromkeys(entry.group for entry in self.entries))

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Per group the first place and the one behind the last."""
        sizes = dict.fromkeys(self.groups, 0)
        for entry in self.entries:
            sizes[entry.group] += entry.size
        ends = np.cumsum(list(sizes.values())).tolist()
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    def flatten(self, parameters: Mapping[str, NDArray[Any]]) -> Floats:
        """The parameters (others are ignored) as one float32 vector [p].

        Raises ValueError where one is missing or has another shape.
        """
        parts = []
        for entry in self.entries:
            array = parameters.get(entry.name)
            if array is None or array.shape != entry.shape:
                found = None if array is None else array.shape
                raise ValueError(f"{entry.name!r} is {found}; expected {entry.shape}")
            parts.append(np.asarray(array, dtype=np.float32).reshape(-1))
        return np.concatenate(parts)

    def unflatten(self, vector: NDArray[Any]) -> dict[str, Floats]:
        """The parameters by name, out of a vector [p]; raises ValueError for another length."""
        if vector.shape != (self.size,):
            raise ValueError(f"the vector is {vector.shape}; this layout holds {self.size} numbers")
        whole = np.asarray(vector, dtype=np.float32)
        found, start = {}, 0
        for entry in self.entries:
            found[entry.name] = whole[start : start + entry.size].reshape(entry.shape).copy()
            start += entry.size
        return found

    def places_in(self, wider: FlatLayout) -> Places:
        """For each number of this layout its place in ``wider``, int64 [p], increasing.

        The block of each parameter that both widths have (of each gate of a recurrent layer):
        the overlap of section 4.4 in papers/fedamn. Raises ValueError where this layout does not
        lie within ``wider``: other names or gates, or a size that is larger here.
        """
        if [entry.name for entry in self.entries] != [entry.name for entry in wider.entries]:
            raise ValueError("models of different widths must have the same parameters")
        parts, start = [], 0
        for mine, theirs in zip(self.entries, wider.entries, strict=True):
            parts.append(start + _overlap(mine, theirs))
            start += theirs.size
        return np.concatenate(parts)


def flat_layout(shapes: Mapping[str, Sequence[int]]) -> FlatLayout:
    """The layout of parameters with these shapes, by torch's names.

    The gates of recurrent layers are found by their names (``weight_hh_l0`` and the like).
    """
    known = {name: tuple(int(size) for size in shape) for name, shape in shapes.items()}
    entries = [FlatEntry(name, shape, _gates(name, known)) for name, shape in known.items()]
    return FlatLayout(tuple(sorted(entries, key=lambda entry: (entry.group, entry.name))))


def layout_of(manifest: Manifest) -> FlatLayout:
    """The layout of an artifact's trained parameters.

    Raises ValueError for an artifact whose parameters have named axes.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in manifest.state:
        if tensor.kind != "parameter":
            continue
        for member in tensor.members:
            sizes = [size for size in member.shape if isinstance(size, int)]
            if len(sizes) != len(member.shape):
                raise ValueError(f"{member.name!r} of {manifest.name} has sizes that may vary")
            shapes[member.name] = tuple(sizes)
    return flat_layout(shapes)


def _gates(name: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    found = _RECURRENT.match(name)
    if found is None:
        return 1
    inner = shapes.get(f"{found['layer']}weight_hh{found['end']}")
    if inner is None or len(inner) != 2 or inner[0] % inner[1]:
        return 1
    return inner[0] // inner[1]


def _overlap(mine: FlatEntry, theirs: FlatEntry) -> Places:
    fits = len(mine.shape) == len(theirs.shape) and mine.gates == theirs.gates
    if not fits or any(a > b for a, b in zip(mine.shape, theirs.shape, strict=True)):
        raise ValueError(
            f"{mine.name!r}: {mine.shape} with {mine.gates} gates does not lie within "
            f"{theirs.shape} with {theirs.gates}"
        )
    if not mine.shape:
        return np.zeros(1, dtype=np.int64)
    places = np.arange(theirs.size, dtype=np.int64)
    places = places.reshape(theirs.gates, theirs.shape[0] // theirs.gates, *theirs.shape[1:])
    block = (slice(None), slice(mine.shape[0] // mine.gates), *(slice(n) for n in mine.shape[1:]))
    return places[block].reshape(-1)
