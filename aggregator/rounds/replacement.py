"""A task begins anew with another artifact, method or server optimizer; its devices stay."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from aggregator.errors import AggregatorError
from aggregator.methods.method import Method
from aggregator.methods.model import Arrays, ModelMismatch
from aggregator.store import Store, TaskStore
from aggregator.store.checkpoints import MethodCheckpoint
from aggregator.task.artifacts import read_artifacts
from aggregator.task.file import Task, read_catalogue_file, served_catalogue, stored_catalogue
from aggregator.task.request import Request
from device_sdk.artifact import read_manifest
from device_sdk.methods.state import RestoreError

_LOG = logging.getLogger(__name__)
_MOST_NAMED = 8


@dataclass(frozen=True)
class Replacement:
    """What a task becomes, ready to be committed.

    ``same_model``: whether versions of before compare with those to come. ``fresh``: names of the
    parameters that the model before did not have in this shape, where it was to begin with them.
    """

    task: Task
    method: Method
    catalogue: bytes | None
    same_model: bool
    fresh: tuple[str, ...] = ()


def plan(store: TaskStore, old: Task, new: Task, *, warm_start: bool) -> Replacement:
    """Make the new method, and give it what fits. Raises AggregatorError; changes nothing."""
    if (new.name, new.cohort) != (old.name, old.cohort):
        raise AggregatorError(
            f"the file is of task {new.name!r} with cohort {new.cohort!r}; devices know this one "
            f"as {old.name!r} with cohort {old.cohort!r}: leave them, or add a task"
        )
    catalogue, items = _catalogue(store, new)
    method = _built(store.fleet, new, items)
    version = store.checkpoints.get("version")
    fresh: tuple[str, ...] = ()
    if warm_start:
        fresh = _give(method, _model_of(store, old))
    method.begin_at(0 if version is None else version.version + 1)
    return Replacement(new, method, catalogue, _is_same_model(store, new, method), fresh)


def commit(store: TaskStore, replacement: Replacement, now_unix_seconds: int) -> int:
    """Put it in the place of what there was, in one transaction; updates that were in no version.

    A new generation: devices take rounds of it whatever they saw of the one before.
    """
    task = replacement.task
    latest = store.rounds.latest()
    dropped = sum(1 for _ in store.log.after(0))
    with store.database.transaction():
        if latest and latest[0].closed_unix_seconds is None:
            store.rounds.give_up(latest[0].round, now_unix_seconds)
        store.log.clear()
        store.checkpoints.put(
            MethodCheckpoint(
                "version",
                latest[0].round if latest else 0,
                0,
                replacement.method.version,
                replacement.method.state(),
            )
        )
        facts = store.facts
        facts.own_generation = max(now_unix_seconds, facts.generation + 1)
        facts.label = task.label
        facts.catalogue = replacement.catalogue
        facts.unpublished = None
        facts.replaced_at, facts.stopped_at = replacement.method.version, None
        facts.dropped_rollback = None
        if not replacement.same_model:
            facts.judged_from = replacement.method.version
            store.versions.drop_request("the task was replaced by another model before its turn")
        store.evaluations.forget(replacement.method.version)
        tasks = store.fleet.tasks
        tasks.set_unwritten(store.number, task.text)
        tasks.set_served(store.number, task.text)
        tasks.set_request(store.number, None)
        tasks.set_problem(store.number, None)
    return dropped


def replace_task(
    store: TaskStore, old: Task, new: Task, request: Request, now_unix_seconds: int
) -> None:
    """Plan and commit. Raises AggregatorError, and then nothing has changed."""
    replacement = plan(store, old, new, warm_start=request.warm_start)
    dropped = commit(store, replacement, now_unix_seconds)
    if dropped:
        _LOG.warning(
            "%d updates that were counted are part of no version: they were made for the model "
            "that was replaced",
            dropped,
        )
    if replacement.fresh:
        _LOG.warning("%s", begins_anew(replacement.fresh))


def begins_anew(fresh: tuple[str, ...]) -> str:
    """Says which parameters the model before did not have in this shape."""
    more = f" and {len(fresh) - _MOST_NAMED} more" if len(fresh) > _MOST_NAMED else ""
    return f"the model before has nothing that fits {', '.join(fresh[:_MOST_NAMED])}{more}"


def buildable(store: Store, task: Task) -> None:
    """Raises AggregatorError for artifacts or settings that no model can be made of."""
    items = 0 if task.catalogue is None else len(read_catalogue_file(task.catalogue))
    _built(store, task, items)


def fits(store: TaskStore, task: Task) -> bool:
    """Whether a task's stored state goes on with these settings."""
    version, known = store.checkpoints.get("version"), served_catalogue(store, task)
    if version is None:
        return True
    try:
        _built(store.fleet, task, 0 if known is None else len(known)).restore(version.state)
    except (AggregatorError, RestoreError):
        return False
    return True


