"""The model that this device has, taken out: its arrays by the names that their author gave."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from device_sdk.artifact import read_manifest, safetensors
from device_sdk.artifact.standalone import unpacked
from device_sdk.errors import NothingLearnt
from device_sdk.wire.codec.message import decode
from device_sdk.wire.publish.catalogue import Catalogue
from device_sdk.world import DeviceWorld


@dataclass(frozen=True, slots=True, eq=False)
class LocalModel:
    """A model as this device last received or trained it.

    Attributes:
        task: that it is of.
        version, round: what it was trained from, and in which round.
        arrays: parameters and buffers by torch's names, this device's personal layers included;
            for tasks that recommend ``items``, [N, K], as they came, and ``strengths``, [K], by
            which their columns are to be multiplied where there are any. Copies.
        items: for tasks that recommend, the items' ids, one for each row.
    """

    task: str
    version: int
    round: int
    arrays: Mapping[str, NDArray[Any]]
    items: tuple[str, ...] = ()

    def to_safetensors(self) -> bytes:
        """A file, as ``tessera-aggregator model`` writes it of the fleet's model."""
        notes = {"task": self.task, "version": str(self.version), "round": str(self.round)}
        if self.items:
            notes["items"] = json.dumps(self.items)
        return safetensors.encode(self.arrays, notes)


def local_model(world: DeviceWorld) -> LocalModel:
    """From the home folder alone. Raises NothingLearnt, and ArtifactError for a damaged home."""
    task, models = world.membership.task, world.home.models
    model = models.model(task)
    if model is None:
        raise NothingLearnt(
            "no model to take out: no round has been trained here yet; start the device and let it "
            "take part in one"
        )
    if model.artifact_id is None:
        content = models.catalogue(model.catalogue_id)
        items = () if content is None else decode(Catalogue, content).items
        arrays = dict(model.arrays)
    else:
        items, arrays = (), {}
        tensors = read_manifest(world.artifact_folder(model.artifact_id)).state_by_name
        for name, array in model.arrays.items():
            arrays |= unpacked(tensors[name], array)
    return LocalModel(task, model.version, model.round, arrays, items)
