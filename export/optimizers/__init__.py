"""Optimizers as pure functions that become part of the graph, and what goes around them."""

from export.optimizers.adaptive import (
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Lamb,
    NAdam,
    RAdam,
    RMSprop,
)
from export.optimizers.combinators import Accumulated, Averaged, Clipped, Scheduled
from export.optimizers.factored import Adafactor
from export.optimizers.groups import Group, Groups
from export.optimizers.momentum import ASGD, Lion, Rprop, Sgd, SgdW
from export.optimizers.muon import Muon
from export.optimizers.protocol import Optimizer, OptimizerUpdate, StateSpec
from export.optimizers.segmented import Segmented

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
