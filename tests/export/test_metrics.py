"""Metrics in an artifact: what is written, what a device computes with it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import export
from device_sdk.artifact import MetricSource, load_artifact
from device_sdk.trainer import Trainer
from export.build import Recipe
from export.cli import main
from export.models.click import ClickDesign, click_recipe
from export.models.gru_classifier import GruClassifier, gru_recipe
from export.models.images import image_recipe
from export.models.mutual import mutual_recipe

FEATURES = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(24) % 3


class Net(nn.Module):
    """Dropout and batch norm, which training and evaluation see differently."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, outputs)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    logits = model(batch["x"])
    return export.losses.cross_entropy(logits, batch["label"]), {"logits": logits}


def arguments(**changed: Any) -> dict[str, Any]:
    return {
        "model": Net(),
        "loss": loss,
        "example_batch": {"x": FEATURES, "label": LABELS},
        "optimizer": export.Sgd(lr=0.1),
        "dynamic": {"x": {0: "batch"}, "label": {0: "batch"}},
        "name": "net",
        **changed,
    }


METRICS = {"loss": "loss", "accuracy": ("logits", "label")}


def test_loss_and_outputs_in_evaluation_mode_are_torchs(tmp_path: Path) -> None:
    written = export.train_step(**arguments(metrics=METRICS), directory=tmp_path / "net")
    assert written.report is not None
    compared = {comparison.tensor for comparison in written.report.comparisons}
    assert {"evaluation loss", "evaluation output.logits"} <= compared
    manifest = load_artifact(tmp_path / "net").manifest
    assert dict(manifest.metrics) == {
        "loss": MetricSource(),
        "accuracy": MetricSource("logits", "label", "logits"),
    }
    trainer = Trainer(tmp_path / "net", providers="cpu")
    model = Net()
    batch = {"x": FEATURES.numpy()[:7], "label": LABELS.numpy()[:7]}
    model.eval()
    for _ in range(2):
        found, outputs = trainer.evaluate(batch)
        logits = model(FEATURES[:7])
        expected = nn.functional.cross_entropy(logits, LABELS[:7])
        assert found == pytest.approx(expected.item(), abs=1e-6)
        np.testing.assert_allclose(outputs["logits"], logits.detach().numpy(), atol=1e-5)
        np.testing.assert_array_equal(outputs["logits"], trainer.predict(batch)["logits"])
        model.load_state_dict(
            {k: torch.ones_like(v) if "weight" in k else v for k, v in model.state_dict().items()}
        )
        trainer.set_parameters({n: p.detach().numpy() for n, p in model.named_parameters()})
    assert trainer.step_count == 0


def test_artifacts_without_metrics_are_the_same_bytes(tmp_path: Path) -> None:
    export.train_step(**arguments(), directory=tmp_path / "plain")
    export.train_step(**arguments(metrics={}), directory=tmp_path / "empty")
    export.train_step(
        **arguments(metrics={"accuracy": ("logits", "label")}), directory=tmp_path / "with"
    )
    plain = (tmp_path / "plain" / "manifest.json").read_bytes()
    assert (tmp_path / "empty" / "manifest.json").read_bytes() == plain
    assert b"metrics" not in plain
    # No loss, no third graph: the prediction's outputs are all there is to measure.
    assert not (tmp_path / "with" / "evaluate.onnx").exists()
    batch = {"x": FEATURES.numpy(), "label": LABELS.numpy()}
    found, outputs = Trainer(tmp_path / "with", providers="cpu").evaluate(batch)
    assert found is None and set(outputs) == {"logits"}
    # An artifact takes another one's place, whichever of the two has the third graph.
    for metrics in (METRICS, {}):
        export.train_step(**arguments(metrics=metrics), directory=tmp_path / "plain", verify=False)
    assert (tmp_path / "plain" / "manifest.json").read_bytes() == plain


