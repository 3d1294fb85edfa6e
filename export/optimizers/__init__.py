"""Optimizers as pure functions that become part of the graph, and what goes around them."""

from export.optimizers.combinators import Accumulated, Averaged, Clipped, Scheduled
from export.optimizers.groups import Group, Groups
from export.optimizers.protocol import Optimizer, OptimizerUpdate, StateSpec
from export.optimizers.segmented import Segmented
from export.optimizers.traced import (
    ASGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Lamb,
    Lion,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    Sgd,
    SgdW,
)

__all__ = [
    "Accumulated",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "Adamax",
    "AdamW",
    "ASGD",
    "Averaged",
    "Clipped",
    "Group",
    "Groups",
    "Lamb",
    "Lion",
    "Muon",
    "NAdam",
    "Optimizer",
    "OptimizerUpdate",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Scheduled",
    "Segmented",
    "Sgd",
    "SgdW",
    "StateSpec",
]
