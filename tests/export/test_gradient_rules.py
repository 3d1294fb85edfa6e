"""Several losses in one step: mutual learning's projection, the weight penalty, a broken rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import export
from device_sdk import Trainer
from export.gradient_rules import Gradients
from export.models.images import image_model
from export.models.mutual import example_batch, mutual_recipe

LR = 0.1


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mutual") / "lenet"
    exported = mutual_recipe("lenet").export(folder, optimizer=export.Sgd(lr=LR))
    conflicts = [c for c in exported.report.comparisons if c.tensor == "output.conflict"]  # type: ignore[union-attr]
    assert conflicts
    return folder


def _gradient(loss: Tensor, model: nn.Module) -> np.ndarray:
    named = dict(sorted(model.named_parameters()))
    parts = torch.autograd.grad(loss, list(named.values()))
    return torch.cat([part.reshape(-1) for part in parts]).numpy()


def _oracle(batch: Mapping[str, Tensor]) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
    """Local and public gradient as flat vectors, and both losses, written from the equations."""
    model = image_model("lenet")
    p_local = torch.softmax(model(batch["x"]), -1)
    local = -torch.log(p_local[torch.arange(len(p_local)), batch["y"]]).mean()
    p = torch.softmax(model(batch["x_pub"]), -1)
    t = batch["teacher"]
    kl = (t * (torch.log(t) - torch.log(p))).sum(1)
    ce = -torch.log(p[torch.arange(len(p)), batch["y_pub"]])
    public = (batch["weight_kl"] * batch["confidence"] * kl + batch["weight_ce"] * ce).mean()
    return _gradient(local, model), _gradient(public, model), local.detach(), public.detach()


def _stepped(folder: Path, batch: Mapping[str, Tensor]) -> tuple[np.ndarray, float, dict]:
    """The gradient that the step used, its loss and outputs."""
    trainer = Trainer(folder, providers="cpu")
    before = trainer.parameters
    loss = trainer.step({name: value.numpy() for name, value in batch.items()})
    moved = [
        (before[n] - after).reshape(-1) / LR for n, after in sorted(trainer.parameters.items())
    ]
    return np.concatenate(moved), loss, trainer.outputs


def _close(got: np.ndarray, want: np.ndarray) -> None:
    assert np.linalg.norm(got - want) <= 2e-5 * np.linalg.norm(want)


def test_a_conflicting_public_gradient_is_projected_over_the_whole_vector(mutual: Path) -> None:
    batch = example_batch(batch=11, public=5, seed=3)
    batch["weight_local"] = torch.tensor(0.0)
    local, public, _, public_loss = _oracle(batch)
    inner = float(local @ public)
    assert inner < 0, "choose a batch whose gradients conflict"
    step, loss, outputs = _stepped(mutual, batch)
    projected = public - inner / (local @ local) * local
    _close(step, projected)
    assert abs(step @ local) < 1e-4 * np.linalg.norm(step) * np.linalg.norm(local)
    assert outputs["conflict"] == 1.0
    np.testing.assert_allclose(outputs["inner_product"], inner, rtol=1e-4)
    np.testing.assert_allclose(loss, public_loss, rtol=1e-5)

    batch["project"] = torch.tensor(0.0)
    step, _, outputs = _stepped(mutual, batch)
    _close(step, public)
    assert outputs["conflict"] == 1.0, "a conflict is reported also where nothing is projected"


def test_gradients_that_agree_stay_as_they_are(mutual: Path) -> None:
    batch = example_batch(batch=6, public=6)
    batch["x_pub"], batch["y_pub"] = batch["x"], batch["y"]
    batch["weight_local"] = torch.tensor(0.25)
    local, public, local_loss, public_loss = _oracle(batch)
    step, loss, outputs = _stepped(mutual, batch)
    _close(step, 0.25 * local + public)
    assert outputs["conflict"] == 0.0 and outputs["inner_product"] > 0
    np.testing.assert_allclose(loss, 0.25 * local_loss + public_loss, rtol=1e-5)
    np.testing.assert_allclose(outputs["local_loss"], local_loss, rtol=1e-5)
    np.testing.assert_allclose(outputs["public_loss"], public_loss, rtol=1e-5)


def test_weights_choose_the_kind_of_step(mutual: Path) -> None:
    batch = example_batch(batch=6, public=1)
    batch["teacher"], batch["confidence"] = torch.zeros(1, 10), torch.zeros(1)
    batch["weight_local"], batch["weight_public"] = torch.tensor(1.0), torch.tensor(0.0)
    step, loss, _ = _stepped(mutual, batch)
    model = image_model("lenet")
    alone = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    _close(step, _gradient(alone, model))
    np.testing.assert_allclose(loss, alone.item(), rtol=1e-5)

    fedmd = example_batch(batch=1, public=7)
    fedmd.update(weight_local=torch.tensor(0.0), weight_ce=torch.tensor(0.0))
    fedmd.update(project=torch.tensor(0.0), confidence=torch.ones(7))
    step, _, _ = _stepped(mutual, fedmd)
    log_p = torch.log_softmax(model(fedmd["x_pub"]), -1)
    divergence = torch.nn.functional.kl_div(log_p, fedmd["teacher"], reduction="batchmean")
    _close(step, _gradient(divergence, model))


def test_a_local_gradient_of_zero_conflicts_with_nothing(tmp_path: Path) -> None:
    model = nn.Linear(3, 1, bias=False)

    def losses(m: nn.Module, b: dict[str, Tensor]) -> dict[str, Tensor]:
        score = m(b["x"]).mean()
        return {"local": b["scale"] * score, "public": score}

    batch = {
        "x": torch.ones(4, 3),
        "scale": torch.tensor(-1.0),
        **{name: torch.tensor(1.0) for name in ("weight_local", "weight_public", "project")},
    }
    export.train_step(
        model,
        losses,
        batch,
        optimizer=export.Sgd(lr=1.0),
        dynamic={"x": {0: "batch"}},
        predict=lambda m, b: {"score": m(b["x"])},
        gradient=export.ConflictProjection(),
        directory=tmp_path / "a",
    )
    trainer = Trainer(tmp_path / "a", providers="cpu")
    given = {name: value.numpy() for name, value in batch.items()}
    start = trainer.parameters["weight"]
    trainer.step({**given, "scale": np.float32(0)})
    np.testing.assert_allclose(start - trainer.parameters["weight"], 1.0, rtol=1e-5)
    assert trainer.outputs["conflict"] == 0
    # Opposite gradients: nothing of the public one is left.
    start = trainer.parameters["weight"]
    trainer.step({**given, "weight_local": np.float32(0)})
    np.testing.assert_allclose(trainer.parameters["weight"], start, atol=1e-6)
    assert trainer.outputs["conflict"] == 1


def test_the_weight_penalty_is_part_of_gradient_and_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # One parameter above the packing limit, so that there are two state tensors.
    model = nn.Sequential(nn.Linear(70, 1000), nn.Tanh(), nn.Linear(1000, 1))
    batch = {"x": torch.randn(5, 70), "l2": torch.tensor(0.3)}

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return m(b["x"]).pow(2).mean()

    export.train_step(
        model,
        loss,
        batch,
        optimizer=export.Sgd(lr=LR),
        dynamic={"x": {0: "batch"}},
        gradient=export.WeightPenalty("l2"),
        directory=tmp_path / "a",
    )
    step, value, _ = _stepped(tmp_path / "a", batch)
    total = loss(model, batch) + 0.15 * sum(p.pow(2).sum() for p in model.parameters())
    _close(step, _gradient(total, model))
    np.testing.assert_allclose(value, total.item(), rtol=1e-5)


@dataclass(frozen=True)
class _FirstOnly:
    """Breaks the protocol: one gradient too few."""

    def combine(
        self,
        losses: Mapping[str, Tensor],
        gradients: Mapping[str, Gradients],
        parameters: Gradients,
        batch: Mapping[str, Tensor],
    ) -> export.StepDirection:
        return export.StepDirection(losses["loss"], list(gradients["loss"])[:0])


def test_what_does_not_fit_a_rule_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    batch = {"x": torch.ones(3, 2)}

    def attempt(loss: object, rule: export.GradientRule | None) -> None:
        export.train_step(
            model,
            loss,  # type: ignore[arg-type]
            batch,
            optimizer=export.Sgd(),
            dynamic={},
            gradient=rule,
            directory=tmp_path / "a",
        )

    with pytest.raises(export.ExportError, match=r"several losses .a, b.*gradient="):
        attempt(lambda m, b: {"a": m(b["x"]).mean(), "b": m(b["x"]).sum()}, None)
    with pytest.raises(export.ExportError, match=r"losses named loss.*'local'"):
        attempt(lambda m, b: m(b["x"]).mean(), export.ConflictProjection())
    with pytest.raises(export.ExportError, match="needs batch entries project, weight_local"):
        attempt(
            lambda m, b: {"local": m(b["x"]).mean(), "public": m(b["x"]).sum()},
            export.ConflictProjection(),
        )
    with pytest.raises(export.ExportError, match="batch entry 'decay'"):
        attempt(lambda m, b: m(b["x"]).mean(), export.WeightPenalty("decay"))
    with pytest.raises(export.ExportError, match="the loss 'public' is"):
        attempt(
            lambda m, b: {"local": m(b["x"]).mean(), "public": m(b["x"])},
            export.ConflictProjection(),
        )
    with pytest.raises(export.ExportError, match=r"returned gradients of shapes \[\]"):
        attempt(lambda m, b: m(b["x"]).mean(), _FirstOnly())
