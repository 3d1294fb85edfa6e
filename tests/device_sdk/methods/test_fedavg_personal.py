"""The models that devices have to themselves, beside the same formulas in torch."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from aggregator.methods.fedavg import FedAvgBinding, FedAvgSettings
from device_sdk import Trainer
from device_sdk.artifact import load_artifact
from device_sdk.local_data import LocalData
from device_sdk.methods.fedavg.contract import FedAvgTraining, Personalise
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import LearnerError
from device_sdk.wire.arrays.exchange import Broadcast
from export import Adam, Optimizer, Sgd, train_step
from tests.fakes.personal_ladders import CLASSES, FEATURES, samples

RATE = 0.25
CHOICES: tuple[Personalise, ...] = ("fine-tuned", "ditto", "ala", "apfl")
WHOLE = FedAvgTraining(batch_size=0, epochs=2, learning_rate=RATE, mixing_samples=1.0)
"""All samples a step, so that their order does not matter."""


class Net(nn.Module):
    """Two layers and a norm over the batch, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.norm(self.body(x))))
        return found


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["x"])
    return cross_entropy(logits, batch["label"]), {"logits": logits}


def write(folder: Path, optimizer: Optimizer, model: nn.Module | None = None) -> Path:
    torch.manual_seed(3)
    example = {name: torch.from_numpy(each) for name, each in samples(99, 4).items()}
    train_step(
        model or Net(), loss, example, optimizer=optimizer, directory=folder, verify=False,
        dynamic={name: {0: "batch"} for name in example},
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("personal") / "net", Sgd(lr=0.1))


def learner(artifact: Path, place: int = 1, seed: int = 2) -> FedAvgLearner:
    trainer = Trainer(artifact, providers="cpu")
    data = LocalData(samples(place, 30))
    return FedAvgLearner(lambda: data, trainer, "", np.random.default_rng(seed))


def told(
    artifact: Path, training: FedAvgTraining, shift: float = 0.0, number: int = 1
) -> Broadcast:
    """The first model, each number of it moved by up to ``shift``."""
    binding = FedAvgBinding("fedavg", FedAvgSettings(training=training))
    method = binding.build(0, np.random.default_rng(0), [load_artifact(artifact)])
    sent, rng = method.open_round(number), np.random.default_rng(number)
    moved = {
        name: array + np.float32(shift) * rng.uniform(0, 1, array.shape).astype(np.float32)
        for name, array in sent.tensors.items()
    }
    return replace(sent, tensors=moved)


def in_torch(broadcast: Broadcast) -> Net:
    model = Net().double()
    with torch.no_grad():
        for prefix, tensors in (("w", model.named_parameters()), ("b", model.named_buffers())):
            for name, each in tensors:
                if f"{prefix}.{name}" in broadcast.tensors:
                    value = broadcast.tensors[f"{prefix}.{name}"].reshape(each.shape)
                    each.copy_(torch.from_numpy(value))
    return model


