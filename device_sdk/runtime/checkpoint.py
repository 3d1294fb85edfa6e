"""A trainer's state in one file: safetensors, with the artifact's id and a checksum over it all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from device_sdk.artifact import safetensors
from device_sdk.artifact.errors import ArtifactError
from device_sdk.errors import CheckpointError
from device_sdk.system.files import write_atomically

_FORMAT = "tessera-checkpoint-1"
_BLANK = "0" * 64
MAX_CHECKPOINT_BYTES = 2**33


@dataclass(frozen=True)
class Checkpoint:
    """State tensors by name, the id of their artifact, and the run's seed."""

    artifact: str
    seed: int
    state: Mapping[str, safetensors.Array]


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write the file; a crash in the middle leaves the old one."""
    write_atomically(path, encode_checkpoint(checkpoint))


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file. Raises CheckpointError when it is damaged, OSError when it cannot be read."""
    size = Path(path).stat().st_size
    if size > MAX_CHECKPOINT_BYTES:
        raise CheckpointError(f"{path} has {size} bytes: that is no checkpoint")
    try:
        return decode_checkpoint(Path(path).read_bytes())
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The file's bytes. The checksum covers everything, with zeros in its own place."""
    data = safetensors.encode(
        checkpoint.state,
        {
            "format": _FORMAT,
            "sha256": _BLANK,
            "artifact": checkpoint.artifact,
            "seed": str(checkpoint.seed),
        },
    )
    digest = hashlib.sha256(data).hexdigest().encode("ascii")
    return data.replace(_BLANK.encode("ascii"), digest, 1)


def decode_checkpoint(data: bytes) -> Checkpoint:
    """Read a file's bytes. Raises CheckpointError for anything but what was written."""
    try:
        decoded = safetensors.decode(data)
    except ArtifactError as error:
        raise CheckpointError(f"not a checkpoint, or damaged: {error}") from None
    metadata = decoded.metadata
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"not a checkpoint of format {_FORMAT}")
    digest = metadata.get("sha256", "")
    blank = data.replace(digest.encode("utf-8"), _BLANK.encode("ascii"), 1) if digest else data
    if hashlib.sha256(blank).hexdigest() != digest:
        raise CheckpointError("damaged: its SHA-256 does not match its contents")
    try:
        return Checkpoint(metadata["artifact"], int(metadata["seed"]), decoded.tensors)
    except (KeyError, ValueError):
        raise CheckpointError("its artifact's id or seed is missing") from None
