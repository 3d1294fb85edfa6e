"""The device's half: send the largest changes, remember the rest.

Top-k sparsification with error feedback: Stich et al. 2018, Sparsified SGD with memory.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from device_sdk.fields import Within
from device_sdk.methods.shared_model import Arrays, Floats, SharedModelLearner, SharedModelTraining


@dataclass(frozen=True, slots=True)
class SparseTraining(SharedModelTraining):
    """``keep``: the share of the parameters that a device sends, the largest changes first."""

    keep: Annotated[float, Within(0, 1, above=True)] = 0.1


class SparseYogiLearner(SharedModelLearner):
    """Whatever is not sent now, or was sent and did not count, is added to the next update.

    ``_left``: what training moved and was not sent. ``_sent``: the last update, until its verdict.
    """

    training_class = SparseTraining
    VECTORS = ("left", "sent")
    needs_receipts = True

    def tensors(self, moved: Floats, training: SparseTraining) -> Arrays:
        """The largest of what was moved, now or earlier."""
        wanted = moved + self._left
        count = max(1, round(training.keep * len(wanted)))
        places = np.sort(np.argpartition(np.abs(wanted), -count)[-count:])
        self._sent = np.zeros_like(wanted)
        self._sent[places] = wanted[places]
        self._left = wanted - self._sent
        return {"places": places.astype(np.int32), "values": wanted[places]}

    def verdict(self, *, counted: bool) -> None:
        """What did not count is sent again."""
        if not counted:
            self._left = self._left + self._sent
        self._sent = np.zeros_like(self._sent)
