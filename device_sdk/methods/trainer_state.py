"""A trainer's state as part of a learner's: named arrays under ``trainer.``."""

from __future__ import annotations

from device_sdk.errors import StateError
from device_sdk.methods.learner import LearnerError, State
from device_sdk.trainer import Trainer

__all__ = ["restore_trainer", "trainer_state"]

_PREFIX = "trainer."


def trainer_state(trainer: Trainer) -> State:
    """Copies of all state tensors: parameters, buffers, optimizer and step count."""
    return {_PREFIX + name: array for name, array in trainer.state.items()}


def restore_trainer(trainer: Trainer, state: State) -> None:
    """Take :func:`trainer_state` back; raises LearnerError where it does not fit, unchanged."""
    wanted = {_PREFIX + name for name in trainer.artifact.state_by_name}
    if set(state) != wanted:
        raise LearnerError(f"the state holds {sorted(state)}; expected {sorted(wanted)}")
    try:
        trainer.set_state({name.removeprefix(_PREFIX): array for name, array in state.items()})
    except StateError as error:
        raise LearnerError(f"the state does not fit the artifact: {error}") from error
