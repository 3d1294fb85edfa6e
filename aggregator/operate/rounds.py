"""Rounds that are held, and let go on."""

from __future__ import annotations

from dataclasses import dataclass

from aggregator.rounds.machine import held, let_go
from aggregator.store import TaskStore


@dataclass(frozen=True, slots=True)
class ReleasedRound:
    """A round that was held. ``dropped``: updates in quarantine, which are no part of it; None: it
    is published once more."""

    task: str
    round: int
    dropped: int | None


def release(store: TaskStore, task: str) -> ReleasedRound | None:
    """Let a task's held round go on; None where none is held."""
    if held(store) is None:
        return None
    latest = store.rounds.latest()
    number = latest[0].round if latest else 0
    unpublished = store.facts.unpublished is not None
    with store.database.transaction():
        dropped = let_go(store)
    return (
        ReleasedRound(task, number + 1, None)
        if unpublished
        else ReleasedRound(task, number, dropped)
    )
