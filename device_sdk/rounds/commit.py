"""What a trained round leaves on the disk, in one transaction, before anything is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from device_sdk.home.home import Home
from device_sdk.home.model_store import StoredModel
from device_sdk.home.round_store import OutboxRow, Participation, RoundOutcome
from device_sdk.train.job import TrainedRound, TrainingJob
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.receipts import UpdateIdentity, update_digest


def commit_round(
    home: Home,
    device_id: bytes,
    job: TrainingJob,
    result: TrainedRound,
    largest_unix_seconds: int,
) -> OutboxRow:
    """Commit users' vectors, model, k, the part in the round and the update; returns the update.

    Raises ``sqlite3.Error``, and then nothing has changed.
    """
    manifest = job.manifest
    identity = UpdateIdentity(device_id, manifest.task, manifest.generation, manifest.round)
    digest = update_digest(identity, hashlib.sha256(result.body).digest())
    row = OutboxRow(digest, manifest.task, manifest.generation, manifest.round, result.body)
    with home.database.transaction():
        artifact_id = None if result.artifact is None else result.artifact.artifact_id
        home.models.save_learner(manifest.task, result.learner_state, artifact_id)
        save_model(home, job, result)
        if result.capability is not None:
            home.models.save_capability(result.capability)
        name = "" if result.artifact is None else result.artifact.name
        home.rounds.conclude(
            participation(
                manifest,
                RoundOutcome.TRAINED,
                k=result.k,
                train_seconds=result.seconds,
                artifact=name,
            )
        )
        home.rounds.post(row)
        home.membership.raise_time(largest_unix_seconds)
    return row


def save_model(home: Home, job: TrainingJob, result: TrainedRound | None = None) -> None:
    """Keep what to predict with (the training's model, else the broadcast's arrays), and drop
    catalogues of before."""
    manifest = job.manifest
    model = StoredModel(
        manifest.task,
        manifest.generation,
        manifest.round,
        manifest.version,
        manifest.catalogue_id,
        result.model if result is not None and result.model is not None else job.broadcast.tensors,
        result.artifact.artifact_id if result is not None and result.artifact is not None else None,
    )
    with home.database.transaction():
        home.models.save_model(model)
        home.models.drop_catalogues(manifest.catalogue_id)


def read_model(
    home: Home, job: TrainingJob, adopted: Mapping[str, NDArray[Any]] | None = None
) -> None:
    """The task rests: keep its last version, unless the device has a model of its own.

    ``adopted``: that version as a model of the device's artifact.
    """
    manifest = job.manifest
    stored = home.models.model(manifest.task)
    if stored is None or stored.artifact_id is None:
        save_model(home, job)
    elif adopted is not None:
        model = replace(
            stored,
            generation=manifest.generation,
            round=manifest.round,
            version=manifest.version,
            arrays=adopted,
        )
        home.models.save_model(model)


def participation(
    manifest: RoundManifest,
    outcome: RoundOutcome,
    detail: str = "",
    k: int | None = None,
    train_seconds: float | None = None,
    artifact: str = "",
) -> Participation:
    """How a round ended here, without a verdict yet."""
    return Participation(
        manifest.task,
        manifest.generation,
        manifest.round,
        manifest.version,
        outcome,
        detail,
        k,
        train_seconds,
        artifact=artifact,
    )