def gradients(model: nn.Module, data: dict[str, Any]) -> dict[str, Tensor]:
    """Of the loss on all samples; the statistics of the norm move."""
    model.zero_grad()
    batch = {"x": torch.from_numpy(data["x"]).double(), "label": torch.from_numpy(data["label"])}
    loss(model, batch)[0].backward()
    return {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def put(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(values[name])


def step(model: nn.Module, data: dict[str, Any]) -> None:
    found, now = gradients(model, data), parameters(model)
    put(model, {name: now[name] - RATE * found[name] for name in now})


def require_same(one: FedAvgLearner, model: nn.Module) -> None:
    """The device predicts with this model, statistics included."""
    for name, each in parameters(model).items():
        np.testing.assert_allclose(one.trainer.parameters[name], each.numpy(), atol=2e-5)
    for name in ("norm.running_mean", "norm.running_var"):
        wanted = model.get_buffer(name).numpy()
        np.testing.assert_allclose(one.trainer.buffers[name], wanted, atol=2e-5)


def test_ditto_is_algorithm_1(artifact: Path) -> None:
    training = replace(WHOLE, personalise="ditto", own_pull=0.4)
    one, data = learner(artifact), dict(samples(1, 30))
    own: Net | None = None
    for number in (1, 2):
        sent = told(artifact, training, 0.2, number)
        update = one.train(sent)
        shared = in_torch(sent)
        w = parameters(shared)
        own = own or in_torch(sent)
        for _ in range(2):
            step(shared, data)
            found, now = gradients(own, data), parameters(own)
            # The term's own step follows each one: equal to v - lr (g + lambda (v - w)) but for
            # lr squared, 1 / (1 + p) of the way from w.
            after = {name: now[name] - RATE * found[name] for name in now}
            stays = 1 / (1 + RATE * 0.4)
            put(own, {name: w[name] + stays * (after[name] - w[name]) for name in now})
        for name, each in parameters(shared).items():
            moved = (each - w[name]).reshape(update.tensors[f"w.{name}"].shape).numpy()
            np.testing.assert_allclose(update.tensors[f"w.{name}"], moved, atol=2e-5)
        require_same(one, own)


@pytest.mark.parametrize("mixed", ["", "head"])
def test_ala_is_equations_4_to_6(artifact: Path, mixed: str) -> None:
    training = replace(WHOLE, personalise="ala", mixed=mixed, mixing_rate=2.0, epochs=1)
    one, data = learner(artifact), dict(samples(1, 30))
    own: Net | None = None
    weights: dict[str, Tensor] = {}
    for number in (1, 2, 3):
        sent = told(artifact, training, 0.4, number)
        one.train(sent)
        start = in_torch(sent)
        if own is not None:
            v, w = parameters(own), parameters(start)
            names = [name for name in w if name.startswith(mixed)]
            weights = weights or {name: torch.ones_like(w[name]) for name in names}
            mix = {name: v[name] + (w[name] - v[name]) * weights[name] for name in names}
            trial = copy.deepcopy(start)
            put(trial, {**w, **mix})
            found = gradients(trial, data)
            for name in names:
                less = 2.0 * found[name] * (w[name] - v[name])
                weights[name] = (weights[name] - less).clamp(0, 1)
            put(start, {**w, **{n: v[n] + (w[n] - v[n]) * weights[n] for n in names}})
        own = start
        step(own, data)
        require_same(one, own)
    assert any((each < 1).any() for each in weights.values())


@pytest.mark.parametrize("adapts", [True, False])
def test_apfl_is_algorithm_1_and_equation_10(artifact: Path, adapts: bool) -> None:
    training = replace(WHOLE, personalise="apfl", own_share=0.3, own_share_adapts=adapts)
    one, data = learner(artifact), dict(samples(1, 30))
    v: dict[str, Tensor] = {}
    alpha, own = 0.3, Net().double()
    for number in (1, 2):
        sent = told(artifact, training, 0.2, number)
        update = one.train(sent)
        shared = in_torch(sent)
        first = w = parameters(shared)
        if not v:
            v, own = dict(w), in_torch(sent)
        for _ in range(2):
            put(own, {name: alpha * v[name] + (1 - alpha) * w[name] for name in w})
            found = gradients(own, data)
            slope = sum(float(((v[name] - w[name]) * found[name]).sum()) for name in w)
            v = {name: v[name] - RATE * alpha * found[name] for name in w}
            step(shared, data)
            w = parameters(shared)
            if adapts:
                alpha = min(max(alpha - RATE * slope, 0), 1)
        put(own, {name: alpha * v[name] + (1 - alpha) * w[name] for name in w})
        for name, each in w.items():
            moved = (each - first[name]).reshape(update.tensors[f"w.{name}"].shape).numpy()
            np.testing.assert_allclose(update.tensors[f"w.{name}"], moved, atol=2e-5)
        require_same(one, own)
    assert (alpha != 0.3) is adapts


@pytest.mark.parametrize("choice", CHOICES)
def test_a_device_that_was_killed_between_rounds_goes_on_as_one_that_was_not(
    artifact: Path, choice: Personalise
) -> None:
    training = replace(WHOLE, personalise=choice, batch_size=7)
    kept, fresh = learner(artifact), learner(artifact)
    for number in (1, 2, 3):
        sent = told(artifact, training, 0.3, number)
        fresh.train(sent)
        again = learner(artifact)
        if number > 1:
            again.restore(kept.state())
        again._rng = kept._rng
        again.train(sent)
        kept = again
        for name, array in fresh.state().items():
            np.testing.assert_array_equal(kept.state()[name], array)


@pytest.mark.parametrize("choice", CHOICES)
def test_what_fails_leaves_the_device_as_it_was(artifact: Path, choice: Personalise) -> None:
    training = replace(WHOLE, personalise=choice)
    one = learner(artifact)
    one.train(told(artifact, training))
    before = one.state()
    absurd = replace(training, learning_rate=1e3, epochs=40)
    broken = {**samples(1, 30)}
    broken["x"] = broken["x"] * np.float32(np.nan)
    one._data = lambda: LocalData(broken)
    with pytest.raises(LearnerError):
        one.train(told(artifact, absurd, number=2))
    after = one.state()
    assert set(before) == set(after)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)


def test_a_task_may_change_its_choice(artifact: Path) -> None:
    """What another choice kept is no part of a model."""
    one = learner(artifact)
    for number, choice in enumerate((*CHOICES, *CHOICES[::-1]), 1):
        one.train(told(artifact, replace(WHOLE, personalise=choice), 0.1, number))
        other = learner(artifact)
        other.restore(one.state())
        assert set(other.state()) == set(one.state())
        assert all(name.startswith(("trainer.", f"kept.{choice}.")) for name in one.state())


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(artifact: Path) -> None:
    one, other = learner(artifact), learner(artifact, seed=5)
    one.train(told(artifact, replace(WHOLE, personalise="apfl")))
    state, before = dict(one.state()), other.state()
    for odd in (np.zeros(6), np.full(6, np.nan, np.float32)):
        with pytest.raises(LearnerError, match=r"'kept\.apfl\.head\.bias'"):
            other.restore({**state, "kept.apfl.head.bias": odd})
    with pytest.raises(LearnerError):
        other.restore({name: array for name, array in state.items() if name != "trainer.step"})
    assert set(other.state()) == set(before)


@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_rehearsed_is_all_the_work_of_a_later_round(
    artifact: Path, choice: Personalise
) -> None:
    training = replace(WHOLE, personalise=choice, batch_size=10, mixing_samples=0.5)
    one = learner(artifact)
    steps = Counted(one)
    one.train(told(artifact, training))
    first = steps.taken()
    one.train(told(artifact, training, 0.1, 2))
    later = steps.taken()
    fresh = learner(artifact)
    before, steps = fresh.trainer.parameters, Counted(fresh)
    fresh.rehearse(told(artifact, training))
    assert steps.taken() == later >= first
    assert later == {"fine-tuned": 6, "ditto": 12, "ala": 8, "apfl": 12}[choice]
    if choice != "ala":
        for name, array in fresh.trainer.parameters.items():
            np.testing.assert_allclose(array, before[name], atol=1e-3)


class Counted:
    """Steps that a learner takes, since it was last asked."""

    def __init__(self, one: FedAvgLearner) -> None:
        self._taken = 0
        self._step = one.trainer.step
        one.trainer.step = self.step  # type: ignore[method-assign]

    def step(self, *given: Any, **named: Any) -> float:
        self._taken += 1
        return self._step(*given, **named)

    def taken(self) -> int:
        found, self._taken = self._taken, 0
        return found


@pytest.mark.parametrize("choice", CHOICES)
def test_the_last_version_takes_no_devices_own_model(artifact: Path, choice: Personalise) -> None:
    training = replace(WHOLE, personalise=choice)
    one = learner(artifact)
    assert one.adopt(told(artifact, training))  # it has none yet
    one.train(told(artifact, training))
    own = one.trainer.parameters["head.bias"]
    assert one.adopt(told(artifact, training, 0.5, 2)) is (choice == "fine-tuned")
    assert (one.trainer.parameters["head.bias"] == own).all() == (choice != "fine-tuned")
    # To be evaluated, it is received all the same.
    assert one.receive(told(artifact, training, 0.5, 2))
    assert (one.trainer.parameters["head.bias"] != own).any()


@settings(max_examples=5, deadline=None)
@given(
    share=st.floats(0, 1), pull=st.floats(0, 10), rate=st.floats(0.01, 100), seed=st.integers(0, 99)
)
def test_extremes_are_what_they_should_be(
    artifact: Path, share: float, pull: float, rate: float, seed: int
) -> None:
    """A share of 0 is the shared model; W stays within 0 and 1; what is sent is the same."""
    sent = told(artifact, WHOLE, 0.3, seed + 1)
    plain = learner(artifact, seed % 5).train(sent).tensors

    def trained(**more: Any) -> tuple[FedAvgLearner, Any]:
        one = learner(artifact, seed % 5)
        return one, one.train(replace(sent, settings=replace(WHOLE, **more).as_scalars())).tensors

    one, moved = trained(personalise="apfl", own_share=share)
    assert 0 <= float(one.state()["kept.apfl.own_share"]) <= 1
    for name, array in plain.items():
        np.testing.assert_allclose(moved[name], array, atol=1e-6)
    one, moved = trained(personalise="apfl", own_share=0.0, own_share_adapts=False)
    for name, array in one.trainer.parameters.items():
        arrived = sent.tensors[f"w.{name}"].reshape(array.shape)
        np.testing.assert_allclose(
            array, arrived + plain[f"w.{name}"].reshape(array.shape), atol=1e-6
        )
    _, moved = trained(personalise="ditto", own_pull=pull)
    for name, array in plain.items():
        np.testing.assert_allclose(moved[name], array, atol=1e-6)
    one, _ = trained(personalise="ala")
    again = replace(WHOLE, personalise="ala", mixing_rate=rate).as_scalars()
    one.train(replace(told(artifact, WHOLE, 0.9, seed + 2), settings=again))
    weights = [array for name, array in one.state().items() if name.startswith("kept.ala.")]
    assert weights and all((array >= 0).all() and (array <= 1).all() for array in weights)


def test_an_aggregator_that_knows_no_own_models_asks_for_none(artifact: Path) -> None:
    sent = told(artifact, WHOLE)
    settings = {n: v for n, v in sent.settings.items() if n not in FedAvgTraining.LATER}
    assert {"personalise", "own_pull"} <= sent.settings.keys() - settings.keys()
    earlier = learner(artifact).train(replace(sent, settings=settings)).tensors
    for name, array in learner(artifact).train(sent).tensors.items():
        np.testing.assert_array_equal(earlier[name], array)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"personalise": "dito"}, "personalise is 'dito'"),
        ({"personalise": "ditto", "personal": "head"}, "give one of the two"),
        ({"personalise": "ala", "optimizer_state": "kept"}, "set optimizer_state to 'fresh'"),
        ({"personalise": "apfl", "proximal_mu": 0.1}, "set proximal_mu to 0"),
        ({"personalise": "ala", "mixed": "head,"}, "mixed is 'head,'"),
        ({"personalise": "apfl", "own_share": 1.5}, "own_share is 1.5"),
        ({"personalise": "ala", "mixing_samples": 0.0}, "mixing_samples is 0.0"),
        ({"own_pull": -1.0}, "own_pull is -1.0"),
    ],
)
def test_settings_that_do_not_go_together_are_said(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FedAvgTraining(**more)


def test_an_artifact_that_does_not_suit_a_choice_is_said_at_both_ends(
    artifact: Path, tmp_path: Path
) -> None:
    adam = write(tmp_path / "adam", Adam(lr=0.1))
    for choice in ("ala", "apfl"):
        training = replace(WHOLE, personalise=choice)
        with pytest.raises(ValueError, match=r"depends on those before it \(adam\): export it"):
            told(adam, training)
        sent = replace(told(adam, WHOLE), settings=training.as_scalars())
        with pytest.raises(LearnerError, match="depends on those before it"):
            learner(adam).train(sent)
    learner(adam).train(told(adam, replace(WHOLE, personalise="ditto")))
    with pytest.raises(ValueError, match="mixed is 'haed', which names no parameter"):
        told(artifact, replace(WHOLE, personalise="ala", mixed="haed"))
