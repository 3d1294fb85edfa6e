"""What a task file may choose about scatter aggregation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from aggregator.methods.robust import Robust, RobustRule, require_multiple
from aggregator.methods.server_optimizer import OptimizerSettings
from device_sdk.methods.scatter.contract import ScatterTraining

__all__ = ["ScatterSettings"]


@dataclass(frozen=True, slots=True)
class ScatterSettings:
    """Settings of a scatter task.

    Attributes:
        aggregator: ``mean`` divides each column's sum by the participants (the patent's),
            ``coverage`` by those of them that drew the column.
        optimizer: of the server, on the averaged gradient. Its ``decay`` holds for the devices'
            user_learning_rate as well, so that both sides of the product settle together.
        clip_norm: an update with a larger Euclidean norm is scaled down to it; 0 for no limit.
        clip_multiple: likewise for more than so many times the fleet's median norm; 0 for no limit.
            See :class:`~aggregator.methods.fleet_scale.FleetScale`.
        row_multiple: likewise for each row of an update, against the fleet's median row.
        outlier_multiple: an update this far out of line counts as one of no rows; see
            :class:`~aggregator.methods.outliers.Outliers`. 0: none does.
        item_multiple: an item's vector longer than so many medians of those touched as often is
            scaled down; see :class:`~aggregator.methods.scatter.item_norms.ItemNorms`. 0: no limit.
        robust, trim_share: how a cell's values become one; see
            :class:`~aggregator.methods.robust.RobustRule`. All but ``none`` keep a round's updates
            in memory until it closes.
        training: what the broadcast tells the devices.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    aggregator: Literal["mean", "coverage"] = "coverage"
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    clip_norm: float = 0.0
    clip_multiple: float = 4.0
    row_multiple: float = 16.0
    outlier_multiple: float = 0.0
    item_multiple: float = 0.0
    robust: Robust = "none"
    trim_share: float = 0.1
    training: ScatterTraining = field(default_factory=ScatterTraining)

    def __post_init__(self) -> None:
        if self.aggregator not in ("mean", "coverage"):
            raise ValueError(f"aggregator is {self.aggregator!r}; expected 'mean' or 'coverage'")
        if not math.isfinite(self.clip_norm) or self.clip_norm < 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; expected 0 (no limit) or above")
        for name in ("clip_multiple", "row_multiple", "outlier_multiple", "item_multiple"):
            require_multiple(name, getattr(self, name))
        RobustRule(self.robust, self.trim_share)
