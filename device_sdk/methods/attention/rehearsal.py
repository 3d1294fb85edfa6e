"""What a device's own mixing will take: how many neighbours, how many bytes, and stand-ins."""

from __future__ import annotations

import numpy as np

from device_sdk.methods.attention.contract import VECTOR
from device_sdk.methods.attention.fleet import FleetView, Neighbours
from device_sdk.methods.learner import MovableWork
from device_sdk.wire.arrays.exchange import Broadcast

# Of one number in a vector that is not offered yet: they travel as float16 unless a task says so.
_ABOUT_EACH = 2


def mixing_ahead(fleet: FleetView, broadcast: Broadcast, own: str) -> MovableWork | None:
    """The mixing that this round or, in the warm-up, a later one asks of the device ``own``.

    None where the task leaves it none, or nobody to mix with is known yet. A device that is not
    listed counts on the largest cluster. ``download_bytes`` is of the vectors as they are offered;
    where none are (in the warm-up, say) an estimate of float16 in the widest layout.
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
    about = count * fleet.layouts[-1].size * _ABOUT_EACH
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
