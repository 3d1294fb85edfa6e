"""What an attention broadcast tells one device about the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.flat_layout import FlatLadder, FlatLayout
from device_sdk.methods.attention.contract import (
    MIXTURE,
    VECTOR,
    AttentionTraining,
    ladder_from_text,
    sketches,
)
from device_sdk.methods.learner import LearnerError, MovableWork, lacks
from device_sdk.wire.arrays.exchange import Attachment, Broadcast

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """The other devices that a device mixes with, in its own layout.

    ``names`` of n senders, ``vectors`` float32 [n, p], ``sketches`` float32 [n, g, d].
    """

    names: tuple[str, ...]
    vectors: Floats
    sketches: Floats

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True, eq=False)
class FleetView:
    """A broadcast as the device with this layout reads it; see :func:`read_fleet`.

    Attributes:
        training: the task's settings.
        ladder: of the task's model; ``width`` is the own rung's place in it.
        shared: w_g in the own layout, float32 [p].
        senders: who is known to the aggregator; row i of the arrays below belongs to sender i.
        sketches: float32 [n, g, d], of the smallest rung's numbers, which all have, divided by the
            cluster's RMS difference (``scales`` float32 [clusters, g]).
        widths, clusters: int64 [n].
    """

    round_id: int
    training: AttentionTraining
    ladder: FlatLadder
    width: int
    shared: Floats
    senders: tuple[str, ...]
    sketches: Floats
    widths: NDArray[np.int64]
    clusters: NDArray[np.int64]
    scales: Floats

    @property
    def layout(self) -> FlatLayout:
        """The own one."""
        return self.ladder.layouts[self.width]

    @property
    def warming_up(self) -> bool:
        """Whether this round still starts from the global model (papers/fedamn, algorithm 2)."""
        return not self.training.mix or self.round_id <= self.training.warm_up_rounds

    def shared_keeping(self, own: Floats) -> Floats:
        """The global model, with the groups that the task leaves to each device from ``own``; [p].

        Raises LearnerError where the model has no such group.
        """
        kept = [name.strip() for name in self.training.keeps.split(",")]
        unknown = sorted(set(kept) - set(self.layout.groups))
        if unknown:
            raise LearnerError(
                f"there is no parameter group {unknown[0]!r} to keep; this model has "
                f"{', '.join(self.layout.groups)}"
            )
        start = self.shared.copy()
        for group, (first, end) in zip(self.layout.groups, self.layout.spans, strict=True):
            if group in kept:
                start[first:end] = own[first:end]
        return start

    def offered_neighbours(self, broadcast: Broadcast, own: str) -> list[int]:
        """Rows of the senders whose vectors this device may fetch, or has fetched."""
        named = {*broadcast.offered, *broadcast.attachments}
        rows = enumerate(self.senders)
        return [row for row, name in rows if name != own and VECTOR + name in named]

    def query(self, own: str, vector: Floats, rows: list[int]) -> Floats:
        """s_i, float32 [g, d]: the aggregator's, or for an unlisted device made from its vector.

        Such a device measures with the scales of the cluster that ``rows`` belong to.
        """
        if own in self.senders:
            listed: Floats = self.sketches[self.senders.index(own)]
            return listed
        smallest = self.ladder.layouts[0]
        moved = (vector - self.shared)[self.ladder.places(smallest, self.layout)][None]
        found = sketches(moved, smallest, self.training.sketch_seed, self.training.sketch_rows)
        scale = self.scales[self.clusters[rows[0]]] if rows else np.ones(len(found[0]), np.float32)
        query: Floats = found[0] / np.maximum(scale, np.float32(1e-12))[:, None]
        return query

    def fetched(self, broadcast: Broadcast, own: str, vector: Floats) -> Neighbours:
        """The neighbours whose vectors came, in the own layout.

        What a narrower neighbour does not have is taken from the own ``vector``, so only what both
        have in common is mixed. Raises LearnerError for a vector that does not fit its width.
        """
        rows = [
            row
            for row in self.offered_neighbours(broadcast, own)
            if VECTOR + self.senders[row] in broadcast.attachments
        ]
        vectors = np.empty((len(rows), self.layout.size), dtype=np.float32)
        for place, row in enumerate(rows):
            name = VECTOR + self.senders[row]
            theirs = self.ladder.layouts[int(self.widths[row])]
            # As it came: numbers that travelled as float16 become float32 on their way to the row.
            found = _half_or_single(
                broadcast.attachments[name].tensors, "vector", name, (theirs.size,)
            )
            if self.widths[row] == self.width:
                vectors[place] = found
            elif self.widths[row] < self.width:
                vectors[place] = vector
                vectors[place, self.ladder.places(theirs, self.layout)] = found
            else:
                vectors[place] = found[self.ladder.places(self.layout, theirs)]
            _require_finite(vectors[place], "vector", name)
        return Neighbours(tuple(self.senders[row] for row in rows), vectors, self.sketches[rows])

    def given_mixture(self, broadcast: Broadcast, own: str) -> Floats | None:
        """The mixture that the aggregator made for this device, float32 [p]; None where it made
        none. Raises LearnerError where it does not fit."""
        name = MIXTURE + own
        attachment = broadcast.attachments.get(name)
        if attachment is None:
            return None
        return _array(attachment, "mixture", name, (self.layout.size,))


def read_fleet(broadcast: Broadcast, layout: FlatLayout) -> FleetView:
    """Read a broadcast for a device whose model has ``layout``.

    Raises LearnerError where it lacks something, or knows no model of this layout.
    """
    if "ladder" not in broadcast.settings:
        raise lacks("the broadcast", "'ladder', the task's layouts")
    try:
        training = AttentionTraining.from_scalars(broadcast.settings)
        ladder = ladder_from_text(broadcast.settings["ladder"])
        # First, so that a layout takes no more memory than the model that came with it.
        full = _array(broadcast.tensors, "global", "the broadcast", (ladder.full.size,))
        shared = full[ladder.places(layout)]
    except ValueError as error:
        raise LearnerError(f"the broadcast does not fit: {error}") from error
    if layout not in ladder.layouts:
        raise LearnerError("the task has no rung like this device's model")
    tensors = broadcast.tensors
    names = tensors.get("senders")
    if names is None or names.dtype != np.uint8 or names.ndim != 2 or names.shape[1] != 16:
        raise lacks("the broadcast", "'senders', uint8 of [n, 16]")
    n, groups = len(names), len(layout.groups)
    clusters = _whole(tensors, "clusters", n)
    widths = _whole(tensors, "widths", n)
    scales = _array(tensors, "scales", "the broadcast", None)
    if scales.ndim != 2 or scales.shape[1] != groups:
        raise LearnerError(f"the broadcast's 'scales' are {scales.shape}; expected [k, {groups}]")
    if n and (clusters.max() >= len(scales) or widths.max() >= len(ladder.layouts)):
        raise LearnerError("the broadcast names clusters or widths that it does not have")
    return FleetView(
        round_id=broadcast.round_id,
        training=training,
        ladder=ladder,
        width=ladder.layouts.index(layout),
        shared=shared,
        senders=tuple(row.tobytes().hex() for row in names),
        sketches=_array(tensors, "sketches", "the broadcast", (n, groups, training.sketch_rows)),
        widths=widths,
        clusters=clusters,
        scales=scales,
    )


def _array(
    source: Mapping[str, NDArray[Any]] | Attachment,
    name: str,
    where: str,
    shape: tuple[int, ...] | None,
) -> Floats:
    tensors = source.tensors if isinstance(source, Attachment) else source
    whole = _half_or_single(tensors, name, where, shape).astype(np.float32)
    _require_finite(whole, name, where)
    return whole


def _half_or_single(
    tensors: Mapping[str, NDArray[Any]], name: str, where: str, shape: tuple[int, ...] | None
) -> NDArray[Any]:
    array = tensors.get(name)
    if array is None or array.dtype not in (np.float32, np.float16):
        raise lacks(where, f"{name!r}, float32 or float16")
    if shape is not None and array.shape != shape:
        raise LearnerError(f"{name!r} of {where} is {array.shape}; expected {shape}")
    return array


def _require_finite(array: Floats, name: str, where: str) -> None:
    if not np.isfinite(array).all():
        raise LearnerError(f"{name!r} of {where} is not finite")


def _whole(tensors: Mapping[str, NDArray[Any]], name: str, length: int) -> NDArray[np.int64]:
    array = tensors.get(name)
    if array is None or array.dtype.kind not in "iu" or array.shape != (length,):
        raise lacks("the broadcast", f"{name!r}, {length} whole numbers")
    numbers = array.astype(np.int64)
    if length and numbers.min() < 0:
        raise LearnerError(f"the broadcast's {name!r} are negative")
    return numbers


# What mixing on the device itself takes: how many neighbours, how many bytes, and stand-ins.

# Of one number in a vector that is not offered yet: they travel as float16 unless a task says so.
_ABOUT_EACH = 2


def mixing_ahead(fleet: FleetView, broadcast: Broadcast, own: str) -> MovableWork | None:
    """The mixing that this round or, in the warm-up, a later one asks of the device ``own``.

    None where the task leaves it none, or nobody to mix with is known yet. A device that is not
    listed counts on the largest cluster. ``download_bytes`` is of the vectors as they are offered;
    where none are (in the warm-up, say) an estimate: full models in float16.
    """
    training = fleet.training
    if not training.mix or training.aggregator_mixes:
        return None
    if training.layers == "second":
        return _mixing(0, 0)
    sizes = np.bincount(fleet.clusters) if len(fleet.clusters) else np.zeros(1, dtype=np.int64)
    if own in fleet.senders:
        count = int(sizes[fleet.clusters[fleet.senders.index(own)]]) - 1
    else:
        count = int(sizes.max())
    if training.neighbours:
        count = min(count, training.neighbours)
    if count == 0:
        return None
    offered = sorted(
        (
            size
            for name, size in broadcast.offered.items()
            if name.startswith(VECTOR) and name != VECTOR + own
        ),
        reverse=True,
    )
    about = count * fleet.ladder.full.size * _ABOUT_EACH
    return _mixing(count, sum(offered[:count]) if offered else about)


def _mixing(neighbours: int, download_bytes: int) -> MovableWork:
    return MovableWork(
        neighbours,
        download_bytes,
        here=f"mixes {neighbours} neighbours itself",
        there="mixes for this device",
        with_it="with a mixture of its own",
        fetched="its neighbours' vectors",
    )


def stand_ins(fleet: FleetView, count: int) -> Neighbours:
    """``count`` neighbours whose vectors are the global model: the same work as with real ones."""
    vectors = np.repeat(fleet.shared[None], count, axis=0)
    rows = np.resize(np.arange(len(fleet.senders)), count)
    return Neighbours(tuple(f"{i:032x}" for i in range(count)), vectors, fleet.sketches[rows])
