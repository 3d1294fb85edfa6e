"""A task begins anew with another artifact, method or server optimizer; its devices stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aggregator.errors import AggregatorError, StateMismatch
from aggregator.events import LogEvent
from aggregator.guard import GuardedBinding, GuardedMethod
from aggregator.methods.method import Arrays, ModelMismatch
from aggregator.store import Store, TaskStore
from aggregator.store.versions import MethodCheckpoint
from aggregator.task.artifacts import read_artifacts
from aggregator.task.file import Task, read_catalogue_file, served_catalogue, stored_catalogue
from aggregator.task.request import ReplaceRequest
from aggregator.task.warm_start import WarmStart
from device_sdk.methods.state import RestoreError
from device_sdk.wire.codec.message import decode, encode
from device_sdk.wire.publish.catalogue import Catalogue

_MOST_NAMED = 8
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What a new model has of another one, by name, with shapes.

    ``kept``: fits; ``anew``: the model has it, and the other not or (with the shape there) in
    another one; ``dropped``: only the other has it.
    """

    kept: Mapping[str, Shape]
    anew: Mapping[str, tuple[Shape, Shape | None]]
    dropped: Mapping[str, Shape]


@dataclass(frozen=True)
class Replacement:
    """What a task becomes, ready to be committed.

    ``same_model``: whether versions of before compare with those to come. ``inherits``: where it
    begins with another model.
    """

    task: Task
    method: GuardedMethod
    catalogue: bytes | None
    same_model: bool
    inherits: Inheritance | None = None


def plan(
    store: TaskStore, names: tuple[str, str], new: Task, warm_start: str | None
) -> Replacement:
    """Make the new method, and give it what fits. Raises AggregatorError; changes nothing.

    ``names``: task and cohort, as devices know it. ``warm_start``: as of
    :class:`~aggregator.task.request.ReplaceRequest`.
    """
    if (new.name, new.cohort) != names:
        raise AggregatorError(
            f"the file is of task {new.name!r} with cohort {new.cohort!r}; devices know this one "
            f"as {names[0]!r} with cohort {names[1]!r}: leave them, or add a task"
        )
    content = _catalogue(store, new)
    items: tuple[str, ...] = ()
    if content is not None and new.catalogue is not None:
        items = decode(Catalogue, content).items
    method = _built(store.fleet, new, len(items))
    version = store.checkpoints.get("version")
    inherits = None
    if warm_start is not None:
        start = WarmStart.read(warm_start, Path.cwd(), own=True)
        try:
            model = start.model(method, store, new.ranking, items)
            inherits = _give(method, model)
        except (ModelMismatch, AggregatorError) as error:
            raise AggregatorError(f"--warm-start {start.said}: {error}") from None
    method.begin_at(0 if version is None else version.version + 1)
    return Replacement(new, method, content, _is_same_model(store, new, method), inherits)


def commit(store: TaskStore, replacement: Replacement, now_unix_seconds: int) -> int:
    """Put it in the place of what there was, in one transaction; updates that were in no version.

    A new generation: devices take rounds of it whatever they saw of the one before.
    """
    task = replacement.task
    latest = store.rounds.latest()
    dropped = store.log.waiting() + store.shares.summed()
    with store.database.transaction():
        if latest and latest[0].unfinished:
            store.rounds.give_up(latest[0].round, now_unix_seconds)
        store.log.clear()
        store.shares.clear()
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
        facts.made_with = GuardedBinding(task.binding).made_with
        facts.catalogue = replacement.catalogue
        facts.unpublished, facts.failed = None, False
        facts.replaced_at, facts.stopped_at = replacement.method.version, None
        facts.dropped_rollback = None
        if not replacement.same_model:
            facts.judged_from = replacement.method.version
            store.versions.drop_request("the task was replaced by another model before its turn")
        facts.evaluated_from = replacement.method.version
        store.evaluations.forget(replacement.method.version)
        tasks = store.fleet.tasks
        before = tasks.find(store.number).served
        if before is not None:
            facts.keep_file(replacement.method.version, before)
        tasks.change(store.number, unwritten=task.text)
        tasks.change(store.number, served=task.text)
        tasks.change(store.number, request=None)
        tasks.change(store.number, problem=None)
    return dropped


def replace_task(
    store: TaskStore,
    names: tuple[str, str],
    new: Task,
    request: ReplaceRequest,
    now_unix_seconds: int,
) -> None:
    """Plan and commit; ``names`` as in :func:`plan`. Raises AggregatorError, and then nothing has
    changed."""
    replacement = plan(store, names, new, request.warm_start)
    dropped = commit(store, replacement, now_unix_seconds)
    if dropped:
        LogEvent.UPDATES_DROPPED.log(count=dropped)
    if replacement.inherits is not None and replacement.inherits.anew:
        LogEvent.PARAMETERS_ANEW.log(problem=begins_anew(replacement.inherits))


