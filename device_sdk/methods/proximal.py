"""The proximal term: a pull of half of mu times the squared distance to where a round started.

Li et al. 2020, Federated optimization in heterogeneous networks, eq. 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from device_sdk.artifact.safetensors import Array
from device_sdk.methods.learner import LearnerError
from device_sdk.trainer import Trainer

_ANCHOR = "anchor."
_MU = "mu"


def anchor_names(trainer: Trainer) -> dict[str, str]:
    """Parameter to buffer, for artifacts exported with the term inside: buffer ``anchor.<name>``
    holds the parameter's value at the start of the round, and ``mu`` is an entry of the batch."""
    entries = {port.of for port in trainer.artifact.graphs["train"].select("batch")}
    buffers = trainer.buffers
    found = {name: _ANCHOR + name for name in trainer.parameters if _ANCHOR + name in buffers}
    return found if _MU in entries else {}


class ProximalTerm:
    """Prepares a round's steps from the trainer's present parameters.

    Where the artifact has the term inside its graph, the parameters become its anchors. Elsewhere
    each step is followed by the term's exact proximal step, w <- (w + lr mu a) / (1 + lr mu): what
    the term does to plain SGD up to lr squared, and apart from the moments of other optimizers, as
    decoupled weight decay is.

    Args:
        learning_rate: of the round; 0 for the artifact's own.

    Raises LearnerError where a rate is needed and the artifact has none.
    """

    def __init__(self, trainer: Trainer, mu: float, learning_rate: float) -> None:
        known = trainer.hyper
        if learning_rate and "lr" not in known:
            raise LearnerError("the task sets a learning rate, but the artifact has no input 'lr'")
        hyper = {"lr": learning_rate} if learning_rate else {}
        anchors = anchor_names(trainer)
        self._trainer = trainer
        self._start: dict[str, Array] = {}
        self._pull = 0.0
        self._extra: dict[str, Array] = {}
        if anchors:
            self._extra[_MU] = np.asarray(mu, dtype=np.float32)
            parameters = trainer.parameters
            trainer.set_parameters({anchor: parameters[name] for name, anchor in anchors.items()})
        elif mu:
            rate = learning_rate or known.get("lr", 0.0)
            if rate <= 0:
                raise LearnerError(
                    "a proximal term needs a learning rate: export the artifact with an optimizer "
                    "that has one, or with the term inside"
                )
            self._pull = rate * mu
            self._start = trainer.parameters
        self._hyper = hyper

    @property
    def hyper(self) -> Mapping[str, float] | None:
        """For each step of the round."""
        return self._hyper or None

    @property
    def extra(self) -> Mapping[str, Array] | None:
        """What each batch of the round must hold beside its samples."""
        return self._extra or None

    @property
    def after_step(self) -> Callable[[], None] | None:
        """To be called after each step, where the graph has no term of its own."""
        return self._pull_back if self._start else None

    def _pull_back(self) -> None:
        # 1 / (1 + p) of the way stays: the minimiser of |v - w|^2 / 2 + p |v - a|^2 / 2.
        weight = np.float32(1 / (1 + self._pull))
        now = self._trainer.parameters
        self._trainer.set_parameters(
            {name: start + weight * (now[name] - start) for name, start in self._start.items()}
        )
