"""What a trained round leaves on the disk, in one transaction, before anything is sent."""

from __future__ import annotations

import hashlib

from device_sdk.home.home import Home
from device_sdk.home.model_store import StoredModel
from device_sdk.home.round_store import OutboxRow, Outcome, Participation
from device_sdk.rounds.job import TrainedRound, TrainingJob
from device_sdk.wire.manifest import Manifest
from device_sdk.wire.messages import UpdateIdentity, update_digest
from device_sdk.wire.task_messages import BROADCAST_CODECS
from device_sdk.wire.tensors import Codec

__all__ = ["commit_round", "participation", "save_model"]


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
        home.models.save_learner(manifest.task, result.learner_state)
        save_model(home, job)
        if result.capability is not None:
            home.models.save_capability(result.capability)
        home.rounds.conclude(
            participation(manifest, Outcome.TRAINED, k=result.k, train_seconds=result.seconds)
        )
        home.rounds.post(row)
        home.membership.raise_time(largest_unix_seconds)
    return row


def save_model(home: Home, job: TrainingJob) -> None:
    """Keep the broadcast's arrays to recommend from, and drop catalogues of before."""
    manifest = job.manifest
    model = StoredModel(
        manifest.task,
        manifest.generation,
        manifest.round,
        manifest.version,
        manifest.catalogue_id,
        job.broadcast.tensors,
    )
    # float16 holds what came as float16 exactly; everything else needs all of float32.
    half = BROADCAST_CODECS[manifest.codec] is Codec.FLOAT16
    with home.database.transaction():
        home.models.save_model(model, Codec.FLOAT16 if half else Codec.FLOAT32)
        home.models.drop_catalogues(manifest.catalogue_id)


def participation(
    manifest: Manifest,
    outcome: Outcome,
    detail: str = "",
    k: int | None = None,
    train_seconds: float | None = None,
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
    )
