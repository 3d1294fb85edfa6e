"""Optimizers as pure functions that become part of the graph, and what goes around them."""

from export.optimizers.adaptive import Adadelta, Adagrad, Adam, AdamW, Lamb, RMSprop
from export.optimizers.combinators import Accumulated, Averaged, Clipped, Scheduled
from export.optimizers.groups import Group, Groups
from export.optimizers.momentum import Lion, Sgd, SgdW
from export.optimizers.muon import Muon
from export.optimizers.protocol import Optimizer, OptimizerUpdate, StateSpec
from export.optimizers.segmented import Segmented

__all__ = [
    "Accumulated",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Averaged",
    "Clipped",
    "Group",
    "Groups",
    "Lamb",
    "Lion",
    "Muon",
    "Optimizer",
    "OptimizerUpdate",
    "RMSprop",
    "Scheduled",
    "Segmented",
    "Sgd",
    "SgdW",
    "StateSpec",
]
