"""The programs of the pages about exporting run as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import export
from device_sdk import Trainer

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "\n".join(
    page.read_text(encoding="utf-8")
    for page in [DOCS / "export.md", *sorted(DOCS.glob("export/*.md"))]
)


def _program(name: str) -> dict[str, Any]:
    found = re.search(rf"<!-- run: {name} -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert found
    module: dict[str, Any] = {"__name__": __name__}
    exec(compile(found.group(1), f"docs: {name}", "exec"), module)
    return module


def test_the_first_program_trains_and_predicts(tmp_path: Path) -> None:
    _program("first")["artifact"](tmp_path / "first")
    trainer = Trainer(tmp_path / "first")
    batch = {"image": np.eye(8, dtype=np.float32)[None].repeat(3, 0), "label": np.array([0, 2, 2])}
    losses = [trainer.step(batch) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert trainer.predict({"image": batch["image"][:1]})["logits"].shape == (1, 10)


def test_the_rule_of_ones_own_balances_two_tasks(tmp_path: Path) -> None:
    _program("gradient")["artifact"](tmp_path / "two")
    trainer = Trainer(tmp_path / "two")
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.standard_normal((6, 4)).astype(np.float32),
        "clicked": rng.integers(0, 2, 6).astype(np.float32),
        "minutes": rng.random(6).astype(np.float32),
    }
    # Without the second task its row of the weights stays.
    before = trainer.parameters["weight"]
    trainer.step({**batch, "balance": np.float32(0)})
    moved = trainer.parameters["weight"] - before
    assert np.all(np.abs(moved[0]) > 1e-3)
    np.testing.assert_array_equal(moved[1], 0)
    first = trainer.step({**batch, "balance": np.float32(1)})
    for _ in range(30):
        last = trainer.step({**batch, "balance": np.float32(1)})
    assert last < first


def test_the_distilled_classifier_gives_the_sums_to_send(tmp_path: Path) -> None:
    _program("distillation")["artifact"](tmp_path / "taught")
    trainer = Trainer(tmp_path / "taught")
    weights = {"weight_ce": 1, "weight_teacher": 0.5, "weight_kl": 0.1, "l2": 0}
    trainer.step(
        {
            "x": np.ones((3, 4), np.float32),
            "label": np.array([0, 2, 2]),
            "teacher": np.full((3, 3), 1 / 3, np.float32),
            "has_teacher": np.ones(3, np.float32),
            **{name: np.array(value, np.float32) for name, value in weights.items()},
        }
    )
    assert trainer.outputs["label_counts"].tolist() == [1, 0, 2]
    np.testing.assert_allclose(trainer.outputs["label_sums"].sum(1), [1, 0, 2], rtol=1e-5)


def test_the_optimizer_of_ones_own_steps_along_the_mean_of_its_window(tmp_path: Path) -> None:
    make = _program("optimizer")["Averaged"]
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    export.train_step(
        model,
        lambda m, b: (m(b["x"])).mean(),
        {"x": torch.ones(4, 1) * torch.arange(1.0, 5.0).unsqueeze(1)},
        optimizer=make(),
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


def test_the_groups_train_with_rates_of_their_own(tmp_path: Path) -> None:
    _program("groups")["artifact"](tmp_path / "groups")
    trainer = Trainer(tmp_path / "groups")
    assert trainer.hyper == {"lr": 0.001, "head.lr": 0.01}
    batch = {"x": np.ones((3, 4), np.float32), "label": np.array([0, 2, 2])}
    before = trainer.parameters
    for _ in range(3):
        trainer.step(batch, hyper={"head.lr": 0.0})
    moved = {name for name, value in trainer.parameters.items() if np.any(value != before[name])}
    assert moved == {"0.weight", "0.bias"}
    assert np.any(trainer.averages["0.weight"] != trainer.parameters["0.weight"])
    assert trainer.predict(batch, averaged=True)["logits"].shape == (3, 3)
