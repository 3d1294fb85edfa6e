"""A model's parameters as one flat vector, and where a ladder's narrower ones lie in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.manifest import Manifest
from device_sdk.artifact.submodels import slice_of

Floats = NDArray[np.float32]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """One parameter: torch's name, and its shape."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape):
            raise ValueError(f"{self.name!r} has the shape {self.shape}; expected positive sizes")

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


def flat_layout(shapes: Mapping[str, Sequence[int]]) -> FlatLayout:
    """The layout of parameters with these shapes, by torch's names."""
    entries = [FlatEntry(name, tuple(map(int, shape))) for name, shape in shapes.items()]
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


@dataclass(frozen=True)
class FlatLadder:
    """The rungs of a ladder of slices as flat vectors; a model by itself is the only rung.

    Attributes:
        layouts: smallest first, the full model's last.
        blocks: of the parameters that are cut, as :class:`~device_sdk.artifact.submodels.Piece` has
            them; empty where every axis is one block.
        rungs: the layouts' numbers among the ladder's, of which a task may leave some out; from 1
            unless they are given. A model by itself has none.
    """

    layouts: tuple[FlatLayout, ...]
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rungs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.rungs and len(self.layouts) > 1:
            object.__setattr__(self, "rungs", tuple(range(1, len(self.layouts) + 1)))

    @classmethod
    def of(cls, manifests: Sequence[Manifest]) -> FlatLadder:
        """Of a ladder's artifacts, smallest first. Raises ValueError for low rank."""
        blocks: dict[str, tuple[int, ...]] = {}
        several = [each for each in manifests if len(manifests) > 1 and each.submodel is not None]
        for manifest in several:
            assert manifest.submodel is not None
            for name, piece in manifest.submodel.pieces.items():
                if piece.role != "slice" or piece.of != name:
                    raise ValueError(
                        f"{name!r} of {manifest.name} is a factor of {piece.of!r}, and a flat "
                        "vector takes slices: export the ladder with widths=, or keep ranks= and "
                        "train it by fedavg, with personal layers where devices differ"
                    )
                if piece.blocks:
                    blocks[name] = piece.blocks
        rungs = tuple(each.submodel.rung for each in several if each.submodel is not None)
        return cls(tuple(map(layout_of, manifests)), blocks, rungs)

    @property
    def full(self) -> FlatLayout:
        """The full model's layout."""
        return self.layouts[-1]

    def places(self, part: FlatLayout, whole: FlatLayout | None = None) -> Places:
        """For each number of a rung's vector its place in a larger one's (None: the full model's),
        int64 [p], increasing.

        Raises ValueError where it does not lie in it: other names, or a size that is larger.
        """
        whole = self.full if whole is None else whole
        if [entry.name for entry in part.entries] != [entry.name for entry in whole.entries]:
            raise ValueError("the rungs of a ladder of slices must have the same parameters")
        found, start = [], 0
        for mine, theirs in zip(part.entries, whole.entries, strict=True):
            at = slice_of(mine.shape, theirs.shape, self.blocks.get(mine.name, ()))
            inside = np.arange(start, start + theirs.size, dtype=np.int64).reshape(theirs.shape)
            found.append(inside[at].reshape(-1))
            start += theirs.size
        return np.concatenate(found)
