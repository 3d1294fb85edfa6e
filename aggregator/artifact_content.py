"""An artifact's folder, checked and packed for sending."""

from __future__ import annotations

import hashlib
from pathlib import Path

from aggregator.errors import AggregatorError
from aggregator.publisher import ArtifactContent
from device_sdk.artifact import MANIFEST_FILE, ArtifactError, load_artifact
from device_sdk.wire.artifact_bundle import pack_artifact

__all__ = ["read_artifact"]


def read_artifact(folder: Path) -> ArtifactContent:
    """Check an artifact as a device would, and pack it. Raises AggregatorError."""
    try:
        manifest = load_artifact(folder).manifest
        names = [MANIFEST_FILE, *manifest.files]
        files = {name: (folder / name).read_bytes() for name in names}
        content = pack_artifact(files)
    except (ArtifactError, OSError, ValueError) as error:
        raise AggregatorError(f"the artifact {folder} cannot be published: {error}") from None
    return ArtifactContent(hashlib.sha256(files[MANIFEST_FILE]).digest(), content)