def require_return(store: TaskStore, served: Task, version: int) -> None:
    """Raises AggregatorError where a version of a model that the task had before does not fit the
    present one, so that it cannot be gone back to. ``served``: the task as it is."""
    known = served_catalogue(store, served)
    method = _built(store.fleet, served, 0 if known is None else len(known))
    try:
        method.adopt(store.versions.model(version))
    except ModelMismatch as error:
        name = served.name
        raise AggregatorError(
            f"version {version} is of a model that task {name} had before version "
            f"{store.facts.judged_from}, and does not fit the present one: {error}. To go back to "
            f"that model as well, replace the task by its file of then (task replace {name} --from "
            "FILE), and go back after that; to have both, add a task with warm_start = "
            f'"task:{name}@{version}"'
        ) from None


def _is_same_model(store: TaskStore, new: Task, method: Method) -> bool:
    """Whether the new task's model is what the present version is one of: of the same method and
    artifact, with arrays of the same names and shapes."""
    version = store.checkpoints.get("version")
    row = None if version is None else store.versions.find(version.version)
    arrays = method.model_arrays
    if row is None or not row.kept or arrays is None or store.facts.label != new.label:
        return False
    before = store.versions.model(row.version)
    artifact = read_manifest(new.artifacts[-1]).id if new.artifacts else ""
    return row.artifact == artifact and _shapes(before) == _shapes(arrays)


def _shapes(model: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in model.items()}


def _catalogue(store: TaskStore, new: Task) -> tuple[bytes | None, int]:
    known = stored_catalogue(store)
    if new.catalogue is None:
        return None if known is None else known.to_bytes(), 0
    found = read_catalogue_file(new.catalogue)
    if known is None:
        return found.to_bytes(), len(found)
    if not found.extends(known):
        raise AggregatorError(
            f"the catalogue {new.catalogue} does not begin with the {len(known)} items that the "
            "task has, or had: devices and kept versions know them by their rows. Append to it, or "
            "add a task"
        )
    # What was appended is taken in before the next round, as always.
    return known.to_bytes(), len(known)


def _built(fleet: Store, task: Task, items: int) -> Method:
    rng = np.random.default_rng([fleet.facts.seed, 0])
    artifacts = read_artifacts(task.artifacts, task.companions)
    try:
        method: Method = task.binding.build(items, rng, tuple(each.artifact for each in artifacts))
    except ValueError as error:
        raise AggregatorError(
            f"the task's artifacts do not suit {task.binding.method_name}: {error}"
        ) from None
    return method


def _model_of(store: TaskStore, task: Task) -> Arrays:
    version = store.checkpoints.get("version")
    known = served_catalogue(store, task)
    if version is None:
        raise AggregatorError("there is no version yet to begin with: leave --warm-start out")
    method = _built(store.fleet, task, 0 if known is None else len(known))
    try:
        method.restore(version.state)
    except RestoreError as error:
        raise AggregatorError(
            f"the model before cannot be read with what its task file names ({error}): put its "
            "artifact back beside the new one, or leave --warm-start out"
        ) from None
    model = method.model_arrays
    if not model:
        raise AggregatorError(
            f"{task.binding.method_name} keeps no model at the aggregator that another could begin "
            "with: leave --warm-start out"
        )
    return model


def _give(method: Method, before: Arrays) -> tuple[str, ...]:
    wanted: dict[str, Any] = dict(method.model_arrays or {})
    fits = {
        name: array
        for name, array in before.items()
        if name in wanted and wanted[name].shape == array.shape
    }
    if not fits:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in before.items())
        expected = ", ".join(f"{name} {list(array.shape)}" for name, array in wanted.items())
        raise AggregatorError(
            f"nothing of the model before fits: it has {shapes or 'nothing'}; the new one has "
            f"{expected or 'nothing'}. Leave --warm-start out, or choose what fits"
        )
    try:
        method.begin_with({**wanted, **fits})
    except ModelMismatch as error:
        raise AggregatorError(f"the model before does not fit: {error}") from None
    return tuple(sorted(wanted.keys() - fits.keys()))
