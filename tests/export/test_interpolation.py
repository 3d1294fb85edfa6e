"""Interpolation beside torch: values, gradients, and graphs that add nothing by scattering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import torch
import torch.nn.functional as functional
from torch import nn

import export

CASES: dict[str, dict[str, Any]] = {
    "twice": {"scale_factor": 2},
    "to_a_multiple": {"size": (12, 5)},
    "exact": {"scale_factor": (3.0, 2.0), "mode": "nearest-exact"},
    "between": {"size": (7, 8)},
    "scale_of_fractions": {"scale_factor": (2.2, 1.7)},
    "recomputed": {"scale_factor": (2.2, 1.7), "recompute_scale_factor": True},
    "bilinear": {"scale_factor": 2, "mode": "bilinear"},
    "bilinear_corners": {"size": (9, 11), "mode": "bilinear", "align_corners": True},
    "smaller": {"size": (3, 2), "mode": "bilinear"},
    "bicubic": {"scale_factor": 1.5, "mode": "bicubic"},
}


class _Decoder(nn.Module):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.before = nn.Conv2d(1, 2, 1)
        self.after = nn.Conv2d(2, 1, 3, padding=1)
        self._settings = settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wider = functional.interpolate(torch.tanh(self.before(x)), **self._settings)
        result: torch.Tensor = self.after(wider)
        return result


def test_interpolation_is_torchs_and_scatters_nothing(
    assert_parity_of_each: Callable[..., export.Exported],
) -> None:
    torch.manual_seed(0)
    models = {name: _Decoder(settings) for name, settings in CASES.items()}
    # The export verifies each gradient beside torch in double precision.
    done = assert_parity_of_each(models, {"x": torch.randn(2, 1, 6, 5)})
    assert not done.manifest.sequential
    graph = onnx.load(done.directory / "train.onnx").graph
    assert not {"ScatterND", "ScatterElements"} & {node.op_type for node in graph.node}
