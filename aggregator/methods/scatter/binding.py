"""The table ``[scatter]`` of a task file, and scatter's messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from aggregator.methods.binding import Binding, read_settings
from aggregator.methods.method import Method
from aggregator.methods.scatter.method import ScatterMethod, ScatterSettings, initial_items
from aggregator.methods.server_optimizer import OptimizerSettings
from aggregator.tables import TomlTable
from device_sdk.artifact import Artifact
from device_sdk.methods.scatter.contract import ScatterTraining, decode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.arrays.sparse import MAX_WIDTH


@dataclass(frozen=True, slots=True)
class ScatterBinding(Binding[ScatterSettings]):
    """``columns`` is K, ``spread`` the standard deviation of a new item's vector."""

    columns: int = 64
    spread: float = 0.1

    settings_class = ScatterSettings
    needs_catalogue = True
    artifacts = range(2)

    @classmethod
    def read(cls, method_name: str, table: TomlTable) -> ScatterBinding:
        """Read the table. Raises TaskError, naming the key."""
        optimizer, training = table.table("optimizer"), table.table("training")
        columns = table.integer("columns", 64, least=1, most=MAX_WIDTH)
        spread = table.number("spread", 0.1, above=0.0, most=10.0)
        usual = ScatterSettings()
        try:
            settings = ScatterSettings(
                aggregator=cast(Any, table.text("aggregator", usual.aggregator)),
                optimizer=read_settings(OptimizerSettings, optimizer),
                clip_norm=table.number("clip_norm", usual.clip_norm, least=0.0),
                clip_multiple=table.number("clip_multiple", usual.clip_multiple, least=0.0),
                row_multiple=table.number("row_multiple", usual.row_multiple, least=0.0),
                outlier_multiple=table.number(
                    "outlier_multiple", usual.outlier_multiple, least=0.0
                ),
                item_multiple=table.number("item_multiple", usual.item_multiple, least=0.0),
                robust=cast(Any, table.text("robust", usual.robust)),
                trim_share=table.number("trim_share", usual.trim_share, least=0.0),
                training=read_settings(ScatterTraining, training),
            )
        except ValueError as error:
            # The classes of the method name the setting; its table is one of these.
            raise table.error("", f"holds a setting out of range: {error}") from None
        table.finish()
        return cls(method_name, settings, columns, spread)

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> Method:
        """See :class:`~aggregator.methods.binding.Binding`."""
        return ScatterMethod(initial_items(items, self.columns, self.spread, rng), self.settings)

    def items_of(self, method: Method) -> int:
        """See :class:`~aggregator.methods.binding.Binding`."""
        return len(_scatter(method).items)

    def grow(self, method: Method, items: int, rng: np.random.Generator) -> None:
        """See :class:`~aggregator.methods.binding.Binding`."""
        new = items - self.items_of(method)
        _scatter(method).grow(initial_items(new, self.columns, self.spread, rng))

    def decode(self, body: bytes, round_id: int, items: int, sender: str = "") -> Update:
        """See :class:`~aggregator.methods.binding.Binding`; limits must know who."""
        return decode_scatter_update(body, round_id, items, self.columns, sender)

    def width_of(self, update: Update) -> int:
        """The number of columns."""
        return len(update.tensors["columns"])


def _scatter(method: Method) -> ScatterMethod:
    if not isinstance(method, ScatterMethod):
        raise TypeError(f"expected a ScatterMethod, found {type(method).__name__}")
    return method
