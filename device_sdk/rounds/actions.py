"""What the sans-io parts ask of whoever runs them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Publish:
    """Send ``payload`` to ``topic``, not retained, at QoS 1."""

    topic: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Subscribe (again), so that the broker sends what it retains.

    ``optional``: brokers' rules need not allow it.
    """

    topic_filter: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """End a subscription."""

    topic_filter: str


@dataclass(frozen=True, slots=True)
class MoveTo:
    """Be connected to the broker of this cell; empty: to the one that the device enrolled at."""

    cell: str


Action = Publish | Subscribe | Unsubscribe | MoveTo


Actions = deque[Action]
"""Filled by several parts, emptied by their runner."""
