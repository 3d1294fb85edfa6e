"""The aggregator's half of a ladder: what unequal submodels moved, as one step of the full model.

Of a factored tensor W = U S V' every device of a rung starts from the same factors L and R, so how
far they moved W is, to first order, dL V' + U dR: linear in what a device sends. In the basis of U
and V such a move has the coordinates (i, j) with i or j below the rung's rank, as a slice has those
of its rows. So both kinds are one: **each coordinate is the mean over those who trained it**
(for slices Diao et al. 2021, HeteroFL, section 3.2), at least half of the round's weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.robust import RobustRule
from device_sdk.artifact import Artifact
from device_sdk.artifact.submodels import Basis, Piece, Submodel, Units, part_of, slice_of
from device_sdk.methods.fedavg.contract import SharedTensor, shared_tensors, tensors_of

Floats = NDArray[np.float32]
Wide = NDArray[np.float64]

LEAST_COVERAGE = 1 / 2
"""Of a round's weight: what a coordinate's sum is divided by at least. What a few train moves less:
they say less surely where it is to go. Whoever is alone on a rung moves what only it trains by no
more than twice its share of all."""


_VARIANCE = "running_var"
"""What torch calls a buffer that no honest device takes below 0."""


@dataclass(frozen=True)
class Rung:
    """One submodel as it is added up: vectors of its ``size``.

    Attributes:
        layout: its tensors as they travel, parameters before buffers.
        submodel: what each is of the full model.
        held: tensors that come down with it and are not trained by it.
        deal: which of several slices of this size it is (from 0); None where there is one.
        own: first values, by names on the wire, of what stays on the devices (personal layers): a
            submodel's artifact brings none.
        first: likewise of all, where some devices train it alone; else empty.
    """

    layout: tuple[SharedTensor, ...]
    submodel: Submodel
    own: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    held: tuple[SharedTensor, ...] = ()
    deal: int | None = None
    first: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """In the layout's order."""
        return tuple(self.submodel.piece(one.name) for one in self.layout)

    @cached_property
    def names(self) -> frozenset[str]:
        """On the wire."""
        return frozenset(one.wire_name for one in self.layout)

    @cached_property
    def size(self) -> int:
        """Numbers of its tensors."""
        return sum(one.size for one in self.layout)

    @cached_property
    def trained(self) -> int:
        """Numbers of its parameters, which come first."""
        return sum(one.size for one in self.layout if one.kind == "parameter")

    @cached_property
    def variances(self) -> NDArray[np.bool_]:
        """Which numbers are variances, [size]."""
        return np.concatenate(
            [np.full(one.size, one.name.endswith(_VARIANCE)) for one in self.layout]
        )

    def pieces_of(self, full: str) -> list[tuple[SharedTensor, Piece, slice]]:
        """What is part of the full model's tensor, with where it lies in a vector [size]."""
        places = _one_after_another([one.size for one in self.layout])
        parts = zip(self.layout, self.pieces, places, strict=True)
        return [part for part in parts if part[1].of == full]

    def split(self, values: NDArray[Any]) -> Iterator[tuple[SharedTensor, Piece, NDArray[Any]]]:
        """Each tensor's part of a vector [size], flat."""
        yield from zip(self.layout, self.pieces, split(self.layout, values), strict=True)


def split(layout: Sequence[SharedTensor], values: NDArray[Any]) -> list[NDArray[Any]]:
    """Each tensor's part of a vector, flat: views."""
    ends = np.cumsum([one.size for one in layout])
    return np.split(values, ends[:-1])


def whole(layout: Sequence[SharedTensor]) -> Rung:
    """The full model as the only rung."""
    return Rung(tuple(layout), Submodel(1, 1, "0" * 64))


def trained_of(artifact: Artifact) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """An artifact's first parameters, and its buffers."""
    kinds = {member.name: state.kind for state, member in artifact.manifest.members()}
    found: tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]] = ({}, {})
    for name, array in artifact.initial.items():
        found[kinds[name] == "buffer"][name] = array
    return found


