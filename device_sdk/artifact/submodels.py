"""Submodels: parts of one full model, each an artifact of its own, that one task trains together.

A *ladder* is a full model and its submodels, from the smallest *rung* to the full one. A submodel's
tensor is a tensor of the full model whole, or a slice of it, or a factor of its truncated singular
value decomposition; a submodel may lack tensors, and train not all that it has. The manifest of
each rung says which, so that both ends derive a rung's values from the full model's in the same
way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.parts import Name, Part
from device_sdk.fields import OneOf, Such, Within

FULL_FILE: Final = "full.safetensors"
"""Beside the rungs' folders: the full model's first values, which no device fetches."""
MOST_RUNGS: Final = 32

Floats = NDArray[np.float32]

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_FACTORS = ("left", "scale", "right")
_ROLES = ("slice", *_FACTORS)
_LEAST_STRENGTH, _LEAST_LARGEST = 0.1, 1.0
"""Of a singular value beside the largest, and of the largest: for a smaller one a step on the
factors is a smaller step of the matrix. Those of a matrix of zeros, or of a small one, grow many
times over in a round, and a step on factors with their scale grows by the square of that."""


@dataclass(frozen=True)
class Piece(Part):
    """Where a submodel's tensor lies in the full model.

    Attributes:
        of: the full model's tensor.
        role: ``left`` [m, r], ``scale`` [r] and ``right`` [r, n] are factors of the tensor as a
            matrix [m, n] (its first axis, and all others), left times diag(scale) times right; a
            ``slice`` has its first rows along each axis.
        blocks: of a slice, in how many equal blocks each axis falls, of each of which the first
            rows are taken: 4 for the gates of an LSTM. Empty where every axis is one.
    """

    of: Name
    role: Annotated[str, OneOf(_ROLES)] = "slice"
    blocks: tuple[Annotated[int, Within(1)], ...] = ()


@dataclass(frozen=True)
class Submodel(Part):
    """Which part of a full model an artifact trains.

    Attributes:
        rung: from 1, the smallest.
        rungs: of the ladder; the last is the full model.
        full: SHA-256 (lower-case hex) of the full model's first values, by which the rungs of one
            ladder know each other.
        pieces: by the names of this artifact's tensors; those that are not listed are the full
            model's tensors of the same name, whole.
        held: names of those that a step leaves as they are while larger rungs train them: they come
            with each version, and are not sent back.
        units, kept: every axis that a slice cuts has ``units`` equal parts (in each of its blocks),
            of which the rung has ``kept``: the same ones along all axes, and any of them. 0 where
            they have to be the first.
    """

    rung: Annotated[int, Within(1, MOST_RUNGS)]
    rungs: Annotated[int, Within(1, MOST_RUNGS)]
    full: Annotated[str, Such(_SHA256.match, "a SHA-256 in lower-case hex")]
    pieces: Mapping[Name, Piece] = field(default_factory=dict)
    held: tuple[Name, ...] = ()
    units: Annotated[int, Within(0)] = 0
    kept: Annotated[int, Within(0)] = 0

    def piece(self, name: str) -> Piece:
        """What the tensor of that name is."""
        return self.pieces.get(name) or Piece(name)

    def check(self) -> None:
        if self.rung > self.rungs:
            raise ArtifactError(f"submodel: rung {self.rung} of {self.rungs}")
        factors: dict[str, list[str]] = {}
        for piece in self.pieces.values():
            if piece.role in _FACTORS:
                factors.setdefault(piece.of, []).append(piece.role)
        odd = next((of for of, roles in factors.items() if sorted(roles) != sorted(_FACTORS)), None)
        if odd is not None:
            raise ArtifactError(f"submodel: {odd!r} is to have one each of {', '.join(_FACTORS)}")
        if self.kept > self.units or (self.units and not self.kept):
            raise ArtifactError(f"submodel: {self.kept} of {self.units} units")


class Basis(NamedTuple):
    """The thin singular value decomposition of a matrix [m, n], with q = min(m, n).

    Attributes:
        left: orthonormal columns, float32 [m, q].
        strength: singular values from the largest, float32 [q].
        right: orthonormal rows, float32 [q, n].
    """

    left: Floats
    strength: Floats
    right: Floats

    @classmethod
    def of(cls, tensor: NDArray[Any]) -> Basis:
        """Of a tensor as a matrix: its first axis, and all others."""
        matrix = tensor.reshape(len(tensor), -1).astype(np.float64)
        found = np.linalg.svd(matrix, full_matrices=False)
        return cls(*(each.astype(np.float32) for each in found))

    def kept_as(self, name: str, rank: int) -> dict[str, Floats]:
        """What is kept beside the tensor of that name for factors of up to that rank: another
        machine's decomposition may differ in its last bits."""
        # No name of torch's has two dots in a row.
        parts = (self.left[:, :rank], self.strength[:rank], self.right[:rank])
        return {f"{name}..{e}": p.copy() for e, p in zip(self._fields, parts, strict=True)}

    @classmethod
    def found(cls, tensors: Mapping[str, NDArray[Any]], name: str) -> Basis:
        """Of the tensor of that name: what is kept beside it, or made anew."""
        kept = [tensors[f"{name}..{e}"] for e in cls._fields if f"{name}..{e}" in tensors]
        return cls(*kept) if len(kept) == len(cls._fields) else cls.of(tensors[name])

    def factor(self, role: str, rank: int) -> Floats:
        """One of three factors whose product is the best approximation of that rank: ``left``
        U S [m, rank], ``scale`` 1 / S [rank] and ``right`` S V' [rank, n].

        The scale stays as it is while left and right are trained, so that a step of gradient
        descent on them moves the matrix by its own gradient's part within U and within V, however
        unequal S is (Tong, Ma and Chi 2021, ScaledGD, section 2): a rate means the same at every
        rank, and the weak directions learn as fast as the strong.
        """
        strength = self._bounded(rank)
        if role == "scale":
            return np.reciprocal(strength)
        if role == "left":
            return self.left[:, :rank] * strength
        return self.strength[:rank, None] * self.right[:rank]

    def moved(self, role: str, difference: NDArray[Any]) -> NDArray[Any]:
        """By how much a factor's difference moves the matrix to first order, in units of the other
        side's basis: of ``left`` [m, r] to be multiplied by V', of ``right`` [r, n] by U."""
        if role == "right":
            return difference
        rank = difference.shape[1]
        moved: NDArray[Any] = difference * (self.strength[:rank] / self._bounded(rank))
        return moved

    def _bounded(self, rank: int) -> Floats:
        largest = max(float(self.strength[0]), _LEAST_LARGEST)
        return np.maximum(self.strength[:rank], np.float32(_LEAST_STRENGTH * largest))


