"""A label that is no class is refused by the step, as torch refuses it; ignored ones stay so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import export
from device_sdk import NonFiniteStep, Trainer
from export.losses import PENALTY, distillation, example_teachers

CLASSES = 4
IGNORED = -100
Loss = Callable[[Tensor, Tensor], Tensor]
TrainerOf = Callable[[str], tuple[torch.nn.Linear, Trainer]]

WEIGHT = torch.tensor([1.0, 2.0, 0.0, 1.5])
# Of torch, which ignore -100, and then others, which ignore nothing or something else.
LOSSES: dict[str, Loss] = {
    "mean": functional.cross_entropy,
    "sum": lambda o, y: functional.cross_entropy(o, y, reduction="sum"),
    "none": lambda o, y: functional.cross_entropy(o, y, reduction="none").mean(),
    "weighted": lambda o, y: functional.cross_entropy(o, y, weight=WEIGHT.to(o.dtype)),
    "smoothed": lambda o, y: functional.cross_entropy(o, y, label_smoothing=0.1),
    "smoothed_weighted": lambda o, y: functional.cross_entropy(
        o, y, weight=WEIGHT.to(o.dtype), label_smoothing=0.1
    ),
    "nll": lambda o, y: functional.nll_loss(torch.log_softmax(o, 1), y),
    "nll_weighted": lambda o, y: functional.nll_loss(
        torch.log_softmax(o, 1), y, weight=WEIGHT.to(o.dtype)
    ),
}
OTHERS: dict[str, Loss] = {
    "ignores_2": lambda o, y: functional.cross_entropy(o, y, ignore_index=2),
    "ignores_-1": lambda o, y: functional.cross_entropy(o, y, ignore_index=-1),
    "smoothed_ignores_2": lambda o, y: functional.cross_entropy(
        o, y, ignore_index=2, label_smoothing=0.1
    ),
    "ours": export.losses.cross_entropy,
    "ours_sum": lambda o, y: export.losses.cross_entropy(o, y, reduction="sum"),
    "ours_weighted": lambda o, y: export.losses.cross_entropy(
        o, y, weight=torch.ones_like(o[:, 0])
    ),
}


@pytest.fixture(scope="module")
def trainer_of(tmp_path_factory: pytest.TempPathFactory) -> TrainerOf:
    """Those of LOSSES and OTHERS, exported once each: a fresh model and a fresh trainer."""

    @functools.cache
    def exported(name: str) -> Path:
        folder = tmp_path_factory.mktemp("label") / "artifact"
        trainer_for({**LOSSES, **OTHERS}[name], folder)
        return folder

    return lambda name: (_model(), Trainer(exported(name)))


def _model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(6, CLASSES)


def trainer_for(loss: Loss, folder: Path) -> tuple[torch.nn.Linear, Trainer]:
    model = _model()
    export.train_step(
        model,
        lambda m, b: loss(m(b["x"]), b["label"]),
        {"x": torch.randn(8, 6), "label": torch.arange(8) % CLASSES},
        optimizer=export.Sgd(lr=0.1),
        dynamic={"x": {0: "batch"}, "label": {0: "batch"}},
        directory=folder,
    )
    return model, Trainer(folder)


def samples(*labels: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((len(labels), 6), dtype=np.float32)
    return {"x": x, "label": np.array(labels)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [*LOSSES, *OTHERS])
def test_a_label_that_is_no_class_is_refused(name: str, trainer_of: TrainerOf) -> None:
    _, trainer = trainer_of(name)
    trainer.step(samples(0, 1, 2, 3))
    before = {key: value.copy() for key, value in trainer.parameters.items()}
    wrong = [CLASSES, -2, -7, 10**12, -(2**63), 2**63 - 1]
    wrong += [] if name == "ignores_-1" else [-1]
    wrong += [] if name in LOSSES else [IGNORED]
    for label in wrong:
        for batch in (samples(label), samples(0, 3, label, 1), samples(0, 0, 0, label)):
            with pytest.raises(NonFiniteStep, match="labels that are no class"):
                trainer.step(batch)
    for key, value in trainer.parameters.items():
        np.testing.assert_array_equal(value, before[key])
    assert np.isfinite(trainer.step(samples(0, 1, 2, 3)))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [*LOSSES, "ignores_2", "ignores_-1", "smoothed_ignores_2"])
def test_what_is_ignored_is_ignored_as_torch_ignores_it(name: str, trainer_of: TrainerOf) -> None:
    loss = {**LOSSES, **OTHERS}[name]
    model, trainer = trainer_of(name)
    ignored = {"ignores_2": 2, "ignores_-1": -1, "smoothed_ignores_2": 2}.get(name, IGNORED)
    batch = samples(0, ignored, 3, 1, ignored)
    expected = loss(model(torch.from_numpy(batch["x"])), torch.from_numpy(batch["label"]))
    expected.backward()
    assert trainer.step(batch) == pytest.approx(expected.item(), rel=1e-5)
    moved = model.weight.detach() - 0.1 * model.weight.grad  # type: ignore[operator]
    np.testing.assert_allclose(trainer.parameters["weight"], moved.numpy(), rtol=1e-4, atol=1e-6)


def test_a_label_of_weight_zero_does_not_count(tmp_path: Path) -> None:
    # As whoever pads a batch to one length does it.
    _, trainer = trainer_for(
        lambda o, y: export.losses.cross_entropy(o, y, weight=(y >= 0).to(o.dtype)),
        tmp_path / "artifact",
    )
    start = trainer.state
    expected = trainer.step({name: array[:2] for name, array in samples(0, 3, 1).items()})
    moved = trainer.parameters["weight"].copy()
    trainer.set_state(start)
    padded = samples(0, 3, 1)
    padded["label"][2] = -1
    assert trainer.step(padded) == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(trainer.parameters["weight"], moved, rtol=1e-5)
    with pytest.raises(NonFiniteStep, match="labels that are no class"):
        trainer.step(samples(0, CLASSES))


def test_a_student_refuses_a_label_that_is_no_class(tmp_path: Path) -> None:
    teachers = example_teachers(CLASSES)
    export.train_step(
        torch.nn.Linear(6, CLASSES),
        distillation(lambda m, b: m(b["x"])),
        {"x": torch.randn(8, 6), "label": torch.arange(8) % CLASSES, **teachers},
        optimizer=export.Sgd(lr=0.1),
        gradient=PENALTY,
        dynamic={"x": {0: "batch"}, "label": {0: "batch"}},
        directory=tmp_path / "artifact",
    )
    trainer = Trainer(tmp_path / "artifact")
    others = {name: tensor.numpy() for name, tensor in teachers.items()}
    assert np.isfinite(trainer.step({**samples(0, 1), **others}))
    for label in (CLASSES, -1, IGNORED):
        with pytest.raises(NonFiniteStep):
            trainer.step({**samples(0, label), **others})
