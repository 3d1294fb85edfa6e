"""Optimizers that become part of the train-step graph, each one pure function on tensors."""

from export.optimizers.adam import Adam
from export.optimizers.base import Optimizer, OptimizerUpdate, StateSpec
from export.optimizers.segmented import Segmented
from export.optimizers.sgd import Sgd

__all__ = ["Adam", "Optimizer", "Segmented", "Sgd", "StateSpec", "OptimizerUpdate"]
