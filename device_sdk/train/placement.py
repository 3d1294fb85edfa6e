"""Who does the work that either end may do: the choice as it was measured and is kept."""

from __future__ import annotations

from dataclasses import dataclass

from device_sdk.home.model_store import CapabilityRow
from device_sdk.methods.learner import MovableWork, Where


@dataclass(frozen=True, slots=True)
class MeasuredPlacement:
    """A choice of where.

    ``size``: of the work that was measured, rounded up to a power of two: attention's, say, is not
    measured anew for each device that joins the cluster.
    """

    where: Where
    size: int

    @classmethod
    def of(cls, where: Where, ahead: MovableWork) -> MeasuredPlacement:
        """The choice for what is ahead."""
        return cls(where, _power(ahead.size))

    @classmethod
    def read(cls, row: CapabilityRow) -> MeasuredPlacement | None:
        """The choice in a row; None where it holds none."""
        if row.placement is None or row.placed_size is None:
            return None
        return cls("device" if row.placement == "device" else "aggregator", row.placed_size)

    def holds(self, ahead: MovableWork | None, most_bytes: int) -> bool:
        """Whether the choice still stands.

        It does for half the size too: what is about as large as a power of two would be measured
        again and again. Nothing ahead (a device is alone in its cluster for a round) leaves it as
        it is. Offers that turn out larger than estimated end the work here.
        """
        if ahead is None:
            return True
        if self.where == "device" and ahead.download_bytes > most_bytes:
            return False
        near = _power(ahead.size)
        return near <= self.size <= 2 * max(1, near)


def _power(count: int) -> int:
    return 0 if count == 0 else 1 << (count - 1).bit_length()
