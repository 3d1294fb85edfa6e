"""What the parts of a serving aggregator share, made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aggregator.keys.registry import Registry
from aggregator.refusals import Refusals
from aggregator.store import Store, TaskStore
from aggregator.task.file import SharedSettings, Task
from device_sdk.wire.publish.topics import Topics
from device_sdk.wire.seal.keys import RandomBytes


@dataclass(frozen=True)
class _Common:
    registry: Registry
    refusals: Refusals
    topics: Topics
    clock: Callable[[], float]
    unix_clock: Callable[[], float]
    random_bytes: RandomBytes


@dataclass(frozen=True)
class Shared(_Common):
    """By all parts. ``clock`` gives monotonic seconds, ``unix_clock`` Unix seconds."""

    settings: SharedSettings
    store: Store


@dataclass(frozen=True)
class TaskShared(_Common):
    """By the parts of one task."""

    task: Task
    store: TaskStore

    @classmethod
    def of(cls, shared: _Common, task: Task, store: TaskStore) -> TaskShared:
        """What a task's parts share with all others, and among each other."""
        common = {name: getattr(shared, name) for name in _Common.__dataclass_fields__}
        return cls(**common, task=task, store=store)
