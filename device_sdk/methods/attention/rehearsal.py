"""What a device's own mixing will take: how many neighbours, how many bytes, and stand-ins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from device_sdk.methods.attention.fleet import FleetView, Neighbours
from device_sdk.wire.arrays.exchange import Broadcast

_VECTOR = "vector."
# Of one number in a vector that is not offered yet: they travel as float16 unless a task says so.
_ABOUT_EACH = 2


@dataclass(frozen=True, slots=True)
class MixingAhead:
    """What a round with a mixture of the device's own takes.

    ``neighbours``: how many are mixed at most. ``download_bytes``: of their vectors; as they are
    offered, or where none are (in the warm-up, say) an estimate of float16 in the widest layout.
    """

    neighbours: int
    download_bytes: int


def mixing_ahead(fleet: FleetView, broadcast: Broadcast, own: str) -> MixingAhead | None:
    """The mixing that this round or, in the warm-up, a later one asks of the device ``own``.

    None where the task leaves it none, or nobody to mix with is known yet. A device that is not
    listed counts on the largest cluster.
    """
    training = fleet.training
    if not training.mix or training.aggregator_mixes:
        return None
    if training.layers == "second":
        return MixingAhead(0, 0)
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
            if name.startswith(_VECTOR) and name != _VECTOR + own
        ),
        reverse=True,
    )
    about = count * fleet.layouts[-1].size * _ABOUT_EACH
    return MixingAhead(count, sum(offered[:count]) if offered else about)


def stand_ins(fleet: FleetView, count: int) -> Neighbours:
    """``count`` neighbours whose vectors are the global model: the same work as with real ones."""
    vectors = np.repeat(fleet.shared[None], count, axis=0)
    rows = np.resize(np.arange(len(fleet.senders)), count)
    return Neighbours(tuple(f"{i:032x}" for i in range(count)), vectors, fleet.sketches[rows])
