"""Bounds on free sizes by which code raises: what is recorded is what goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import export
from device_sdk import BatchError, NonFiniteStep, Trainer
from tests.export.recorded import recorded

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


def test_sizes_that_are_compared_are_not_equal_in_any_step(tmp_path: Path) -> None:
    """The step is recorded with two that differ; at equal ones torch would take the other way."""

    def loss(m: nn.Module, b: Any) -> Tensor:
        x = m(b["x"])
        square = x.shape[0] == x.shape[1]
        return (x.mT if square else x).mean() + (0 if square else x.pow(2).mean())

    export.train_step(
        nn.Linear(3, 2),
        loss,
        {"x": torch.ones(4, 5, 3)},
        optimizer=export.Sgd(0.1),
        dynamic={"x": {0: "high", 1: "wide"}},
        directory=tmp_path / "artifact",
        verify=False,
    )
    trainer = Trainer(tmp_path / "artifact")
    for high, wide in ((2, 5), (5, 2), (3, 4)):
        trainer.step({"x": np.ones((high, wide, 3), np.float32)})
    with pytest.raises(NonFiniteStep):
        trainer.step({"x": np.ones((4, 4, 3), np.float32)})


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


def _set(x: Tensor, rows: slice) -> Tensor:
    x[rows] = 0.5
    return x


# What a model asks of a size n whose answer at 1 (or 2) is another, and the size from which on the
# recorded one holds.
ASKED: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "a branch": (lambda x: x * 2 if x.shape[0] > 1 else x, 2),
    "a branch the other way": (lambda x: x if x.size(0) == 1 else x * 2, 2),
    "a branch by two sizes": (lambda x: x * 2 if x.shape[0] - 1 != 1 else x, 3),
    "a maximum": (lambda x: x / max(x.shape[0] - 1, 1), 2),
    "a shape": (lambda x: x if x.shape == (1, 3) else x * 2, 2),
    "the number of elements": (lambda x: x * 2 if x.numel() > 3 else x, 2),
    "a slice that is set": (lambda x: _set(x * 2, slice(-3, None)), 3),
    "two rows set": (lambda x: _set(x * 2, slice(-2, None)), 2),
    "one row set": (lambda x: _set(x * 2, slice(-1, None)), 1),
    "nothing that differs": (lambda x: x if x.shape[0] == 0 else x * max(x.shape[0], 1), 1),
}


@pytest.mark.parametrize("name", ASKED)
def test_where_the_answer_is_another_the_size_is_refused(name: str) -> None:
    function, least = ASKED[name]
    trace = recorded(function, lambda n: (torch.ones(n, 3),))[1]
    assert trace.check_axes() == ({"n4_7": least} if least > 1 else {})


def test_torchs_own_questions_refuse_no_size() -> None:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        h = functional.batch_norm(functional.conv2d(x, weight), None, None, training=True)
        h = functional.max_pool2d(functional.interpolate(h, scale_factor=2), 2)
        return functional.layer_norm(h.flatten(1) + x.flatten(1)[:1, :1], [50]).softmax(0)

    def make(n: int) -> tuple[Tensor, Tensor]:
        return torch.ones(n, 3, 5, 5), torch.ones(2, 3, 1, 1)

    assert recorded(run, make)[1].check_axes() == {}


def _exported(loss: Any, directory: Path, *, verify: bool = True) -> Trainer:
    export.train_step(
        nn.Linear(3, 2), loss, {"x": torch.randn(5, 3)}, optimizer=export.Sgd(0.1),
        dynamic={"x": {0: "rows"}}, directory=directory, verify=verify,
    )  # fmt: skip
    return Trainer(directory)


def test_verification_finds_the_least_size(tmp_path: Path) -> None:
    """Where nobody asks, but the graph fails at 1."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        h = model(batch["x"])
        return (h @ h.t()).diagonal(1).sum() + h.sum()

    with pytest.warns(UserWarning, match="axis 'rows': the artifact takes sizes from 2 on"):
        trainer = _exported(loss, tmp_path / "artifact")
    trainer.step({"x": np.ones((2, 3), np.float32)})
    with pytest.raises(BatchError, match="axis 'rows' must be at least 2"):
        trainer.step({"x": np.ones((1, 3), np.float32)})


@pytest.mark.parametrize("verify", [False, True])
def test_an_entry_of_which_only_the_length_is_asked_is_checked(
    tmp_path: Path, verify: bool
) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        h = model(batch["x"])
        return h.pow(2).mean() if batch["mask"].shape[0] < 2 else h.abs().mean()

    model = nn.Linear(3, 2)
    export.train_step(
        model, loss, {"x": torch.randn(5, 3), "mask": torch.zeros(7)}, optimizer=export.Sgd(lr=0.1),
        dynamic={"mask": {0: "n"}}, directory=tmp_path, verify=verify,
    )  # fmt: skip
    trainer = Trainer(tmp_path)
    x = np.ones((5, 3), np.float32)
    trainer.step({"x": x, "mask": np.zeros(2, np.float32)})
    with pytest.raises(BatchError, match="axis 'n' must be at least 2"):
        trainer.step({"x": x, "mask": np.zeros(1, np.float32)})


def test_an_example_below_the_least_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(export.ExportError, match=r"axis .rows. is 5 .* needs at least 6"):
        _exported(lambda m, b: m(b["x"])[-6:].reshape(-1, 12).pow(2).mean(), tmp_path / "artifact")


def test_windows_that_do_not_fit_refuse_the_step(tmp_path: Path) -> None:
    trainer = _exported(
        lambda m, b: m(b["x"]).unfold(0, 2, 1).sum(), tmp_path / "artifact", verify=False
    )
    trainer.step({"x": np.ones((2, 3), np.float32)})
    assert trainer.artifact.least_sizes(to_train=True) == {"rows": 2}
    with pytest.raises(BatchError, match="'rows' must be at least 2"):
        trainer.step({"x": np.ones((1, 3), np.float32)})
