"""The versions of a task's model: which there are, how good, kept for good, taken out as files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aggregator.errors import AggregatorError
from aggregator.evaluation import what_it_brings
from aggregator.home import AggregatorHome
from aggregator.models import Format, model_files
from aggregator.operate.health import Rollback
from aggregator.operate.names import ranking_of, readable_task_of, task_file_of
from aggregator.store import Store
from aggregator.store.evaluations import EvaluatedVersion
from aggregator.store.rows import TaskRow, VersionRow
from aggregator.store.versions import Ranking
from aggregator.task.evaluation import metric_of
from aggregator.task.warm_start import item_ids


@dataclass(frozen=True, slots=True)
class FleetVersions:
    """A task's versions, the newest first.

    Attributes:
        best: the number of the best one; None where nothing says which that is.
        ranking: by what they are compared; None: by nothing.
        rollback: what became of the version that was asked for last.
    """

    task: str
    versions: tuple[VersionRow, ...]
    best: int | None
    ranking: Ranking | None
    rollback: Rollback

    @classmethod
    def read(
        cls, home: AggregatorHome, store: Store, row: TaskRow, *, dropped: bool
    ) -> FleetVersions:
        """``dropped``: also those whose models are kept no longer."""
        own, ranking = store.task(row.number), ranking_of(home, store, row)
        rows = own.versions.all() if dropped else own.versions.kept()
        best = own.versions.best(ranking)
        return cls(str(row.name), tuple(rows), best, ranking, Rollback.of(own))


@dataclass(frozen=True, slots=True)
class FleetEvaluations:
    """What devices found out about a task's versions, the newest first.

    Attributes:
        metric: what the figures are of that count most; empty for none.
        best, ranking: as of :class:`FleetVersions`.
        control: whether some of the devices are to train a model alone.
        note: why there are none, or else what would tell what federation brings; empty for neither.
    """

    task: str
    versions: tuple[EvaluatedVersion, ...]
    metric: str
    best: int | None
    ranking: Ranking | None
    control: bool
    note: str

    @classmethod
    def read(cls, home: AggregatorHome, store: Store, row: TaskRow, count: int) -> FleetEvaluations:
        """The newest ``count``."""
        own, task = store.task(row.number), readable_task_of(home, store, row)
        ranking = None if task is None else task.ranking
        found, best = own.evaluations.latest(count), own.versions.best(ranking)
        control = task is not None and task.has_control
        if found:
            may = task is not None and task.may_have_control and not control
            told = any(what_it_brings(each.figures) for each in found)
            note = _NO_CONTROL if may and not told else ""
        elif task is not None and task.evaluation is not None:
            joined = sum(each.revoked_unix_seconds is None for each in store.devices.all())
            note = _none_yet(str(row.name), task.evaluation.least_devices, joined)
        else:
            note = (
                f"task {row.name} has no figures: its file has no table "
                "[evaluation] that can be read"
            )
        return cls(str(row.name), tuple(found), metric_of(ranking), best, ranking, control, note)


_NO_CONTROL = (
    "whether federation brings anything is not known: with control = 0.2 under [evaluation], say, "
    "a fifth of the devices trains a second model alone, to compare with"
)


def _none_yet(name: str, least: int, joined: int) -> str:
    fewer = (
        f"; only {joined} have joined: least_devices = {joined} under [evaluation] shows figures "
        "of as few, which say what single devices found"
    )
    return (
        f"task {name}: no version has a figure yet. A round that makes the next version makes "
        f"those of the one that it began with, where {least} devices (evaluation.least_devices) "
        f"have evaluated it{fewer if 0 < joined < least else ''}"
    )


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A version's model. ``files``: by what comes before their suffix; mostly one, under the empty
    name."""

    task: str
    version: int
    form: Format
    files: Mapping[str, bytes]


def model_of(
    home: AggregatorHome, store: Store, row: TaskRow, version: str, form: Format
) -> ModelFiles:
    """``version``: "best", "latest" or a number. Raises AggregatorError."""
    task, own = task_file_of(home, store, row), store.task(row.number)
    found = own.versions.named(version, task.ranking)
    model, ids = own.versions.model(found.version), item_ids(own, found.items)
    files = model_files(form, task, found, model, ids)
    return ModelFiles(task.name, found.version, form, files)


def pin(store: Store, row: TaskRow, version: int) -> None:
    """Keep a version's model for good. Raises AggregatorError."""
    versions = store.task(row.number).versions
    with store.database.transaction():
        versions.pin(versions.named(str(version), None).version, pinned=True)


def unpin(store: Store, row: TaskRow, version: int) -> None:
    """No longer. Raises AggregatorError."""
    versions = store.task(row.number).versions
    with store.database.transaction():
        found = versions.find(version)
        if found is None or not found.pinned:
            raise AggregatorError(f"version {version} is not pinned")
        versions.pin(version, pinned=False)


def stay(store: Store, number: int) -> Rollback:
    """Leave out the version that waits to be gone back to, or what is said of it: what that was.
    Raises AggregatorError where there is none."""
    own = store.task(number)
    with store.database.transaction():
        seen = Rollback.of(own)
        if seen.version is None and seen.dropped is None:
            raise AggregatorError("no rollback waits for its turn")
        if own.versions.awaited() is None and seen.version is not None:
            store.tasks.change(number, request=None)
        own.versions.ask_for(None)
    return seen
