"""Export: an ordinary torch module, loss and optimizer to a graph that trains on onnxruntime."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from export import losses
    from export.build import Exported
    from export.build import export_train_step as train_step
    from export.errors import ExportError
    from export.gradient_rules import ConflictProjection, GradientRule, StepDirection, WeightPenalty
    from export.optimizers import (
        ASGD,
        Accumulated,
        Adadelta,
        Adafactor,
        Adagrad,
        Adam,
        Adamax,
        AdamW,
        Averaged,
        Clipped,
        Group,
        Groups,
        Lamb,
        Lion,
        Muon,
        NAdam,
        Optimizer,
        OptimizerUpdate,
        RAdam,
        RMSprop,
        Rprop,
        Scheduled,
        Segmented,
        Sgd,
        SgdW,
        StateSpec,
        schedules,
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
    "schedules",
    "ConflictProjection",
    "StepDirection",
    "ExportError",
    "Exported",
    "GradientRule",
    "WeightPenalty",
    "losses",
    "train_step",
]

# Loaded on first use: the light install has this package and its command too, without torch.
_HOMES = {
    "losses": "losses",
    "schedules": "optimizers.schedules",
    "train_step": "build:export_train_step",
    "Exported": "build:Exported",
    "ExportError": "errors:ExportError",
    "ConflictProjection": "gradient_rules:ConflictProjection",
    "GradientRule": "gradient_rules:GradientRule",
    "StepDirection": "gradient_rules:StepDirection",
    "WeightPenalty": "gradient_rules:WeightPenalty",
    "Accumulated": "optimizers:Accumulated",
    "Adadelta": "optimizers:Adadelta",
    "Adafactor": "optimizers:Adafactor",
    "Adagrad": "optimizers:Adagrad",
    "Adam": "optimizers:Adam",
    "Adamax": "optimizers:Adamax",
    "AdamW": "optimizers:AdamW",
    "ASGD": "optimizers:ASGD",
    "Averaged": "optimizers:Averaged",
    "Clipped": "optimizers:Clipped",
    "Group": "optimizers:Group",
    "Groups": "optimizers:Groups",
    "Lamb": "optimizers:Lamb",
    "Lion": "optimizers:Lion",
    "Muon": "optimizers:Muon",
    "NAdam": "optimizers:NAdam",
    "Optimizer": "optimizers:Optimizer",
    "OptimizerUpdate": "optimizers:OptimizerUpdate",
    "RAdam": "optimizers:RAdam",
    "RMSprop": "optimizers:RMSprop",
    "Rprop": "optimizers:Rprop",
    "Scheduled": "optimizers:Scheduled",
    "Segmented": "optimizers:Segmented",
    "Sgd": "optimizers:Sgd",
    "SgdW": "optimizers:SgdW",
    "StateSpec": "optimizers:StateSpec",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'export' has no attribute {name!r}")
    home, _, attribute = _HOMES[name].partition(":")
    try:
        module = importlib.import_module(f"export.{home}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"export needs {error.name}, which a device does without: "
            "pip install 'tessera-edge[export]'",
            name=error.name,
        ) from None
    return getattr(module, attribute) if attribute else module


def __dir__() -> list[str]:
    return sorted(__all__)
