"""The table ``[scatter]`` of a task file, and scatter's messages."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

import numpy as np

from aggregator.methods.method import Method
from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.methods.server_optimizer import OptimizerSettings
from aggregator.toml_table import TomlTable
from device_sdk.wire.exchange import Update
from device_sdk.wire.scatter_body import decode_scatter_update
from device_sdk.wire.scatter_settings import ScatterTraining
from device_sdk.wire.sparse import MAX_WIDTH

__all__ = ["ScatterBinding"]

Settings = TypeVar("Settings", OptimizerSettings, ScatterTraining)


@dataclass(frozen=True, slots=True)
class ScatterBinding:
    """``columns`` is K, ``spread`` the standard deviation of a new item's vector."""

    columns: int
    spread: float
    settings: ScatterSettings
    method_name: str = "scatter"

    @classmethod
    def read(cls, table: TomlTable) -> ScatterBinding:
        """Read the table. Raises TaskError, naming the key."""
        optimizer, training = table.table("optimizer"), table.table("training")
        columns = table.integer("columns", 64, least=1, most=MAX_WIDTH)
        spread = table.number("spread", 0.1, above=0.0, most=10.0)
        try:
            settings = ScatterSettings(
                aggregator=cast(Any, table.text("aggregator", "coverage")),
                optimizer=_like(OptimizerSettings(), optimizer),
                clip_norm=table.number("clip_norm", 0.0, least=0.0),
                training=_like(ScatterTraining(), training),
            )
        except ValueError as error:
            # The classes of the method name the setting; its table is one of these.
            raise table.error("", f"holds a setting out of range: {error}") from None
        for each in (table, optimizer, training):
            each.finish()
        return cls(columns, spread, settings)

    def build(self, items: int, rng: np.random.Generator) -> Method:
        """See :class:`~aggregator.bindings.binding.Binding`."""
        return ScatterMethod(initial_items(items, self.columns, self.spread, rng), self.settings)

    def items_of(self, method: Method) -> int:
        """See :class:`~aggregator.bindings.binding.Binding`."""
        return len(_scatter(method).items)

    def grow(self, method: Method, items: int, rng: np.random.Generator) -> None:
        """See :class:`~aggregator.bindings.binding.Binding`."""
        new = items - self.items_of(method)
        _scatter(method).grow(initial_items(new, self.columns, self.spread, rng))

    def decode(self, body: bytes, round_id: int, items: int) -> Update:
        """See :class:`~aggregator.bindings.binding.Binding`."""
        return decode_scatter_update(body, round_id, items, self.columns)

    def width_of(self, update: Update) -> int:
        """The number of columns."""
        return len(update.tensors["columns"])


def _scatter(method: Method) -> ScatterMethod:
    if not isinstance(method, ScatterMethod):
        raise TypeError(f"expected a ScatterMethod, found {type(method).__name__}")
    return method


def _like(defaults: Settings, table: TomlTable) -> Settings:
    """``defaults`` with the table's values in the place of those it names."""
    values: dict[str, Any] = {}
    for field in fields(defaults):
        default = getattr(defaults, field.name)
        if isinstance(default, str):
            values[field.name] = table.text(field.name, default)
        elif isinstance(default, int):
            values[field.name] = table.integer(field.name, default, least=0)
        else:
            values[field.name] = table.number(field.name, default)
    return type(defaults)(**values)
