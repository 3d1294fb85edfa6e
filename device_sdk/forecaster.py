"""Predictions of the task's model as this device last trained it, beside the running training."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from device_sdk.artifact.errors import ArtifactError
from device_sdk.errors import NothingLearnt
from device_sdk.world import DeviceWorld

if TYPE_CHECKING:
    from device_sdk.trainer import Trainer


class Forecaster:
    """A session of its own, so that any thread may predict while a round is trained.

    The model is read from the disk once per round, on the first request after it.
    """

    def __init__(self, world: DeviceWorld) -> None:
        self._world = world
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
        models, task = self._world.home.models, self._world.membership.task
        mark = models.model_mark(task)
        if self._trainer is not None and mark == self._mark:
            return self._trainer
        model = models.model(task)
        if model is None or model.artifact_id is None:
            raise NothingLearnt(
                "no model to predict with: no round has been trained here yet, or the task's "
                "method makes recommendations instead (Device.recommend)"
            )
        # Loaded here, as recording and recommending do without onnxruntime.
        from device_sdk.train.arrays import load_model_arrays
        from device_sdk.trainer import Trainer

        if self._trainer is None or self._artifact_id != model.artifact_id:
            if not self._world.has_artifact(model.artifact_id):
                raise ArtifactError(
                    f"the artifact {model.artifact_id.hex()[:12]} was changed in this device's "
                    "home since it came, or is not there; it comes again with the next round"
                )
            self._trainer = Trainer(
                self._world.artifact_folder(model.artifact_id),
                providers=self._world.options.providers,
            )
            self._artifact_id = model.artifact_id
        load_model_arrays(self._trainer, model.arrays)
        self._mark = (model.generation, model.round, model.version)
        return self._trainer
