"""What there is to see of a running aggregator, for the live view, the log and the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aggregator.store.rounds import RoundRow

__all__ = ["Snapshot"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment. Counters are since the start of the process."""

    task: str
    connected: bool
    broker: str
    devices: int
    revoked: int
    sessions: int
    version: int
    current: RoundRow | None
    seconds_left: float | None
    arrived: int
    outstanding: int
    participants: int
    quorum: int
    counted: int
    bytes_received: int
    bytes_sent: int
    widths: Mapping[int, int] = field(default_factory=dict)
    refusals: Mapping[str, int] = field(default_factory=dict)
    refused_subscriptions: tuple[str, ...] = ()
    """The topic filters that the broker refuses at present; they are asked for again."""
    broker_losses: int = 0
    """Messages of our own to ourselves that the broker acknowledged and did not deliver."""
    unpublished: str | None = None
    """Why the next round could not be published, and is held."""
    finished: tuple[RoundRow, ...] = ()
    """The last closed rounds, newest first."""
