"""Predictions of the task's model as this device last trained it, beside the running training."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from device_sdk.errors import NothingLearnt
from device_sdk.home.home import Home

if TYPE_CHECKING:
    from device_sdk.trainer import Trainer


class Forecaster:
    """A session of its own, so that any thread may predict while a round is trained.

    The model is read from the disk once per round, on the first request after it. ``installed``:
    folders of artifacts that came with the installation, by id.
    """

    def __init__(self, home: Home, task: str, installed: Mapping[bytes, Path]) -> None:
        self._home = home
        self._task = task
        self._installed = installed
        self._lock = threading.Lock()
        self._mark: tuple[int, int, int] | None = None
        self._artifact_id = b""
        self._trainer: Trainer | None = None

    def predict(self, batch: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Outputs of the artifact's inference graph. Raises :class:`NothingLearnt`, and what
        :meth:`device_sdk.trainer.Trainer.predict` does."""
        with self._lock:
            return self._loaded().predict(batch)

    def _loaded(self) -> Trainer:
        mark = self._home.models.model_mark(self._task)
        if self._trainer is not None and mark == self._mark:
            return self._trainer
        model = self._home.models.model(self._task)
        if model is None or model.artifact_id is None:
            raise NothingLearnt(
                "no model to predict with: no round has been trained here yet, or the task's "
                "method makes recommendations instead (Device.recommend)"
            )
        # Loaded here, as recording and recommending do without onnxruntime.
        from device_sdk.train.arrays import load_model_arrays
        from device_sdk.trainer import Trainer

        if self._trainer is None or self._artifact_id != model.artifact_id:
            folder = self._installed.get(model.artifact_id)
            self._trainer = Trainer(folder or self._home.artifact_folder(model.artifact_id))
            self._artifact_id = model.artifact_id
        load_model_arrays(self._trainer, model.arrays)
        self._mark = (model.generation, model.round, model.version)
        return self._trainer
