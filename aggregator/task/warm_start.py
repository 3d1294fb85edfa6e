"""What a task's model begins with, where it is not made anew: a file, or another version."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aggregator.errors import AggregatorError
from aggregator.guard import GuardedMethod
from aggregator.methods.method import Arrays, Method, ModelMismatch
from aggregator.store import Store, TaskStore
from aggregator.store.versions import Ranking
from device_sdk.artifact import ArtifactError, safetensors
from device_sdk.wire.codec.message import decode
from device_sdk.wire.publish.catalogue import Catalogue

ITEM_IDS = "items"
"""Metadata of a model's file: a JSON list of the items' ids, one for each row of ``items``."""

_VERSION = re.compile(
    r"((?P<said>task:)?(?P<task>[a-z0-9._-]{1,64})@)?(?P<version>best|latest|[0-9]{1,18})"
)
_ROWS = "items"


@dataclass(frozen=True, slots=True)
class WarmStart:
    """``said``: as the operator has it; a ``file``, or a ``task`` of this home (empty: the one that
    begins) and its ``version``."""

    said: str
    file: Path | None = None
    task: str = ""
    version: str = ""

    @classmethod
    def read(cls, said: str, folder: Path, *, own: bool = False) -> WarmStart:
        """``task:NAME@best``, ``task:NAME@12``, or a file's path. Raises ValueError.

        ``own``: ``NAME@best`` will do, and ``best`` alone is a version of the task that begins.
        """
        match = _VERSION.fullmatch(said)
        if match is not None and (own or match["said"]):
            return cls(said, None, match["task"] or "", match["version"])
        if said.startswith("task:"):
            raise ValueError("expected task:NAME@best, @latest or a version's number")
        return cls(said, folder / said)

    def begin(
        self,
        method: Method | GuardedMethod,
        store: TaskStore | None,
        ranking: Ranking | None,
        item_ids: tuple[str, ...],
    ) -> None:
        """Let a method at version 0 begin with it. Raises AggregatorError.

        ``store``: None where there is no home, and only a file will do.
        """
        try:
            method.begin_with(self.model(method, store, ranking, item_ids))
        except ModelMismatch as error:
            raise AggregatorError(
                f"task.warm_start: {self.said!r} does not fit this task's model: {error}"
            ) from None
        except AggregatorError as error:
            raise AggregatorError(f"task.warm_start: {error}") from None

    def model(
        self,
        method: Method | GuardedMethod,
        store: TaskStore | None,
        ranking: Ranking | None,
        item_ids: tuple[str, ...],
    ) -> Arrays:
        """Its arrays, for a method that is at version 0. ``item_ids``: of the method's own rows.

        Where the source's rows have ids, each vector goes to the row of its id, and items that it
        has none for keep the vector that they were drawn. Raises AggregatorError, and
        ModelMismatch.
        """
        if self.file is not None:
            model, ids = _read_file(self.file)
        elif store is None:
            raise AggregatorError(
                f"{self.said!r} is a version of a home's task, and there is no home: write it to a "
                "file with tessera-aggregator model, and name that"
            )
        else:
            model, ids = self._version_of(store, ranking)
        if ids and item_ids:
            return _by_id(model, ids, method.model_arrays or {}, item_ids)
        return model

    def _version_of(
        self, store: TaskStore, ranking: Ranking | None
    ) -> tuple[Arrays, tuple[str, ...]]:
        source = self._source(store.fleet) if self.task else store
        try:
            found = source.versions.named(self.version, ranking)
            model = source.versions.model(found.version)
        except AggregatorError as error:
            raise AggregatorError(
                f"task {self.task}: {error}" if self.task else str(error)
            ) from None
        return model, item_ids(source, found.items)

    def _source(self, fleet: Store) -> TaskStore:
        row = fleet.tasks.named(self.task)
        if row is None or row.state == "retired":
            known = ", ".join(each.name for each in fleet.tasks.all() if each.name is not None)
            raise AggregatorError(f"this home has no task {self.task!r}; it has {known}")
        return fleet.task(row.number)


def _read_file(path: Path) -> tuple[Arrays, tuple[str, ...]]:
    try:
        found = safetensors.decode(path.read_bytes())
    except OSError as error:
        raise AggregatorError(f"{path} cannot be read: {error.strerror}") from None
    except ArtifactError as error:
        raise AggregatorError(f"{path} is no model that can be read: {error}") from None
    return found.tensors, _item_ids(path, found.metadata.get(ITEM_IDS, "[]"))


def _item_ids(path: Path, said: str) -> tuple[str, ...]:
    try:
        ids = json.loads(said)
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
        raise AggregatorError(f"the metadata {ITEM_IDS!r} of {path} is no JSON list of items' ids")
    return tuple(ids)


def _by_id(model: Arrays, ids: tuple[str, ...], own: Arrays, item_ids: tuple[str, ...]) -> Arrays:
    """The model with its ``items`` in the order of ``item_ids``."""
    given, drawn = model.get(_ROWS), own.get(_ROWS)
    if given is None or drawn is None or given.shape[1:] != drawn.shape[1:]:
        return model  # the method says what is wrong
    if len(ids) != len(given):
        raise ModelMismatch(f"{len(ids)} ids are given for {len(given)} vectors")
    place = {item: row for row, item in enumerate(ids)}
    known = [row for row, item in enumerate(item_ids) if item in place]
    if not known:
        raise ModelMismatch("none of its items is in the task's catalogue")
    rows = np.array(drawn, dtype=np.float32)
    rows[known] = given[[place[item_ids[row]] for row in known]]
    return {**model, _ROWS: rows}


def item_ids(store: TaskStore, count: int) -> tuple[str, ...]:
    """Of the first rows of a task's models: its catalogue only ever grows at its end."""
    catalogue = store.facts.catalogue
    return () if catalogue is None else decode(Catalogue, catalogue).items[:count]
