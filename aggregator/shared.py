"""What the parts of a serving aggregator share, made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aggregator.keys.registry import Registry
from aggregator.refusals import Refusals
from aggregator.store import Store
from aggregator.task.file import Task
from device_sdk.wire.publish.topics import Topics
from device_sdk.wire.seal.keys import RandomBytes


@dataclass(frozen=True)
class Shared:
    """``clock`` gives monotonic seconds, ``unix_clock`` Unix seconds."""

    task: Task
    store: Store
    registry: Registry
    refusals: Refusals
    topics: Topics
    clock: Callable[[], float]
    unix_clock: Callable[[], float]
    random_bytes: RandomBytes
