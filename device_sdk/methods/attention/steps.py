"""One round's steps of an attention learner: base steps, and meta-steps between them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact.flat_layout import layout_of
from device_sdk.local_data import LocalData
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.attention.mixer import Mixer
from device_sdk.methods.local_steps import ProximalTerm, SampleStream
from device_sdk.trainer import Trainer

Floats = NDArray[np.float32]
Samples = dict[str, NDArray[Any]]


class RoundSteps:
    """Trains the base network in ``trainer`` for one round, its optimizer as at its first step.

    Args:
        data: at least one sample for each fold.
        rng: orders the samples.
    """

    def __init__(
        self,
        trainer: Trainer,
        training: AttentionTraining,
        round_id: int,
        data: LocalData,
        rng: np.random.Generator,
    ) -> None:
        self._trainer = trainer
        self._layout = layout_of(trainer.artifact)
        self._training = training
        self._held_fold = round_id % training.folds
        self._data = data
        self._rng = rng

    def base_steps(self, start: Floats, resume: Floats | None = None) -> float:
        """Base steps on all samples; their mean loss.

        ``start``, float32 [p], is where the proximal term pulls to, and where the steps begin
        unless there is another place to ``resume`` from.
        """
        pull = self._begin(start)
        if resume is not None:
            self._trainer.set_parameters(self._layout.unflatten(resume))
        stream = self._stream(np.arange(self._data.samples), self._training.batch_size)
        return self._steps(stream, self._training.base_steps, pull) / self._training.base_steps

    def alternate(self, mixer: Mixer) -> float:
        """Meta-steps on one fold, base steps on the others, by turns; the mean base loss."""
        training = self._training
        base, held = _folds(self._data.samples, training.folds, self._held_fold)
        meta = self._stream(held, training.meta_batch_size)
        stream = self._stream(base, training.batch_size)
        drift = np.zeros(self._layout.size, dtype=np.float32)
        pull: ProximalTerm | None = None
        total, left = 0.0, training.base_steps
        while left:
            mixer.step(meta.draw(), drift)
            mixed = mixer.mix()
            if pull is None:
                pull = self._begin(mixed)
            else:
                self._trainer.set_parameters(self._layout.unflatten(mixed + drift))
            steps = min(left, training.meta_every)
            if steps == left:
                # No meta-step comes after these, so the held fold may be trained on as well.
                stream = self._stream(np.arange(self._data.samples), training.batch_size)
            total += self._steps(stream, steps, pull)
            drift = self._layout.flatten(self._trainer.parameters) - mixed
            left -= steps
        return total / training.base_steps

    def _begin(self, start: Floats) -> ProximalTerm:
        """Puts the base network at ``start``, with its optimizer as new."""
        kinds = {tensor.name: tensor.kind for tensor in self._trainer.artifact.state}
        fresh = {
            name: np.zeros_like(array)
            for name, array in self._trainer.state.items()
            if kinds[name] in ("optimizer", "counter")
        }
        self._trainer.set_state(fresh)
        self._trainer.set_parameters(self._layout.unflatten(start))
        return ProximalTerm(self._trainer, self._training.proximal, self._training.learning_rate)

    def _steps(self, stream: _Rows, count: int, pull: ProximalTerm) -> float:
        """The sum of their losses."""
        total = 0.0
        for _ in range(count):
            total += self._trainer.step(stream.draw(), hyper=pull.hyper)
            if pull.after_step is not None:
                pull.after_step()
        return total

    def _stream(self, rows: NDArray[np.int64], batch_size: int) -> _Rows:
        return _Rows(self._data, rows, batch_size, self._rng)


class _Rows:
    """A stream of batches from some rows of the local samples, which are not copied for it."""

    def __init__(
        self, data: LocalData, rows: NDArray[np.int64], batch_size: int, rng: np.random.Generator
    ) -> None:
        self._train = data.train
        self._stream = SampleStream({"rows": rows}, batch_size, rng)

    def draw(self) -> Samples:
        """The next batch; see :class:`~device_sdk.methods.local_steps.SampleStream`."""
        rows = self._stream.draw()["rows"]
        return {name: array[rows] for name, array in self._train.items()}


def _folds(samples: int, folds: int, held: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of all samples but the held fold's, and that fold's: contiguous, as windows overlap."""
    bounds = np.linspace(0, samples, folds + 1).astype(np.int64)
    inside = np.arange(bounds[held], bounds[held + 1])
    return np.delete(np.arange(samples), inside), inside
