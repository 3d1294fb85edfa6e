"""Who does the work that either end may do: the choice as it was measured and is kept."""

from __future__ import annotations

from dataclasses import dataclass

from device_sdk.methods.learner import MovableWork, Where

_SEPARATOR = " | "


@dataclass(frozen=True, slots=True)
class MeasuredPlacement:
    """A choice as it is kept among the conditions of a capability row.

    ``size``: of the work that was measured, rounded up to a power of two: attention's, say, is not
    measured anew for each device that joins the cluster. ``most_bytes``: the option's value.
    """

    where: Where
    size: int
    most_bytes: int

    @classmethod
    def of(cls, where: Where, ahead: MovableWork, most_bytes: int) -> MeasuredPlacement:
        """The choice for what is ahead."""
        return cls(where, _power(ahead.size), most_bytes)

    @classmethod
    def read(cls, fingerprint: str, conditions: str) -> MeasuredPlacement | None:
        """The choice in a row's ``fingerprint``; None where it holds none for ``conditions``."""
        before, found, rest = fingerprint.rpartition(f"{_SEPARATOR}placed ")
        if not found or before != conditions:
            return None
        where, size, most_bytes = rest.split()
        return cls("device" if where == "device" else "aggregator", int(size), int(most_bytes))

    def fingerprint(self, conditions: str) -> str:
        """What :meth:`read` reads."""
        return f"{conditions}{_SEPARATOR}placed {self.where} {self.size} {self.most_bytes}"

    def holds(self, ahead: MovableWork | None, most_bytes: int) -> bool:
        """Whether the choice still stands.

        It does for half the size too: what is about as large as a power of two would be measured
        again and again. Nothing ahead (a device is alone in its cluster for a round) leaves it as
        it is. Offers that turn out larger than estimated end the work here.
        """
        if most_bytes != self.most_bytes:
            return False
        if ahead is None:
            return True
        if self.where == "device" and ahead.download_bytes > most_bytes:
            return False
        near = _power(ahead.size)
        return near <= self.size <= 2 * max(1, near)


def _power(count: int) -> int:
    return 0 if count == 0 else 1 << (count - 1).bit_length()
