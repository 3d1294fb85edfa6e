"""Where a device's neighbours are mixed: on the device, or for it by the aggregator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from device_sdk.home.model_store import CapabilityRow
from device_sdk.methods.attention.rehearsal import MixingAhead
from device_sdk.train.job import LocalArtifact
from device_sdk.wire.arrays.exchange import Broadcast

Where = Literal["device", "aggregator"]


@runtime_checkable
class PlacedLearner(Protocol):
    """A learner whose mixing may be left to the aggregator."""

    def mixing_ahead(self, broadcast: Broadcast) -> MixingAhead | None:
        """What mixing on the device will take; None where there is none to do."""

    def rehearse(self, broadcast: Broadcast) -> None:
        """The work of a round with the device's own mixture, on a learner that is thrown away."""


@dataclass(frozen=True, slots=True)
class MeasuredPlacement:
    """A choice of where.

    ``neighbours``: how many it was measured with, rounded up to a power of two, so that it is not
    measured anew for each device that joins the cluster.
    """

    where: Where
    neighbours: int

    @classmethod
    def of(cls, where: Where, ahead: MixingAhead) -> MeasuredPlacement:
        """The choice for what is ahead."""
        return cls(where, _power(ahead.neighbours))

    @classmethod
    def read(cls, row: CapabilityRow) -> MeasuredPlacement | None:
        """The choice in a row; None where it holds none."""
        if row.placement is None or row.placed_size is None:
            return None
        return cls("device" if row.placement == "device" else "aggregator", row.placed_size)

    def holds(self, ahead: MixingAhead | None, most_bytes: int) -> bool:
        """Whether the choice still stands.

        It does for half as many neighbours too: a cluster about as large as a power of two would
        have it measured again and again. Nothing ahead (the device is alone in its cluster for a
        round) leaves it as it is. Offers that turn out larger than estimated end the mixing here.
        """
        if ahead is None:
            return True
        if self.where == "device" and ahead.download_bytes > most_bytes:
            return False
        near = _power(ahead.neighbours)
        return near <= self.neighbours <= 2 * max(1, near)


def obstacle(artifact: LocalArtifact, ahead: MixingAhead, most_bytes: int) -> str:
    """Why the device cannot mix by itself, whatever the time it has; empty where it can."""
    if artifact.companion is None:
        return "the task offers no meta-network"
    if ahead.download_bytes > most_bytes:
        return (
            f"its neighbours' vectors are {ahead.download_bytes} bytes, above "
            f"most_attachment_bytes ({most_bytes})"
        )
    return ""


def _power(count: int) -> int:
    return 0 if count == 0 else 1 << (count - 1).bit_length()
