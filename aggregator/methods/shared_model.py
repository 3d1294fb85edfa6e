"""The aggregator's half of methods that train one model for all: what they get for free.

The device's half is :mod:`device_sdk.methods.shared_model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.method import Binding, ModelMethod, Refused, require_floats
from device_sdk.artifact import Artifact
from device_sdk.artifact.flat_layout import FlatLayout, layout_of
from device_sdk.fields import Declared
from device_sdk.methods.shared_model import SharedModelTraining
from device_sdk.methods.state import Entry, Schema
from device_sdk.wire.arrays.exchange import Update

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SharedModelSettings(Declared):
    """The task file's table of the method's name; ``training`` is the table below it. A method's
    own settings are further fields of a subclass. Raises ValueError, naming the setting."""

    training: SharedModelTraining = field(default_factory=SharedModelTraining)


class SharedModelMethod(ModelMethod):
    """Adds up what devices' training moved of one model, in full or at single places.

    Left to write is :meth:`step`, which changes ``_model`` by :attr:`mean`. What has to survive
    between rounds are vectors [p] named in ``VECTORS``: ``momentum`` is the attribute
    ``_momentum``, float32; :meth:`reset` sets them to zero.

    Args:
        initial: the first version, float32 [p].
        layout: which parameter lies where.
        settings: the task file's.
    """

    VECTORS: ClassVar[tuple[str, ...]] = ()
    ADDED = ("sum",)

    _sum: NDArray[np.float64]
    _settings: Any

    def __init__(self, initial: Floats, layout: FlatLayout, settings: SharedModelSettings) -> None:
        self._settings = settings
        super().__init__(initial, layout, settings.training)

    @property
    def mean(self) -> Floats:
        """The mean over the round's updates of what they moved, float32 [p]."""
        return (self._sum / self._participants).astype(np.float32)

    def reset(self) -> None:
        """It is another model: ``VECTORS`` begin at zero."""
        for name in self.VECTORS:
            setattr(self, f"_{name}", np.zeros_like(self._model))

    def require(self, update: Update) -> None:
        """Takes ``moved`` float32 [p]; or ``places`` int32 [m], rising, and ``values``
        float32 [m]."""
        tensors = update.tensors
        size = len(self._model)
        if tensors.keys() == {"moved"}:
            require_floats("moved", tensors["moved"], (size,))
        elif tensors.keys() == {"places", "values"}:
            places = tensors["places"]
            if places.dtype != np.int32 or places.ndim != 1 or not 0 < len(places) <= size:
                raise Refused("bad-places", f"places must be int32, 1 to {size} of them")
            if places[0] < 0 or places[-1] >= size or (places[1:] <= places[:-1]).any():
                raise Refused("bad-places", "places must rise and lie in the model")
            require_floats("values", tensors["values"], places.shape)
        else:
            raise Refused("bad-tensors", "expected moved, or places and values")

    def add(self, update: Update) -> None:
        """All devices count the same."""
        tensors = update.tensors
        if "moved" in tensors:
            self._sum += tensors["moved"]
        else:
            self._sum[tensors["places"]] += tensors["values"]

    def schema(self) -> Schema:
        size = self._model.shape
        vectors = dict.fromkeys(self.VECTORS, Entry(np.float32, size))
        return {**super().schema(), **vectors, "sum": Entry(np.float64, size)}


class SharedModelBinding(Binding[SharedModelSettings]):
    """Joins a :class:`SharedModelMethod` to a task file of one artifact, whose parameters are the
    first version."""

    method_class: ClassVar[type[SharedModelMethod]]
    artifacts = range(1, 2)

    def why_no_control(self, artifacts: int) -> str:
        """Devices can."""
        return ""

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> SharedModelMethod:
        layout = layout_of(artifacts[0].manifest)
        return self.method_class(layout.flatten(artifacts[0].initial), layout, self.settings)
