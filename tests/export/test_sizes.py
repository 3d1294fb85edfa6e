"""Bounds on free sizes by which code raises: what is recorded is what goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import export
from device_sdk import NonFiniteStep, Trainer

# As text, for pytest writes its own code for assertions.
WRITTEN = {
    "assert": "assert n <= 11, f'{n} rows'",
    "assert of two": "assert 1 <= n and n < 12",
    "raise": "if n > 11: raise ValueError(f'{n} rows')",
    "raise of two": "if n < 1 or n >= 12: raise ValueError('rows')",
    "raise by negation": "if not n <= 11: raise ValueError",
}


def _checked(statement: str) -> Callable[[Tensor], Tensor]:
    names: dict[str, Any] = {}
    text = f"def check(x):\n    n = x.shape[0]\n    {statement}\n    return x\n"
    exec(compile(text, "a_models_own.py", "exec"), names)
    found: Callable[[Tensor], Tensor] = names["check"]
    return found


@pytest.mark.parametrize("name", WRITTEN)
def test_a_bound_beyond_which_code_raises(name: str, tmp_path: Path) -> None:
    check = _checked(WRITTEN[name])
    export.train_step(
        nn.Linear(3, 2),
        lambda m, b: m(check(b["x"])).pow(2).mean(),
        {"x": torch.ones(4, 3)},
        optimizer=export.Sgd(0.1),
        dynamic={"x": {0: "rows"}},
        directory=tmp_path / "artifact",
        verify=False,
    )
    trainer = Trainer(tmp_path / "artifact")
    for rows in (1, 11):
        trainer.step({"x": np.ones((rows, 3), np.float32)})
    with pytest.raises(NonFiniteStep):
        trainer.step({"x": np.ones((12, 3), np.float32)})


def test_a_branch_is_no_bound(tmp_path: Path) -> None:
    check = _checked("x = x * 2 if n > 11 else x")
    with pytest.raises(export.ExportError, match="holds only where"):
        export.train_step(
            nn.Linear(3, 2),
            lambda m, b: m(check(b["x"])).pow(2).mean(),
            {"x": torch.ones(4, 3)},
            optimizer=export.Sgd(0.1),
            dynamic={"x": {0: "rows"}},
            directory=tmp_path / "artifact",
        )


def test_rows_are_counted_and_the_counts_compared(tmp_path: Path) -> None:
    """torch's adaptive softmax raises where its clusters do not hold all rows."""
    model = nn.AdaptiveLogSoftmaxWithLoss(6, 20, [5, 10], div_value=1.5)
    report = export.train_step(
        model,
        lambda m, b: m(b["x"].flatten(0, 1), b["label"].flatten()).loss,
        {"x": torch.randn(4, 5, 6), "label": torch.arange(20).reshape(5, 4).t()},
        optimizer=export.Sgd(0.1),
        dynamic={"x": {0: "batch"}, "label": {0: "batch"}},
        directory=tmp_path / "artifact",
    ).report
    assert report is not None
