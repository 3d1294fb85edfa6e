"""Taking part in rounds, without a socket or a thread: messages in, actions out."""

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


@dataclass(frozen=True, slots=True)
class Download:
    """Ask the mirror at this URL for the chunk that ``topic`` retains, by its message's SHA-256.

    It is handed on like a retained message of the topic; where it is not to be had there, that is
    said (:meth:`~device_sdk.rounds.participant.Participant.not_mirrored`).
    """

    mirror: str
    topic: str
    digest: bytes


Action = Publish | Subscribe | Unsubscribe | MoveTo | Download


Actions = deque[Action]
"""Filled by several parts, emptied by their runner."""
