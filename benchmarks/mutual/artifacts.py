"""Exported image networks, kept between runs."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import export as exporter
from device_sdk import Trainer
from export.models.images import export_image, image_model
from export.models.mutual import export_mutual

_SHAPES = {"rmnist": (1, 28, 10), "pacs64": (3, 64, 7)}
# The paper's (section 4.1.1), decoupled from the gradient as in AdamW.
_LEARNING_RATE, _WEIGHT_DECAY = 1e-3, 1e-4

Kind = Literal["mutual", "plain"]


class ImageTask:
    """Channels, size and classes of a data set's images."""

    def __init__(self, data: str) -> None:
        self.channels, self.size, self.classes = _SHAPES[data]


class ArtifactCache:
    """Artifacts in ``folder``; a change of the exporter makes new ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _exporter_version()

    def trainer(self, data: str, model: str, kind: Kind, seed: int) -> Trainer:
        """A trainer with first weights of that seed; exports the artifact where it is missing."""
        task = ImageTask(data)
        trainer = Trainer(self._path(data, model, kind), providers="cpu", seed=seed)
        trainer.set_parameters(_first_weights(task, model, seed))
        return trainer

    def _path(self, data: str, model: str, kind: Kind) -> Path:
        path = self._folder / f"{data}-{model}-{kind}"
        if path.exists():
            return path
        task = ImageTask(data)
        optimizer = exporter.Adam(lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
        partial = path.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        write = export_mutual if kind == "mutual" else export_image
        # Verified by the exporter's own tests, for each of these networks.
        write(
            partial,
            model,
            channels=task.channels,
            size=task.size,
            classes=task.classes,
            optimizer=optimizer,
            verify=False,
        )
        partial.rename(path)
        return path


def _first_weights(task: ImageTask, model: str, seed: int) -> Mapping[str, NDArray[np.float32]]:
    network = image_model(
        model, channels=task.channels, size=task.size, classes=task.classes, seed=seed
    )
    return {name: tensor.detach().numpy() for name, tensor in network.named_parameters()}


def _exporter_version() -> str:
    digest = hashlib.sha256()
    root = Path(exporter.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
