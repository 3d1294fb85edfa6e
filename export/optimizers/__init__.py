"""Optimizers that become part of the train-step graph, each one pure function on tensors."""

from export.optimizers.base import Adam, Optimizer, OptimizerUpdate, Sgd, StateSpec
from export.optimizers.segmented import Segmented

__all__ = ["Adam", "Optimizer", "Segmented", "Sgd", "StateSpec", "OptimizerUpdate"]