class Units(NamedTuple):
    """Which parts of every axis that is cut a slice has.

    Attributes:
        of: in how many equal parts an axis falls.
        chosen: those of the slice, rising, int64 [kept].
    """

    of: int
    chosen: NDArray[np.int64]


def slice_of(
    shape: tuple[int, ...],
    full: tuple[int, ...],
    blocks: tuple[int, ...],
    units: Units | None = None,
) -> Any:
    """The index, as of ``np.ix_``, of a slice of ``shape`` in a tensor of the shape ``full``: the
    first rows of each block, or those of ``units``.

    Raises ArtifactError where it does not lie in it.
    """
    counts = blocks or (1,) * len(full)
    if not len(shape) == len(full) == len(counts):
        raise ArtifactError(f"a slice {list(shape)} of {list(full)} in blocks {list(blocks)}")
    places = []
    for size, whole, count in zip(shape, full, counts, strict=True):
        if size > whole or size % count or whole % count:
            raise ArtifactError(
                f"a slice {list(shape)} does not lie in {list(full)} in blocks {list(counts)}"
            )
        rows = np.arange(whole).reshape(count, whole // count)
        if units is None or size == whole:
            places.append(rows[:, : size // count].reshape(-1))
            continue
        if whole % (count * units.of) or size * units.of != whole * len(units.chosen):
            raise ArtifactError(f"a slice {list(shape)} of {list(full)} is not of {units.of} units")
        parts = rows.reshape(count, units.of, -1)[:, units.chosen]
        places.append(parts.reshape(-1))
    return np.ix_(*places)


def part_of(
    full: Mapping[str, NDArray[Any]],
    submodel: Submodel,
    shapes: Mapping[str, tuple[int, ...]],
    bases: Mapping[str, Basis] | None = None,
    units: Units | None = None,
) -> dict[str, NDArray[Any]]:
    """A submodel's tensors, by their names, out of the full model's.

    Args:
        full: the full model's tensors.
        shapes: of the tensors that are wanted.
        bases: of the tensors that are factored, where they are known already.
        units: which slices have; None for the first.

    Raises ArtifactError where one is no part of the full model.
    """
    known = dict(bases or {})
    found: dict[str, NDArray[Any]] = {}
    for name, shape in shapes.items():
        piece = submodel.piece(name)
        if piece.of not in full:
            raise ArtifactError(f"{name!r} is a part of {piece.of!r}, which the full model lacks")
        whole = full[piece.of]
        if piece.role == "slice":
            try:
                at = slice_of(shape, whole.shape, piece.blocks, units)
            except ArtifactError as error:
                raise ArtifactError(f"{name!r}: {error}") from None
            found[name] = whole[at] if shape != whole.shape else whole
            continue
        if whole.ndim < 2 or len(shape) != (1 if piece.role == "scale" else 2):
            raise ArtifactError(f"{name!r} is a factor of {piece.of!r}, and one is no matrix")
        if piece.of not in known:
            known[piece.of] = Basis.found(full, piece.of)
        rank = shape[-1] if piece.role == "left" else shape[0]
        if not 1 <= rank <= len(known[piece.of].strength):
            raise ArtifactError(f"{name!r} has rank {rank}, more than {piece.of!r} can have")
        found[name] = known[piece.of].factor(piece.role, rank)
        if found[name].shape != shape:
            wanted = list(found[name].shape)
            raise ArtifactError(f"{name!r} is {list(shape)}, and {piece.of!r} makes it {wanted}")
    return found


def stand_in(shape: tuple[int, ...]) -> Floats:
    """Values for a tensor whose own a task brings: small, positive and unequal, [shape]. A step on
    them takes as long as on any others, and ends in no division by zero. A row of a matrix sums to
    one or so, so that neither wide nor deep models make of them what is not finite."""
    size = int(np.prod(shape, dtype=np.int64))
    middle = 1 / max(1, int(np.prod(shape[1:], dtype=np.int64))) if len(shape) > 1 else 1 / 80
    shares = 0.4 + 1.2 * np.modf(np.arange(size) * 0.6180339887498949)[0]
    values: Floats = (middle * shares).astype(np.float32)
    return values.reshape(shape)
