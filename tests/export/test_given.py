"""What an author hands over by mistake is answered with a sentence, before anything is traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import export

X = torch.ones(3, 4)


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def _export(folder: Path, **other: Any) -> export.Exported:
    given: dict[str, Any] = {
        "model": nn.Linear(4, 2), "loss": _loss, "example_batch": {"x": X},
        "optimizer": export.Sgd(0.1), "dynamic": {"x": {0: "rows"}},
        "directory": folder / "made", "verify": False, **other,
    }  # fmt: skip
    return export.train_step(**given)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"example_batch": (X, X)}, "the example batch is a tuple; instead: a dict of named tens"),
        ({"example_batch": X}, "the example batch is a Tensor"),
        ({"example_batch": {0: X}}, "the example batch has 0 as a name, which is an int"),
        ({"example_batch": {"x": X.numpy()}}, "batch entry 'x' is of type ndarray"),
        ({"dynamic": ["x"]}, r"dynamic is a list; instead: \{\"x\": \{0: \"batch\"\}\}"),
        ({"dynamic": None}, "dynamic is None"),
        ({"dynamic": {"x": [0]}}, r"dynamic\['x'\] is \[0\], and not axes by their places"),
        ({"dynamic": {"x": {"0": "rows"}}}, r"dynamic\['x'\] is .*, and not axes by their places"),
        ({"metrics": ["loss"]}, r"metrics is a list; instead: what each is about: \{\"loss\""),
        ({"metrics": {"loss": None}}, "metric 'loss' is about None"),
        ({"model": lambda x: x}, "the model is a function, no torch.nn.Module"),
        ({"model": nn.Linear}, "the model is the class Linear"),
        ({"loss": "mse"}, "loss is a str, which cannot be called"),
        ({"loss": nn.MSELoss()}, "loss is a MSELoss, which takes no model and batch"),
        ({"predict": "y"}, "predict is a str, which cannot be called"),
        ({"gradient": "mean"}, "gradient is a str, no rule for several losses"),
        ({"directory": None}, "directory is None; instead: a folder"),
        ({"name": 3}, "name is an int"),
    ],
)
def test_another_kind_of_argument_is_told(other: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(export.ExportError, match=said):
        _export(tmp_path, **other)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("below", ["", "deeper/made"])
def test_a_directory_that_is_a_file_is_left_alone(below: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(export.ExportError, match=r"directory is '.*', and '.*file' is a file"):
        _export(tmp_path, directory=file / below)
    assert file.read_text() == "mine"


def test_lists_of_names_are_axes(tmp_path: Path) -> None:
    made = _export(tmp_path, dynamic={"x": ["rows", None]})
    assert set(made.manifest.axes) == {"rows"}


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), "0.1", True, 1j])
def test_a_rate_that_is_none(rate: Any) -> None:
    for optimizer in (export.Sgd, export.AdamW):
        with pytest.raises(export.ExportError, match=r"lr is .*; (expected a number|it must be)"):
            optimizer(lr=rate)


def test_numbers_of_numpy_are_rates() -> None:
    assert export.Sgd(np.float32(0.5)).hyper() == {"lr": 0.5}


def test_a_file_of_a_package_s_name_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``export.py`` beside the command: Python has the package in its place."""
    from export.cli import main

    with pytest.raises(SystemExit) as end:
        raise SystemExit(main(["build", "export:made", "-o", str(tmp_path / "made")]))
    assert end.value.code
    assert (
        "'export' is the name of a package that comes with this command" in capsys.readouterr().err
    )
