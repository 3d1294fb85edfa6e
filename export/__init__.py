"""Export: an ordinary torch module, loss and optimizer to a graph that trains on onnxruntime."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from export import losses
from export.build import Exported
from export.build import export_train_step as train_step
from export.errors import ExportError
from export.optimizers import Adam, Optimizer, Sgd, StateSpec, Update

__all__ = [
    "Adam",
    "ExportError",
    "Exported",
    "Optimizer",
    "Sgd",
    "StateSpec",
    "Update",
    "losses",
    "train_step",
]
