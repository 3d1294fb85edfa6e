"""Each version's model, kept when it is made: the newest, the best and the pinned ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aggregator.methods.guard import GuardedMethod
from aggregator.store import TaskStore
from aggregator.store.versions import Ranking, VersionRow
from aggregator.task.file import ModelsSettings
from aggregator.task.request import ReplaceRequest
from aggregator.task.warm_start import WarmStart, item_ids
from device_sdk.artifact import Artifact

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class VersionKeeper:
    """What a task does with its versions; see :class:`~aggregator.store.versions.Versions`.

    ``artifacts``: the task's; a model is of the last one, which is the widest. ``unix_clock`` gives
    Unix seconds.
    """

    store: TaskStore
    settings: ModelsSettings
    ranking: Ranking | None
    warm_start: WarmStart | None
    artifacts: Sequence[Artifact]
    unix_clock: Callable[[], float]

    def begin(self, method: GuardedMethod, items: int) -> str:
        """Let a new task's method begin with what the task file says; where that is from, for
        people. Raises AggregatorError."""
        if self.warm_start is None:
            return ""
        self.warm_start.begin(method, self.store, self.ranking, item_ids(self.store, items))
        _LOG.info("the first version is %s", self.warm_start.said)
        return self.warm_start.said

    def knows(self, version: int) -> bool:
        """Whether a version was noted."""
        return self.store.versions.find(version) is not None

    def note(
        self,
        method: GuardedMethod,
        version: int,
        round_number: int,
        devices: int,
        items: int,
        origin: str = "",
    ) -> None:
        """A version that is committed, with vectors of so many items; inside its transaction. What
        single devices said of those before it is needed no more."""
        model = method.model_arrays
        row = VersionRow(
            version=version,
            round=round_number,
            closed_unix_seconds=self.unix_clock(),
            devices=devices,
            artifact=self.artifacts[-1].manifest.id if model and self.artifacts else "",
            origin=origin,
            bytes=0,
            metrics={},
            pinned=False,
            kept=model is not None,
            items=items,
        )
        versions, settings = self.store.versions, self.settings
        # First, so that the new model is written into the room that an old one leaves.
        last = settings.keep_last - (model is not None)
        request = self.store.fleet.tasks.find(self.store.number).request
        wanted = None if request is None else ReplaceRequest.read(request).version
        versions.prune(last, settings.keep_best, self.ranking, before=version, wanted=wanted)
        versions.add(row, model)
        self.store.evaluations.forget(version)
