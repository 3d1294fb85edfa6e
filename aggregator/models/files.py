"""A version's model as files that other programs read: safetensors, and plain ONNX graphs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aggregator.errors import AggregatorError
from aggregator.methods.method import Arrays
from aggregator.methods.scatter import ScatterBinding
from aggregator.models.factor_graphs import (
    newton,
    newton_graph,
    score_graph,
    solve_graph,
    solved,
)
from aggregator.store.versions import VersionRow
from aggregator.task.file import Task
from aggregator.task.warm_start import ITEM_IDS
from device_sdk.artifact import Artifact, ArtifactError, load_artifact, read_manifest, safetensors
from device_sdk.artifact.standalone import standalone_onnx
from device_sdk.methods.scatter.contract import SOLVE
from device_sdk.system.version import __version__

Format = Literal["safetensors", "onnx"]
_PRODUCER = ("tessera", __version__)
_USERS_TRIED = 5
_TOLERANCE = 1e-4
_MOVED = "running_"
"""What torch calls the buffers that training moves: batch norm's statistics."""


def model_files(
    form: Format, task: Task, row: VersionRow, model: Arrays, item_ids: tuple[str, ...]
) -> dict[str, bytes]:
    """Files by what comes before their suffix: mostly one, under the empty name.

    ``item_ids``: of the rows of ``items``. An ONNX file was run, and says what a device says.
    Raises AggregatorError where it does not, or cannot be made.
    """
    notes = _metadata(task.name, row, item_ids)
    if form == "safetensors":
        return {"": safetensors.encode({**_frozen(task, row), **model}, notes)}
    if bool(row.items) != task.binding.needs_catalogue:
        raise AggregatorError(
            f"version {row.version} is of another method, which task {task.name} had before it was "
            f"replaced by {task.binding.method_name}: take it as safetensors"
        )
    try:
        if isinstance(task.binding, ScatterBinding):
            return _factor_graphs(model, task.binding.settings.training.user_l2, notes)
        return {"": _standalone(task, row, model, notes)}
    except ImportError as error:
        raise AggregatorError(
            f"the ONNX file cannot be checked before it is written: {error}"
        ) from None
    except (ArtifactError, RuntimeError) as error:
        raise AggregatorError(f"version {row.version} as ONNX: {error}") from None


def _metadata(task: str, row: VersionRow, item_ids: tuple[str, ...]) -> dict[str, str]:
    known = {
        "task": task,
        "version": str(row.version),
        "round": str(row.round),
        "artifact": row.artifact,
        "producer": " ".join(_PRODUCER),
        ITEM_IDS: json.dumps(item_ids) if item_ids else "",
    }
    return {name: value for name, value in known.items() if value}


# Models of an artifact.


def _standalone(task: Task, row: VersionRow, model: Arrays, notes: Mapping[str, str]) -> bytes:
    from device_sdk.standalone_check import require_same_outputs

    folder = _folder(task, row)
    artifact = load_artifact(folder)
    whole = _whole(artifact, model)
    onnx = standalone_onnx(artifact, whole, producer=_PRODUCER, metadata=notes)
    require_same_outputs(folder, whole, onnx, np.random.default_rng(row.version))
    return onnx


def _frozen(task: Task, row: VersionRow) -> dict[str, NDArray[Any]]:
    """What no training moves of the artifact's model, where the task file still lists it: a version
    holds the rest."""
    for folder in task.artifacts:
        if read_manifest(folder).id == row.artifact:
            artifact = load_artifact(folder)
            frozen = artifact.manifest.frozen_members
            return {name: array for name, array in artifact.initial.items() if name in frozen}
    return {}


def _folder(task: Task, row: VersionRow) -> Path:
    for folder in task.artifacts:
        if read_manifest(folder).id == row.artifact:
            return folder
    raise AggregatorError(
        f"version {row.version} is of the artifact {row.artifact[:16]}..., which the task file "
        "does not list: name its folder there, or take the version as safetensors"
    )


def _whole(artifact: Artifact, model: Arrays) -> dict[str, NDArray[Any]]:
    """With the artifact's own values of buffers that no training moves, or no device shares."""
    kinds = {member.name: state.kind for state, member in artifact.manifest.members()}
    absent = [
        name
        for name, kind in kinds.items()
        if name not in model and (kind == "parameter" or name.rpartition(".")[2].startswith(_MOVED))
    ]
    if absent:
        raise AggregatorError(
            f"{', '.join(absent[:5])} stay on the devices, which share all but these: there is no "
            "whole model to predict with here. Take what is shared as safetensors; an app takes "
            "its device's own model out with Device.model()"
        )
    return {**artifact.initial, **model}


# Item factors.


def _factor_graphs(model: Arrays, user_l2: float, notes: Mapping[str, str]) -> dict[str, bytes]:
    """``user_l2``: of BPR, which names nothing beside its items."""
    from device_sdk.standalone_check import run_standalone

    items = model["items"]
    find: Callable[..., NDArray[Any]]
    if SOLVE in model:
        a0, l2 = model[SOLVE].tolist()
        find = partial(solved, unseen_weight=a0, l2=l2)
        folds = solve_graph(items, a0, l2, notes, _PRODUCER)
    else:
        find = partial(newton, user_l2=user_l2)
        folds = newton_graph(items, user_l2, notes, _PRODUCER)
    scores = score_graph(items, notes, _PRODUCER)
    rng = np.random.default_rng(len(items))
    for _ in range(_USERS_TRIED):
        liked = rng.choice(len(items), size=min(20, len(items) // 2 + 1), replace=False)
        user = run_standalone(folds, {"liked": liked})["user"]
        _require_close("a new user's vector", user[0], find(items, liked))
        given = {"user": user, "seen": np.empty((0, 2), np.int64), "count": np.ones(1, np.int64)}
        _require_close("scores", run_standalone(scores, given)["scores"][0], items @ user[0])
    return {"": scores, ".fold-in": folds}


def _require_close(what: str, found: NDArray[Any], wanted: NDArray[Any]) -> None:
    error = np.abs(found - wanted).max() / max(1e-6, float(np.abs(wanted).max()))
    if not error <= _TOLERANCE:
        raise ArtifactError(f"{what} of the graph and of NumPy differ by {error:.1e}")