def test_one_of_several_losses_and_a_prediction_of_its_own(tmp_path: Path) -> None:
    def losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        rows = model(batch["x"])
        wanted = batch["label"].float()
        click = export.losses.binary_cross_entropy(rows[:, 0], (wanted > 0).float())
        return {"click": click, "size": export.losses.mean_squared_error(rows[:, 1], wanted)}

    class Sum:
        def combine(self, losses: Any, gradients: Any, parameters: Any, batch: Any) -> Any:
            both = zip(*gradients.values(), strict=True)
            return export.StepDirection(sum(losses.values()), [a + b for a, b in both])

    given = arguments(
        loss=losses,
        gradient=Sum(),
        predict=lambda model, batch: {
            "clicked": torch.sigmoid(model(batch["x"])[:, 0]),
            "size": model(batch["x"])[:, 1],
        },
        example_batch={"x": FEATURES, "label": LABELS.float(), "click": (LABELS > 0).float()},
        dynamic={name: {0: "batch"} for name in ("x", "label", "click")},
        metrics={
            "loss": "size",
            "mae": ("size", "label"),
            "auc": ("clicked", "click", "probabilities"),
        },
    )
    # The step never reads "click", so that no device could give it.
    with pytest.raises(export.ExportError, match=r"'click'.*the loss does not use"):
        export.train_step(**given, directory=tmp_path / "several")
    given["metrics"].pop("auc")
    export.train_step(**given, directory=tmp_path / "several")
    trainer = Trainer(tmp_path / "several", providers="cpu")
    found, outputs = trainer.evaluate({"x": FEATURES.numpy(), "label": LABELS.float().numpy()})
    squares = (outputs["size"] - LABELS.float().numpy()) ** 2
    assert found == pytest.approx(float(squares.mean()), rel=1e-5)
    assert set(outputs) == {"size"}
    given["metrics"]["loss"] = "loss"
    with pytest.raises(export.ExportError, match="'loss', which is no loss; instead: one of click"):
        export.train_step(**given, directory=tmp_path / "other")


def test_a_label_that_torch_refuses_has_no_loss_here_either(tmp_path: Path) -> None:
    export.train_step(**arguments(metrics={"loss": "loss"}), directory=tmp_path / "net")
    trainer = Trainer(tmp_path / "net", providers="cpu")
    batch = {"x": FEATURES.numpy()[:2], "label": np.array([0, -1])}
    found, _ = trainer.evaluate(batch)
    assert found is not None and np.isnan(found)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"f1": ("logits", "label")}, "'f1' is none .*one of loss, accuracy, log_loss, auc"),
        ({"hr10": ("logits", "label")}, "'hr10' is none that an artifact declares"),
        ({"accuracy": "logits"}, r'an output and of a batch entry.*\("logits", "label"\)'),
        ({"mae": ("logits", "label", "logits")}, "'mae' is about"),
        ({"loss": ("loss", "label")}, "the loss's name"),
        ({"loss": "other"}, "no loss; instead: one of loss"),
        ({"accuracy": ("scores", "label")}, "'scores', which there is not .*one of logits"),
        ({"accuracy": ("logits", "y")}, "'y', which there is not; instead: one of x, label"),
        ({"accuracy": ("logits", "label", "percent")}, "'percent'; instead: 'logits' or"),
        ({"accuracy": ("logits", "x")}, r"target has shape .*\[batch, classes\]"),
        ({"mae": ("logits", "label")}, "expected the same; instead: an output and a batch entry"),
        ({"auc": ("logits", "label")}, "two classes"),
        ({"accuracy": ("logits", "label", "probabilities")}, "no probabilities"),
    ],
)
def test_metrics_that_do_not_fit_are_refused_and_nothing_is_written(
    tmp_path: Path, metrics: Any, said: str
) -> None:
    with pytest.raises(export.ExportError, match=said):
        export.train_step(**arguments(metrics=metrics), directory=tmp_path / "net", verify=False)
    assert not (tmp_path / "net").exists()


def test_what_looks_like_probabilities_must_be_called_so_or_not(tmp_path: Path) -> None:
    given = arguments(
        predict=lambda model, batch: {"likely": torch.softmax(model(batch["x"]), -1)},
        metrics={"log_loss": ("likely", "label")},
    )
    with pytest.raises(export.ExportError, match=r'looks like probabilities.*"probabilities"'):
        export.train_step(**given, directory=tmp_path / "net", verify=False)
    for scale in ("probabilities", "logits"):
        given["metrics"] = {"log_loss": ("likely", "label", scale)}
        written = export.train_step(**given, directory=tmp_path / scale, verify=False)
        assert written.manifest.metrics["log_loss"].scale == scale


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("recipe", "asked"),
    [
        (image_recipe("lenet"), {"loss", "accuracy", "log_loss"}),
        (mutual_recipe("lenet"), {"accuracy", "calibration"}),
        (click_recipe(ClickDesign("cnn")), {"auc", "log_loss", "accuracy"}),
        (gru_recipe(GruClassifier(3, 32, 5), hours=4), {"loss", "accuracy"}),
    ],
    ids=["image", "mutual", "click", "gru"],
)
def test_ready_made_models_declare_theirs_on_request(
    tmp_path: Path, recipe: Recipe, asked: set[str]
) -> None:
    written = recipe.export(tmp_path / "model", with_metrics=True, verify=False)
    assert asked <= set(written.manifest.metrics)


def test_the_command_line_declares_and_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "lenet")
    assert main(["image", "lenet", "-o", folder, "--metrics", "--no-verify"]) == 0
    assert main(["inspect", folder]) == 0
    shown = capsys.readouterr().out
    assert "accuracy (logits, y, logits)" in shown and "evaluate.onnx" in shown
