from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import device_sdk
from aggregator.methods.fedavg import FedAvgBinding, FedAvgMethod, FedAvgSettings
from aggregator.methods.method import ModelMismatch
from device_sdk.artifact import load_artifact
from device_sdk.local_data import LocalData
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import LearnerError
from device_sdk.wire.arrays.exchange import Broadcast
from export import Sgd, train_step
from export.losses import proximal, with_anchor
from tests.fakes.handmade import FEATURES, TARGETS, linear_artifact

SGD = FedAvgTraining(epochs=1, batch_size=0, learning_rate=0.25)


def local_data(count: int, seed: int = 0) -> LocalData:
    rng = np.random.default_rng(seed)
    return LocalData(
        {
            "x": rng.standard_normal((count, FEATURES), dtype=np.float32),
            "y": rng.standard_normal((count, TARGETS), dtype=np.float32),
        }
    )


def learner(folder: Path, data: LocalData) -> FedAvgLearner:
    if not (folder / "linear").exists():
        linear_artifact(folder / "linear")
    trainer = device_sdk.Trainer(folder / "linear", providers="cpu")
    return FedAvgLearner(lambda: data, trainer, "", np.random.default_rng(2))


def opened(one: FedAvgLearner, training: FedAvgTraining, round_id: int = 1) -> Broadcast:
    method = FedAvgMethod(
        one.trainer.parameters,
        one.trainer.buffers,
        FedAvgSettings(training=training),
        one.trainer.artifact.frozen_members,
    )
    return method.open_round(round_id)


def test_fedsgd_sends_one_full_gradient_step(tmp_path: Path) -> None:
    data = local_data(20)
    one = learner(tmp_path, data)
    weight, bias = (one.trainer.parameters[f"linear.{part}"] for part in ("weight", "bias"))
    update = one.train(opened(one, SGD))
    x, y = data.train["x"].astype(float), data.train["y"].astype(float)
    error = x @ weight + bias - y
    gradient = 2 * x.T @ error / error.size
    np.testing.assert_allclose(update.tensors["w.linear.weight"], -0.25 * gradient, atol=1e-6)
    np.testing.assert_allclose(
        update.tensors["w.linear.bias"], -0.25 * 2 * error.sum(0) / error.size, atol=1e-6
    )
    np.testing.assert_allclose(update.tensors["b.mean"], 0.1 * (x.mean(0) - 0.5), atol=1e-6)
    assert update.metadata == {"samples": 20, "loss": pytest.approx(float(np.mean(error**2)))}


def test_the_update_is_the_difference_from_what_arrived(tmp_path: Path) -> None:
    one = learner(tmp_path, local_data(30))
    training = FedAvgTraining(epochs=2, batch_size=8, weighting="uniform")
    sent = opened(one, training)
    rounded = {n: a.astype(np.float16).astype(np.float32) for n, a in sent.tensors.items()}
    update = one.train(replace(sent, tensors=rounded))
    assert set(update.metadata) == {"loss"}
    for name, array in {**one.trainer.parameters, "mean": one.trainer.buffers["mean"]}.items():
        wire = f"{'b' if name == 'mean' else 'w'}.{name}"
        np.testing.assert_allclose(rounded[wire] + update.tensors[wire], array, atol=1e-6)


def test_fresh_rounds_repeat_and_kept_momenta_do_not(tmp_path: Path) -> None:
    one = learner(tmp_path, local_data(12))
    first = opened(one, SGD)
    fresh = [one.train(first).tensors["w.linear.weight"] for _ in range(2)]
    np.testing.assert_allclose(fresh[0], fresh[1], atol=1e-6)  # the samples' order differs
    assert one.trainer.step_count == 1
    kept = replace(first, settings=replace(SGD, optimizer_state="kept").as_scalars())
    again = one.train(kept).tensors["w.linear.weight"]
    assert one.trainer.step_count == 2
    assert np.abs(again - fresh[0]).max() > 1e-3


def test_the_proximal_term_holds_devices_back(tmp_path: Path) -> None:
    one = learner(tmp_path, local_data(40))
    training = FedAvgTraining(epochs=5, batch_size=10, learning_rate=0.05)
    sent = opened(one, training)
    lengths = []
    for mu in (0.0, 1.0, 100.0):
        settings = replace(training, proximal_mu=mu).as_scalars()
        update = one.train(replace(sent, settings=settings))
        lengths.append(float(np.linalg.norm(update.tensors["w.linear.weight"])))
    assert lengths[0] > 1.05 * lengths[1] > 5 * lengths[2] > 0


def test_a_term_inside_the_graph_pulls_towards_what_arrived(tmp_path: Path) -> None:
    """One step of a linear model: w' = w - lr (g + mu (w - anchor)), and w is the anchor at first.

    Two steps tell: the second one is pulled back by lr mu (w1 - w0).
    """
    torch.manual_seed(0)
    model = with_anchor(torch.nn.Linear(FEATURES, TARGETS))

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        error = model(batch["x"]) - batch["y"]
        return (error * error).mean() + proximal(model, batch["mu"])

    data = local_data(16)
    example = {name: torch.from_numpy(array.copy()) for name, array in data.train.items()}
    train_step(
        model,
        loss,
        {**example, "mu": torch.tensor(0.5)},
        optimizer=Sgd(lr=0.1),
        dynamic={"x": {0: "batch"}, "y": {0: "batch"}},
        directory=tmp_path / "anchored",
        verify=False,
    )
    trainer = device_sdk.Trainer(tmp_path / "anchored", providers="cpu")
    one = FedAvgLearner(lambda: data, trainer, "", np.random.default_rng(0))
    training = FedAvgTraining(epochs=2, batch_size=0)
    sent = opened(one, training)
    assert set(sent.tensors) == {"w.weight", "w.bias"}
    moved = {}
    for mu in (0.0, 2.0):
        settings = replace(training, proximal_mu=mu).as_scalars()
        moved[mu] = one.train(replace(sent, settings=settings)).tensors["w.weight"]
    first = one.train(replace(sent, settings=replace(training, epochs=1).as_scalars()))
    pulled = moved[0.0] - 0.1 * 2.0 * first.tensors["w.weight"]
    np.testing.assert_allclose(moved[2.0], pulled, atol=1e-6)


