"""The programs in docs/export.md run as printed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import nn

import export
from device_sdk import Trainer

TEXT = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")


def test_the_optimizer_of_ones_own_steps_along_the_mean_of_its_window(tmp_path: Path) -> None:
    found = re.search(r"<!-- run: optimizer -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert found
    module: dict[str, object] = {"__name__": __name__}
    exec(compile(found.group(1), "docs/export.md", "exec"), module)
    make = module["Averaged"]
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    export.train_step(
        model,
        lambda m, b: (m(b["x"])).mean(),
        {"x": torch.ones(4, 1) * torch.arange(1.0, 5.0).unsqueeze(1)},
        optimizer=make(),  # type: ignore[operator]
        dynamic={"x": {0: "batch"}},
        directory=tmp_path / "averaged",
    )
    trainer = Trainer(tmp_path / "averaged")
    weight, history = 1.0, [0.0, 0.0, 0.0]
    for gradient in (2.0, -1.0, 4.0, 0.5, 3.0):
        history = [*history[1:], gradient]
        weight -= 0.1 * float(np.mean(history))
        trainer.step({"x": np.full((2, 1), gradient, dtype=np.float32)})
        np.testing.assert_allclose(trainer.parameters["weight"], [[weight]], rtol=1e-5)
