"""The matrix factorisation artifact: where it lies and what its train step takes."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.manifest import Manifest
from device_sdk.errors import ArtifactError

Rows = NDArray[np.int64]
Floats = NDArray[np.float32]

USERS = "users.weight"
ITEMS = "items.weight"
_ENTRIES = frozenset(
    {"user", "positive", "negative", "weight", "offset"}
    | {"rate_users", "rate_items", "l2_users", "l2_items"}
)


def packaged_artifact() -> Path:
    """The folder of the artifact that is installed with the device. Raises ArtifactError."""
    folder = Path(str(importlib.resources.files("device_sdk"))) / "artifacts" / "mf"
    if not folder.is_dir():
        raise ArtifactError(
            f"this installation has no {folder}: make the artifact with "
            "`tessera-export mf -o DIR` and pass DIR with --artifact"
        )
    return folder


def check_factorisation(manifest: Manifest) -> None:
    """Raises ArtifactError for an artifact that is not a matrix factorisation."""
    parameters = {
        member.name: member.shape
        for tensor in manifest.state
        if tensor.kind == "parameter"
        for member in tensor.members
    }
    entries = {port.of for port in manifest.graphs["train"].select("batch")}
    expected = {USERS: ("users", "k"), ITEMS: ("items", "k")}
    if parameters != expected or entries != _ENTRIES:
        raise ArtifactError(
            f"artifact {manifest.name!r} is no matrix factorisation: expected the parameters "
            f"{USERS} [users, k] and {ITEMS} [items, k] and the batch entries "
            f"{', '.join(sorted(_ENTRIES))}, as `tessera-export mf` makes them"
        )


def triple_batch(
    user: Rows,
    positive: Rows,
    negative: Rows,
    *,
    rate_users: float,
    rate_items: float,
    l2_users: float = 0.0,
    l2_items: float = 0.0,
) -> dict[str, NDArray[np.generic]]:
    """One train step's batch: all triples weigh 1, no score is added.

    `user`, `positive`, `negative` are int64 [triples]; the rates multiply the summed gradient of
    each matrix; the l2 factors apply per triple.
    """
    count = len(user)
    return {
        "user": user,
        "positive": positive,
        "negative": negative,
        "weight": np.ones(count, np.float32),
        "offset": np.zeros(count, np.float32),
        "rate_users": np.asarray(rate_users, np.float32),
        "rate_items": np.asarray(rate_items, np.float32),
        "l2_users": np.asarray(l2_users, np.float32),
        "l2_items": np.asarray(l2_items, np.float32),
    }
