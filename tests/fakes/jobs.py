"""Rounds that a device trains without a broker: a manifest and terms around a broadcast."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from device_sdk.artifact import MANIFEST_FILE
from device_sdk.train.job import LocalArtifact, TrainingJob
from device_sdk.wire.arrays.exchange import Broadcast
from device_sdk.wire.publish.manifest import RoundManifest
from device_sdk.wire.publish.task_messages import OfferedArtifact, TaskTerms

_ZEROS = bytes(32)


def artifact_in(folder: Path, name: str = "", companion: Path | None = None) -> LocalArtifact:
    """What lies in a folder, under the folder's name unless another is given."""
    digest = hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).digest()
    return LocalArtifact(digest, name or folder.name, folder, companion)


def job_of(
    broadcast: Broadcast,
    artifacts: Sequence[LocalArtifact],
    method: str = "fedavg",
    train_seconds: float = 60.0,
    **terms: Any,
) -> TrainingJob:
    """The round of a broadcast, of the task ``t``."""
    manifest = RoundManifest(
        bytes(16), "t", "all", 1, broadcast.round_id, broadcast.version, artifacts[0].artifact_id,
        _ZEROS, _ZEROS, 1, _ZEROS, 1, 5, 5, "float32", 0, (),
    )  # fmt: skip
    offered = tuple(OfferedArtifact(each.artifact_id, each.name, 9) for each in artifacts)
    of = TaskTerms(method, "float32", train_seconds, offered, **terms)
    return TrainingJob(manifest, of, broadcast, None, tuple(artifacts))
