"""The table ``[scatter]`` of a task file, and scatter's messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.binding import Binding
from aggregator.methods.method import Method
from aggregator.methods.scatter.method import ScatterMethod, ScatterSettings, initial_items
from device_sdk.artifact import Artifact
from device_sdk.fields import Within
from device_sdk.methods.scatter.contract import decode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.arrays.sparse import MAX_WIDTH


@dataclass(frozen=True, slots=True)
class ScatterTable(ScatterSettings):
    """The table: the method's settings, and what the model is made with.

    Attributes:
        columns: K, the full width of the model.
        spread: standard deviation of a new item's vector.
    """

    columns: Annotated[int, Within(1, MAX_WIDTH)] = 64
    spread: Annotated[float, Within(0, 10, above=True)] = 0.01


class ScatterBinding(Binding[ScatterTable]):
    """Factors of the catalogue's items; no artifact, or the one that devices train with."""

    __slots__ = ()
    settings_class = ScatterTable
    needs_catalogue = True
    artifacts = range(2)

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> Method:
        """See :class:`~aggregator.methods.binding.Binding`."""
        return ScatterMethod(self._new_items(items, rng), self.settings)

    def _new_items(self, items: int, rng: np.random.Generator) -> NDArray[np.float32]:
        return initial_items(items, self.settings.columns, self.settings.spread, rng)

    def items_of(self, method: Method) -> int:
        """See :class:`~aggregator.methods.binding.Binding`."""
        return len(_scatter(method).items)

    def grow(self, method: Method, items: int, rng: np.random.Generator) -> None:
        """See :class:`~aggregator.methods.binding.Binding`."""
        _scatter(method).grow(self._new_items(items - self.items_of(method), rng))

    def decode(self, body: bytes, round_id: int, items: int, sender: str = "") -> Update:
        """See :class:`~aggregator.methods.binding.Binding`; limits must know who."""
        return decode_scatter_update(body, round_id, items, self.settings.columns, sender)

    def width_of(self, update: Update) -> int:
        """The number of columns."""
        return len(update.tensors["columns"])


def _scatter(method: Method) -> ScatterMethod:
    if not isinstance(method, ScatterMethod):
        raise TypeError(f"expected a ScatterMethod, found {type(method).__name__}")
    return method