def begins_anew(inherits: Inheritance) -> str:
    """Says which parameters the other model did not have in this shape."""
    names = sorted(inherits.anew)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"the model before has nothing that fits {', '.join(names[:_MOST_NAMED])}{more}"


def buildable(store: Store, task: Task) -> None:
    """Raises AggregatorError for artifacts or settings that no model can be made of."""
    items = 0 if task.catalogue is None else len(read_catalogue_file(task.catalogue))
    _built(store, task, items)


def fits(store: TaskStore, task: Task) -> bool:
    """Whether a task's stored state goes on with these settings."""
    try:
        require_fits(store, task)
    except AggregatorError:
        return False
    return True


def require_fits(store: TaskStore, task: Task) -> None:
    """Raises AggregatorError where a task's stored state does not go on with these settings."""
    version, known = store.checkpoints.get("version"), served_catalogue(store, task)
    if version is None:
        return
    try:
        _built(store.fleet, task, 0 if known is None else len(known)).restore(version.state)
    except RestoreError as error:
        raise StateMismatch.of(error) from None


def misfit(store: TaskStore, served: Task, version: int) -> str | None:
    """Why a version of a model that the task had before does not fit the present one; None where
    it does. ``served``: the task as it is."""
    if why := other_frozen(store, served, version):
        return why
    known = served_catalogue(store, served)
    method = _built(store.fleet, served, 0 if known is None else len(known))
    try:
        method.adopt(store.versions.model(version))
    except ModelMismatch as error:
        return str(error)
    return None


def other_frozen(store: TaskStore, task: Task, version: int) -> str | None:
    """Why a version is none of the task's artifact's, where that has frozen values: of these a
    version holds none, and with others it is a model that nobody trained. None where it may be."""
    row = store.versions.find(version)
    manifest = read_artifacts(task)[-1].artifact.manifest if task.artifacts else None
    if row is None or manifest is None or manifest.id == row.artifact:
        return None
    frozen = sorted(manifest.frozen_members)
    if not frozen:
        return None
    return (
        f"it was trained with the frozen values of the artifact {row.artifact[:16]}, and "
        f"{task.artifacts[-1]} is {manifest.id[:16]}, whose {frozen[0]!r} may be another"
    )


def _is_same_model(store: TaskStore, new: Task, method: GuardedMethod) -> bool:
    """Whether the new task's model is what the present version is one of: of the same method and
    artifact, with arrays of the same names that fit."""
    version = store.checkpoints.get("version")
    row = None if version is None else store.versions.find(version.version)
    arrays = method.model_arrays
    if row is None or not row.kept or arrays is None or store.facts.label != new.label:
        return False
    before = store.versions.model(row.version)
    artifact = read_artifacts(new)[-1].artifact.manifest.id if new.artifacts else ""
    fit = before.keys() == arrays.keys() and all(method.fits(*each) for each in before.items())
    return fit and row.artifact == artifact


def _catalogue(store: TaskStore, new: Task) -> bytes | None:
    known = stored_catalogue(store)
    if new.catalogue is None:
        return None if known is None else encode(known)
    found = read_catalogue_file(new.catalogue)
    if known is None:
        return encode(found)
    if not found.extends(known):
        raise AggregatorError(
            f"the catalogue {new.catalogue} does not begin with the {len(known)} items that the "
            "task has, or had: devices and kept versions know them by their rows. Append to it, or "
            "add a task"
        )
    # What was appended is taken in before the next round, as always.
    return encode(known)


def _built(fleet: Store, task: Task, items: int) -> GuardedMethod:
    rng = np.random.default_rng([fleet.facts.seed, 0])
    artifacts = read_artifacts(task)
    try:
        parameters = tuple(each.artifact for each in artifacts)
        return GuardedBinding(task.binding).build(items, rng, parameters)
    except ValueError as error:
        raise AggregatorError(
            f"the task's artifacts do not suit {task.binding.method_name}: {error}"
        ) from None


def _give(method: GuardedMethod, before: Arrays) -> Inheritance:
    derived = method.derived
    wanted: dict[str, Any] = {
        name: array for name, array in (method.model_arrays or {}).items() if name not in derived
    }
    before = {name: array for name, array in before.items() if name not in derived}
    kept = {
        name: array for name, array in before.items() if name in wanted and method.fits(name, array)
    }
    if not kept:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in before.items())
        expected = ", ".join(f"{name} {list(array.shape)}" for name, array in wanted.items())
        raise AggregatorError(
            f"nothing of it fits: it has {shapes or 'nothing'}; the new model has "
            f"{expected or 'nothing'}. Leave --warm-start out, or choose what fits"
        )
    method.begin_with({**wanted, **kept})
    there = {name: array.shape for name, array in before.items()}
    return Inheritance(
        {name: array.shape for name, array in kept.items()},
        {
            name: (array.shape, there.get(name))
            for name, array in wanted.items()
            if name not in kept
        },
        {name: shape for name, shape in there.items() if name not in wanted},
    )