def submodels_of(artifacts: Sequence[Artifact]) -> list[Submodel]:
    """What each is of the full model, smallest first; nothing where there is one artifact.

    Raises ValueError where they are not the rungs of one ladder, in order, the full model last.
    """
    if len(artifacts) < 2:
        return []
    known = [artifact.manifest.submodel for artifact in artifacts]
    names = ", ".join(artifact.manifest.name for artifact in artifacts)
    ladder = [each for each in known if each is not None]
    if len(ladder) < len(known) or len({each.full for each in ladder}) > 1:
        raise ValueError(
            f"{names} are not parts of one model: make them by export.submodels, or list one"
        )
    rungs = [each.rung for each in ladder]
    if rungs != sorted(set(rungs)) or rungs[-1] != ladder[-1].rungs:
        raise ValueError(f"{names} are rungs {rungs}; expected rising ones, the full model last")
    return ladder


def rungs_of(
    artifacts: Sequence[Artifact], kept: Sequence[str], *, first: bool = False
) -> list[Rung]:
    """The rungs of a ladder, smallest first; none where there is one artifact.

    ``kept``: names of what stays on the devices. ``first``: with the first values of all. Raises
    ValueError as :func:`submodels_of` does.
    """
    found = []
    for artifact, submodel in zip(artifacts, submodels_of(artifacts), strict=False):
        layout, held = tensors_of(artifact.manifest, *trained_of(artifact), kept)
        known_names = {one.name for one in (*layout, *held)}
        given = shared_tensors(*trained_of(artifact), (), artifact.manifest.fixed)
        values = {each: artifact.initial[each.name].reshape(each.wire_shape) for each in given}
        own = {each.wire_name: values[each] for each in given if each.name not in known_names}
        whole = {each.wire_name: values[each] for each in given} if first else {}
        found.append(Rung(layout, submodel, own, held, first=whole))
    return found


# Which units of a width slices have: an order of them, of which a rung has as many as it keeps.

Slices = Literal["static", "rolling", "dealt", "ranked"]


def dealt(rungs: Sequence[Rung], deals: int) -> list[Rung]:
    """Each rung with slices ``deals`` times over; the full model once."""
    found = []
    for rung in rungs:
        cut = rung.submodel.kept < rung.submodel.units
        found += [replace(rung, deal=deal) for deal in range(deals)] if cut else [rung]
    return found


