"""What an attention round attaches: vectors for each cluster, mixtures for single devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.attention.device_models import DeviceModels
from aggregator.methods.attention.mixtures import AggregatorMixer
from aggregator.methods.attention.settings import AttentionSettings
from device_sdk.artifact.flat_layout import FlatLayout
from device_sdk.wire.arrays.exchange import Attachment

__all__ = ["attachments_of"]

Floats = NDArray[np.float32]


def attachments_of(
    models: DeviceModels,
    clusters: NDArray[np.int64],
    layouts: Sequence[FlatLayout],
    shared: Floats,
    sketches: Floats,
    settings: AttentionSettings,
) -> tuple[dict[str, Attachment], dict[str, tuple[str, ...]]]:
    """The attachments by name, and the cohorts that may read them, as their members' names.

    ``vector.SENDER``: for the cluster, of each device in one where somebody mixes by itself, but
    none where layer 2 alone takes part, which needs no neighbour.
    ``mixture.SENDER``: for that device alone, of each that leaves mixing to the aggregator.

    Args:
        models: the n known devices'.
        clusters: theirs, int64 [n].
        layouts: of all widths, the narrowest first.
        shared: w_g, float32 [p] of the widest layout.
        sketches: in units of their cluster's length, float32 [n, g, d].
    """
    told, dtype = settings.training, np.float16 if settings.half else np.float32
    places = [layout.places_in(layouts[-1]) for layout in layouts]
    mixer = AggregatorMixer(models, layouts, shared, sketches, settings.mixture, told.own_weight)
    attachments: dict[str, Attachment] = {}
    cohorts: dict[str, tuple[str, ...]] = {}
    for cluster in range(int(clusters.max()) + 1 if len(models) else 0):
        rows = np.flatnonzero(clusters == cluster)
        cohorts[f"cluster.{cluster}"] = tuple(models.senders[row] for row in rows)
        fetchers = [r for r in rows if not (told.aggregator_mixes or models.asks[r])]
        for row in rows if fetchers and told.layers != "second" else ():
            vector = models.vectors[row][places[models.widths[row]]]
            attachments[f"vector.{models.senders[row]}"] = Attachment(
                {"vector": vector.astype(dtype)}, f"cluster.{cluster}"
            )
        for row in sorted(set(rows) - set(fetchers)):
            name = models.senders[row]
            cohorts[f"device.{name}"] = (name,)
            attachments[f"mixture.{name}"] = Attachment(
                {"mixture": mixer.mixture(int(row), rows).astype(dtype)}, f"device.{name}"
            )
    return attachments, cohorts
