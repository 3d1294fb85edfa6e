"""A trainer that notes what its steps come to, for a rehearsal."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from device_sdk.trainer import Trainer


class StepNotes(NamedTuple):
    """Steps; the loss of the first one's samples before and after them; whether any parameter has
    changed."""

    steps: int
    first: float
    last: float
    moved: bool


class NotingTrainer(Trainer):
    """As :class:`device_sdk.trainer.Trainer`, while it is ``noting`` also noting its steps."""

    def __init__(
        self, directory: str | os.PathLike[str], *, providers: str = "auto", threads: int = 1
    ) -> None:
        super().__init__(directory, providers=providers, threads=threads)
        self.begin_notes()

    def begin_notes(self) -> None:
        """Forget what was noted, and note from here on."""
        self.noting = True
        self._steps, self._first = 0, 0.0
        self._again: Callable[[], float] | None = None
        self.has_moved = False

    def step(
        self, batch: Mapping[str, NDArray[Any]], *, hyper: Mapping[str, float] | None = None
    ) -> float:
        """As :meth:`device_sdk.trainer.Trainer.step`."""
        if not self.noting:
            return super().step(batch, hyper=hyper)
        before = None if self.has_moved else self.parameters
        loss = super().step(batch, hyper=hyper)
        if before is not None:
            after = self.parameters
            self.has_moved = any(not np.array_equal(before[name], after[name]) for name in before)
        if self._again is None:
            samples = {name: np.array(array) for name, array in batch.items()}
            step = super().step
            self._first, self._again = loss, lambda: step(samples, hyper=hyper)
        self._steps += 1
        return loss

    def notes(self) -> StepNotes:
        """Since :meth:`begin_notes`, where the parameters are as the last step left them. It takes
        one step more, which is not among them."""
        last = self._first if self._again is None else self._again()
        return StepNotes(self._steps, self._first, last, self.has_moved)