def unit_orders(
    kind: Slices, units: int, deals: int, version: int, strengths: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Orders of the units in which rungs take them, int64 [deals, units].

    ``static``: as they are (Diao et al. 2021, HeteroFL, section 3). ``rolling``: a window that
    moves by one from version to version (Alam et al. 2022, FedRolex). ``ranked``: the
    strongest first, by the squares of their parameters (after Wu et al. 2024, FIARSE, which ranks
    parameters one by one). ``dealt``: at random, whatever the data are; each deal another one.

    Args:
        version: that the slices are of.
        strengths: float64 [units].
    """
    order = np.arange(units)
    if kind == "rolling" and units:
        order = np.roll(order, -(version % units))
    if kind == "ranked":
        order = np.argsort(-strengths, kind="stable")
    if kind != "dealt":
        return np.tile(order, (deals, 1))
    rngs = (np.random.default_rng([version, deal]) for deal in range(deals))
    return np.array([rng.permutation(units) for rng in rngs]).reshape(deals, units)


class Ladder:
    """The full model's tensors in one vector [size], and its rungs.

    A rung's *moves* are a vector of the rung's own size: of a tensor that is whole or a slice its
    differences; of factors dL and dR in units of the basis, so that a move is as long as what it
    moves the full model by. Sums of moves are sums of these vectors.

    *Coordinates* are those of the full model with each factored tensor in its basis: U' W V, and
    what of W lies outside of U or V.

    ``parameters`` and ``buffers``: where each rung's lie in a vector of all rungs'.
    """

    def __init__(self, layout: Sequence[SharedTensor], rungs: Sequence[Rung]) -> None:
        self._layout, self.rungs = tuple(layout), tuple(rungs)
        factored = {p.of for rung in rungs for p in rung.pieces if p.role != "slice"}
        self._factored = [one for one in layout if one.name in factored]
        self.parameters = _one_after_another([rung.trained for rung in rungs])
        self.buffers = _one_after_another([rung.size - rung.trained for rung in rungs])
        self._bases: dict[str, Basis] = {}
        self._units: list[Units | None] = [None] * len(rungs)
        known = {one.name: one for one in layout}
        for rung in rungs:
            for one in (*rung.layout, *rung.held):
                piece = rung.submodel.piece(one.name)
                if piece.of not in known:
                    raise ValueError(f"{one.name!r} is part of {piece.of!r}, which is not shared")
                shape = known[piece.of].shape
                if piece.role != "slice" and len(shape) < 2:
                    raise ValueError(f"{piece.of!r} is factored, and is no matrix")
                if piece.of in factored and piece.role == "slice" and one.shape != shape:
                    raise ValueError(f"{piece.of!r} is factored by one rung and cut by another")
        self._tensors = [
            _Held(one, at, [rung.pieces_of(one.name) for rung in rungs])
            for one, at in zip(layout, _one_after_another([o.size for o in layout]), strict=True)
        ]

    # -- the bases, which every rung of a version is cut by ----------------------------------------

    @property
    def basis_size(self) -> int:
        """Numbers that :meth:`bases_of` gives."""
        return sum(sum(map(_product, _basis_shapes(one))) for one in self._factored)

    def bases_of(self, model: Floats) -> Floats:
        """The bases of the factored tensors of a model [size], in one vector. They are kept with
        the model: another machine's decomposition may differ in a direction's sign."""
        full = self.tensors(model)
        found = [Basis.of(full[one.name]) for one in self._factored]
        return np.concatenate([np.empty(0, np.float32), *(e.reshape(-1) for b in found for e in b)])

    def strengths(self, model: Floats) -> NDArray[np.float64]:
        """Of each unit of the width, the sum of its parameters' squares: float64 [units]."""
        full, units = self.tensors(model), self.rungs[-1].submodel.units
        found, seen = np.zeros(units), set()
        for rung in self.rungs:
            for one, piece in zip(rung.layout, rung.pieces, strict=True):
                whole = full[piece.of]
                for axis, size in enumerate(one.shape if units and piece.role == "slice" else ()):
                    if size < whole.shape[axis] and (piece.of, axis) not in seen:
                        seen.add((piece.of, axis))
                        others = tuple(each for each in range(whole.ndim) if each != axis)
                        squares = np.square(whole, dtype=np.float64).sum(axis=others)
                        blocks = piece.blocks[axis] if piece.blocks else 1
                        found += squares.reshape(blocks, units, -1).sum(axis=(0, 2))
        return found

    def cut_by(self, bases: Floats, orders: NDArray[np.int64] | None = None) -> Ladder:
        """The same, its factors those of these bases, and its slices of the units that come first
        in these orders, [deals, units]; None for the first rows."""
        found, start = copy.copy(self), 0
        found._units = []
        for rung in self.rungs:
            kept, units = rung.submodel.kept, rung.submodel.units
            first = chosen = np.arange(kept)
            if orders is not None and units:
                chosen = np.sort(orders[rung.deal or 0][:kept])
            same = np.array_equal(chosen, first)
            found._units.append(None if same else Units(units, chosen))
        found._bases = {}
        for one in self._factored:
            parts = []
            for shape in _basis_shapes(one):
                parts.append(bases[start : start + _product(shape)].reshape(shape))
                start += _product(shape)
            found._bases[one.name] = Basis(*parts)
        return found

    # -- down --------------------------------------------------------------------------------------

    def tensors(self, model: Floats) -> dict[str, Floats]:
        """A model [size] by torch's names, in its tensors' shapes: views."""
        parts = zip(self._layout, split(self._layout, model), strict=True)
        return {one.name: part.reshape(one.shape) for one, part in parts}

    def part(self, model: Floats, rung: int) -> Floats:
        """The submodel of ``rung`` (from 0) of a model [size]: float32 [the rung's size]."""
        parts = self._parts(model, rung, self.rungs[rung].layout)
        return np.concatenate([each.reshape(-1) for each in parts])

    def held(self, model: Floats, rung: int) -> dict[str, Floats]:
        """What comes down with it beside, as it travels."""
        layout = self.rungs[rung].held
        parts = zip(layout, self._parts(model, rung, layout), strict=True)
        return {one.wire_name: part.reshape(one.wire_shape) for one, part in parts}

    def exact(self, rung: int) -> frozenset[str]:
        """Of both, what no codec is to round (``contract.exact_names``): the full model's buffers,
        and the scales of factors. A parameter that a rung holds is a buffer of its artifact."""
        chosen, buffers = self.rungs[rung], {e.name for e in self._layout if e.kind == "buffer"}
        layout = (*chosen.layout, *chosen.held)
        pieces = {one.wire_name: chosen.submodel.piece(one.name) for one in layout}
        return frozenset(
            name for name, each in pieces.items() if each.of in buffers or each.role == "scale"
        )

    def _parts(
        self, model: Floats, rung: int, layout: Sequence[SharedTensor]
    ) -> list[NDArray[Any]]:
        shapes = {one.name: one.shape for one in layout}
        full, chosen = self.tensors(model), self.rungs[rung].submodel
        parts = part_of(full, chosen, shapes, self._bases, self._units[rung])
        return [parts[one.name] for one in layout]

    # -- up ----------------------------------------------------------------------------------------

    def moved(self, piece: Piece, difference: NDArray[Any]) -> NDArray[Any]:
        """A tensor's difference in units of the basis, in its shape."""
        basis = self._bases.get(piece.of)
        if basis is None or piece.role == "slice":
            return difference
        with np.errstate(over="ignore"):  # a lie may be that large: infinite is refused
            return basis.moved(piece.role, difference)

    def mean(self, sum_of: Callable[[int, slice], NDArray[Any]], weights: Sequence[int]) -> Floats:
        """The mean move of the full model, [size]: each coordinate's over those who trained it.

        A tensor at a time, so that no more than one lies in memory in float64.

        Args:
            sum_of: of a rung (from 0), moves times weights: a part of a vector [the rung's size].
            weights: by rung, their sum.
        """
        total = sum(weights)
        covered = max(1.0, LEAST_COVERAGE * total)
        mean = np.empty(sum(one.size for one in self._layout), dtype=np.float32)
        for tensor in self._tensors:
            frame = _Frame(tensor.full.shape, self._bases.get(tensor.full.name))
            found, weight = frame.zeros(), frame.zeros()
            for rung, (pieces, own) in enumerate(zip(tensor.pieces, weights, strict=True)):
                if own:
                    frame.add(found, pieces, partial(sum_of, rung), self._units[rung])
                    frame.cover(weight, pieces, own, self._units[rung])
            for each, own_weight in zip(found, weight, strict=True):
                each /= np.maximum(own_weight, covered, out=own_weight)
            mean[tensor.at] = frame.back(found)
        return mean

    def robust_mean(self, moves: Sequence[tuple[int, Floats]], rule: RobustRule) -> Floats:
        """As :meth:`mean` by a robust rule, which counts every device alike: of each coordinate
        over those who trained it. ``moves``: each with its rung, one or more."""
        rungs = np.array([rung for rung, _ in moves])
        mean = np.empty(sum(one.size for one in self._layout), dtype=np.float32)
        for tensor in self._tensors:
            frame = _Frame(tensor.full.shape, self._bases.get(tensor.full.name))
            trained = []
            for pieces, units in zip(tensor.pieces, self._units, strict=True):
                frame.cover(mask := frame.zeros(), pieces, 1, units)
                trained.append(_flat(mask) > 0)
            each = []
            for rung, values in moves:
                own, units = frame.zeros(), self._units[rung]
                frame.add(own, tensor.pieces[rung], values.__getitem__, units)
                each.append(_flat(own).astype(np.float32))
            found = _covered_rule(rule, np.stack(each), np.stack(trained), rungs)
            mean[tensor.at] = frame.back(frame.split(found))
        return mean


def _covered_rule(
    rule: RobustRule, moves: Floats, trained: NDArray[np.bool_], rungs: NDArray[np.int64]
) -> Wide:
    """The rule over those moves [devices, n] that have a coordinate: ``trained`` [rungs, n] says
    which a rung's do, ``rungs`` whose each is."""
    found = np.zeros(moves.shape[1])
    # Coordinates that the same rungs train go together: there are few such sets.
    sets, belongs = np.unique(trained, axis=1, return_inverse=True)
    for place, among in enumerate(sets.T):
        voices = among[rungs]
        if voices.any():
            at = belongs.reshape(-1) == place
            share = min(1.0, voices.mean() / LEAST_COVERAGE)
            found[at] = share * rule.mean(moves[np.ix_(voices, at)])
    return found


@dataclass(frozen=True)
class _Held:
    """A tensor of the full model: where it lies in the model's vector, and by rung what of the
    rung's tensors is part of it, with where that lies in the rung's vector."""

    full: SharedTensor
    at: slice
    pieces: Sequence[Sequence[tuple[SharedTensor, Piece, slice]]]


class _Frame:
    """The coordinates of one tensor: its own, or of one that is factored, as a matrix [m, n]:
    within both bases [q, q], outside of ``right`` [q, n], and outside of ``left`` [m, q]. One of
    the last two is empty: q is the shorter side."""

    def __init__(self, shape: tuple[int, ...], basis: Basis | None) -> None:
        self._shape, self._shapes, self._factored = shape, [shape], basis is not None
        if basis is not None:
            self._left, self._right = basis.left.astype(np.float64), basis.right.astype(np.float64)
            (m, q), n = self._left.shape, self._right.shape[1]
            self._shapes = [(q, q), (q, n if n > q else 0), (m if m > q else 0, q)]

    def zeros(self) -> list[Wide]:
        """Coordinates that are 0."""
        return [np.zeros(shape) for shape in self._shapes]

    def split(self, flat: Wide) -> list[Wide]:
        """The coordinates in one vector."""
        ends = np.cumsum([_product(shape) for shape in self._shapes])[:-1]
        parts = zip(np.split(flat, ends), self._shapes, strict=True)
        return [part.reshape(shape) for part, shape in parts]

    def add(
        self,
        found: Sequence[Wide],
        pieces: Sequence[tuple[SharedTensor, Piece, slice]],
        values: Callable[[slice], NDArray[Any]],
        units: Units | None,
    ) -> None:
        """Add a rung's moves; ``values``: of its vector; ``units``: that its slices are of."""
        for one, piece, at in pieces:
            move = values(at).reshape(one.shape)
            if self._factored:
                self._rotate(found, piece.role, move)
            else:
                found[0][self._place(one, piece, units)] += move

    def cover(
        self,
        found: Sequence[Wide],
        pieces: Sequence[tuple[SharedTensor, Piece, slice]],
        weight: float,
        units: Units | None,
    ) -> None:
        """Add ``weight`` to the coordinates that a rung trains."""
        for one, piece, _ in pieces:
            if not self._factored:
                found[0][self._place(one, piece, units)] += weight
                continue
            inner, right, left = found
            rank = {"left": one.shape[-1], "right": one.shape[0]}.get(piece.role, len(inner))
            inner[:rank] += weight
            inner[rank:, :rank] += weight
            right[:rank] += weight
            left[:, :rank] += weight
            return  # its other factor trains the same

    def back(self, found: Sequence[Wide]) -> Wide:
        """Coordinates as differences of the tensor, flat."""
        if not self._factored:
            return found[0].reshape(-1)
        inner, right, left = found
        back: Wide = self._left @ inner @ self._right
        if right.size:
            back += self._left @ right
        if left.size:
            back += left @ self._right
        return back.reshape(-1)

    def _place(self, one: SharedTensor, piece: Piece, units: Units | None) -> Any:
        if one.shape == self._shape:
            return ...
        return slice_of(one.shape, self._shape, piece.blocks, units)

    def _rotate(self, found: Sequence[Wide], role: str, moved: NDArray[Any]) -> None:
        inner, right, left = found
        u, v = self._left, self._right
        if role == "left":
            rank = moved.shape[1]
            within = u.T @ moved
            inner[:, :rank] += within
            if left.size:
                left[:, :rank] += moved - u @ within
            return
        if role == "right":
            rank = len(moved)
            within = moved @ v.T
            inner[:rank] += within
            if right.size:
                right[:rank] += moved - within @ v
            return
        matrix = moved.reshape(len(moved), -1)
        rows = u.T @ matrix
        within = rows @ v.T
        inner += within
        if right.size:
            right += rows - within @ v
        if left.size:
            left += matrix @ v.T - u @ within


def _one_after_another(sizes: Sequence[int]) -> tuple[slice, ...]:
    ends = np.cumsum([0, *sizes]).tolist()
    return tuple(slice(start, end) for start, end in pairwise(ends))


def _flat(parts: Sequence[Wide]) -> Wide:
    return np.concatenate([each.reshape(-1) for each in parts])


def _product(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _basis_shapes(one: SharedTensor) -> list[tuple[int, ...]]:
    m, n = one.shape[0], one.size // one.shape[0]
    q = min(m, n)
    return [(m, q), (q,), (q, n)]
