"""Export: an ordinary torch module, loss and optimizer to a graph that trains on onnxruntime."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from export import losses
    from export.adapters import lora
    from export.build import Exported
    from export.build import export_train_step as train_step
    from export.errors import ExportError
    from export.gradient_rules import ConflictProjection, GradientRule, StepDirection, WeightPenalty
    from export.ladder import submodels
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
    "lora",
    "losses",
    "submodels",
    "train_step",
]

# Loaded on first use: the light install has this package and its command too, without torch.
# What is not named here is one of `export.optimizers`.
_HOMES = {
    "lora": "adapters:lora",
    "losses": "losses",
    "schedules": "optimizers.schedules",
    "submodels": "ladder:submodels",
    "train_step": "build:export_train_step",
    "Exported": "build:Exported",
    "ExportError": "errors:ExportError",
    "ConflictProjection": "gradient_rules:ConflictProjection",
    "GradientRule": "gradient_rules:GradientRule",
    "StepDirection": "gradient_rules:StepDirection",
    "WeightPenalty": "gradient_rules:WeightPenalty",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'export' has no attribute {name!r}")
    home, _, attribute = _HOMES.get(name, f"optimizers:{name}").partition(":")
    try:
        module = importlib.import_module(f"export.{home}")
    except (ImportError, AttributeError) as error:
        # All that is taken of torch's own is taken while these modules are imported.
        from device_sdk.system.command_line import how_to_mend
        from export.cli import main

        how = how_to_mend(error, main.package, main.extra, main.needs)
        if not how:
            raise
        kind = type(error) if isinstance(error, ImportError) else ImportError
        raise kind(f"export: {how}", name=error.name) from error
    return getattr(module, attribute) if attribute else module


def __dir__() -> list[str]:
    return sorted(__all__)
