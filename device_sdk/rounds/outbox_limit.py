"""How much may wait for receipts before a device begins no further round."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OutboxLimit"]


@dataclass(frozen=True, slots=True)
class OutboxLimit:
    """A device with ``most_updates`` or ``most_bytes`` in its outbox trains no further round.

    An update without a receipt may have been counted or not, so none is ever thrown away: what is
    given up are rounds to come, and only until receipts come. ``most_bytes``: of the updates'
    bodies; the last update may go beyond it.

    Raises ValueError, naming the field.
    """

    most_updates: int = 8
    most_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("most_updates", "most_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected 1 or more")

    def obstacle(self, updates: int, size_bytes: int) -> str:
        """Why no further round is begun with so much in the outbox, for people; empty for none."""
        if updates < self.most_updates and size_bytes < self.most_bytes:
            return ""
        return (
            f"{updates} updates ({size_bytes:,} bytes) wait for receipts that do not come; no "
            "further round is trained until one does"
        )