def test_personal_layers_stay_and_are_not_sent(tmp_path: Path) -> None:
    one = learner(tmp_path, local_data(16))
    training = replace(SGD, personal="linear.bias")
    sent = opened(one, training)
    assert set(sent.tensors) == {"w.linear.weight", "b.mean"}
    before = one.trainer.parameters["linear.bias"]
    update = one.train(sent)
    assert set(update.tensors) == {"w.linear.weight", "b.mean"}
    trained = one.trainer.parameters["linear.bias"]
    assert not np.array_equal(before, trained)
    one.adopt(sent)
    np.testing.assert_array_equal(one.trainer.parameters["linear.bias"], trained)
    np.testing.assert_array_equal(
        one.trainer.parameters["linear.weight"], sent.tensors["w.linear.weight"]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {n: a for n, a in t.items() if n != "b.mean"}, "lacks tensor 'b.mean'"),
        (lambda t: {**t, "w.more": t["b.mean"]}, "unknown tensor 'w.more'"),
        (lambda t: {**t, "b.mean": t["b.mean"][:-1]}, "expected float32"),
        (lambda t: {**t, "b.mean": t["b.mean"] * np.float32(np.nan)}, "not finite"),
    ],
)
def test_a_broadcast_that_does_not_fit_changes_nothing(tmp_path, change, message) -> None:  # type: ignore[no-untyped-def]
    one = learner(tmp_path, local_data(4))
    sent = opened(one, SGD)
    before = one.state()
    with pytest.raises(LearnerError, match=message):
        one.train(replace(sent, tensors=change(dict(sent.tensors))))
    after = one.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_no_samples_and_missing_settings_are_said(tmp_path: Path) -> None:
    one = learner(tmp_path, local_data(0))
    with pytest.raises(LearnerError, match="no local samples"):
        one.train(opened(one, SGD))
    one = learner(tmp_path, local_data(3))
    with pytest.raises(LearnerError, match="lacks the training settings"):
        one.train(replace(opened(one, SGD), settings={}))
    with pytest.raises(LearnerError, match="names no parameter"):
        one.train(replace(opened(one, SGD), settings=replace(SGD, personal="head").as_scalars()))


def test_state_goes_round_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    one, other = learner(tmp_path, local_data(9)), learner(tmp_path, local_data(9))
    training = replace(SGD, optimizer_state="kept")
    one.train(opened(one, training))
    state = one.state()
    other.restore(state)
    sent = opened(one, training)
    moved, same = (each.train(sent).tensors["w.linear.weight"] for each in (one, other))
    np.testing.assert_allclose(moved, same, atol=1e-6)
    with pytest.raises(LearnerError, match="expected"):
        other.restore({**state, "trainer.more": np.zeros(1, np.float32)})
    with pytest.raises(LearnerError, match="does not fit"):
        other.restore({**state, "trainer.packed": np.zeros(3, np.float32)})


class Adapted(torch.nn.Module):
    """A frozen layer with a trained adapter of rank 2 beside it (LoRA), and batch norm behind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = torch.nn.Linear(FEATURES, 64)
        self.base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(2, FEATURES))
        self.up = torch.nn.Parameter(torch.zeros(64, 2))
        self.norm = torch.nn.BatchNorm1d(64)
        self.head = torch.nn.Linear(64, TARGETS)
        self.head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.base(x) + x @ self.down.T @ self.up.T))
        return found


def test_what_is_frozen_came_with_the_artifact_and_travels_no_more(tmp_path: Path) -> None:
    data = local_data(20)
    train_step(
        Adapted(),
        lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(),
        {name: torch.from_numpy(array.copy()) for name, array in data.train.items()},
        optimizer=Sgd(lr=0.1),
        dynamic={"x": {0: "batch"}, "y": {0: "batch"}},
        directory=tmp_path / "adapted",
        verify=False,
    )
    artifact = load_artifact(tmp_path / "adapted")
    rng = np.random.default_rng(0)
    method = FedAvgBinding("fedavg", FedAvgSettings(training=SGD)).build(0, rng, [artifact])
    trainer = device_sdk.Trainer(tmp_path / "adapted", providers="cpu")
    one = FedAvgLearner(lambda: data, trainer, "", rng)
    broadcast = method.open_round(1)
    update = one.train(broadcast)
    trained = {"w.up", "w.down", "w.norm.weight", "w.norm.bias"}
    assert set(update.tensors) == trained | {"b.norm.running_mean", "b.norm.running_var"}
    assert set(broadcast.tensors) == set(update.tensors)
    assert update.exact == broadcast.exact == {"b.norm.running_mean", "b.norm.running_var"}
    method.check(update)
    method.absorb(update)
    assert method.close_round().version == 1
    # A whole model may begin a task, if what is frozen in it is the artifact's.
    frozen = {"base.weight", "base.bias", "head.weight", "head.bias"}
    assert artifact.manifest.frozen_members == frozen and not frozen & set(method.model)
    method.begin_with({**artifact.initial, **method.model})
    other = {**method.model, "head.bias": np.ones(TARGETS, np.float32)}
    with pytest.raises(ModelMismatch, match=r"'head.bias' is frozen.*export the artifact from"):
        method.begin_with(other)
