"""Where a device's neighbours are mixed: on the device, or for it by the aggregator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from device_sdk.methods.attention.rehearsal import MixingAhead
from device_sdk.train.job import LocalArtifact
from device_sdk.wire.arrays.exchange import Broadcast

Where = Literal["device", "aggregator"]
_SEPARATOR = " | "


@runtime_checkable
class PlacedLearner(Protocol):
    """A learner whose mixing may be left to the aggregator."""

    def mixing_ahead(self, broadcast: Broadcast) -> MixingAhead | None:
        """What mixing on the device will take; None where there is none to do."""

    def rehearse(self, broadcast: Broadcast) -> None:
        """The work of a round with the device's own mixture, on a learner that is thrown away."""


@dataclass(frozen=True, slots=True)
class MeasuredPlacement:
    """A choice as it is kept among the conditions of a capability row.

    ``neighbours``: how many it was measured with, rounded up to a power of two, so that it is not
    measured anew for each device that joins the cluster. ``most_bytes``: the option's value.
    """

    where: Where
    neighbours: int
    most_bytes: int

    @classmethod
    def of(cls, where: Where, ahead: MixingAhead, most_bytes: int) -> MeasuredPlacement:
        """The choice for what is ahead."""
        return cls(where, _power(ahead.neighbours), most_bytes)

    @classmethod
    def read(cls, fingerprint: str, conditions: str) -> MeasuredPlacement | None:
        """The choice in a row's ``fingerprint``; None where it holds none for ``conditions``."""
        before, found, rest = fingerprint.rpartition(f"{_SEPARATOR}placed ")
        if not found or before != conditions:
            return None
        where, neighbours, most_bytes = rest.split()
        return cls(
            "device" if where == "device" else "aggregator", int(neighbours), int(most_bytes)
        )

    def fingerprint(self, conditions: str) -> str:
        """What :meth:`read` reads."""
        return f"{conditions}{_SEPARATOR}placed {self.where} {self.neighbours} {self.most_bytes}"

    def holds(self, ahead: MixingAhead | None, most_bytes: int) -> bool:
        """Whether the choice still stands.

        It does for half as many neighbours too: a cluster about as large as a power of two would
        have it measured again and again. Nothing ahead (the device is alone in its cluster for a
        round) leaves it as it is. Offers that turn out larger than estimated end the mixing here.
        """
        if most_bytes != self.most_bytes:
            return False
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
