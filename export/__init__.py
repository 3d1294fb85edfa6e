"""Export: an ordinary torch module, loss and optimizer to a graph that trains on onnxruntime."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

try:
    import onnx  # noqa: F401
    import torch  # noqa: F401
except ModuleNotFoundError as error:  # the light install has this package and its command too
    raise ModuleNotFoundError(
        f"export needs {error.name}, which a device does without: "
        "pip install 'tessera-edge[export]'",
        name=error.name,
    ) from None

from export import losses
from export.build import Exported
from export.build import export_train_step as train_step
from export.errors import ExportError
from export.gradient_rules import ConflictProjection, GradientRule, StepDirection, WeightPenalty
from export.optimizers import Adam, Optimizer, OptimizerUpdate, Segmented, Sgd, StateSpec

__all__ = [
    "Adam",
    "ConflictProjection",
    "StepDirection",
    "ExportError",
    "Exported",
    "GradientRule",
    "Optimizer",
    "Segmented",
    "Sgd",
    "StateSpec",
    "OptimizerUpdate",
    "WeightPenalty",
    "losses",
    "train_step",
]
