from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import export
from aggregator.methods.attention import AttentionBinding, AttentionMethod, AttentionSettings
from benchmarks.simulation import Simulation, device_name
from device_sdk import Trainer
from device_sdk.artifact import load_artifact
from device_sdk.artifact.flat_layout import FlatLadder, FlatLayout, layout_of
from device_sdk.artifact.load import rung_folders
from device_sdk.local_data import LocalData
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.attention.learner import AttentionLearner
from device_sdk.methods.learner import Declined, LearnerError
from device_sdk.methods.local_steps import SampleStream
from device_sdk.wire.arrays.exchange import Broadcast
from export.build import Recipe
from export.models.attention_meta import MetaDesign, attention_recipe
from export.models.gru_classifier import DYNAMIC, classification, predicted_classes

TOLD = AttentionTraining(
    aggregator_mixes=False,
    warm_up_rounds=2,
    base_steps=10,
    batch_size=16,
    learning_rate=0.2,
    meta_every=5,
    sketch_rows=16,
)


def network(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ladder of a narrow and a wide model, and the meta-network of each."""
    folder, sgd = tmp_path_factory.mktemp("attention"), export.Sgd(lr=0.1)
    example = {"x": torch.randn(4, 2), "y": torch.randint(2, (4,))}
    export.submodels(
        network, classification, example, widths=(4, 6), optimizer=sgd, dynamic=DYNAMIC,
        directory=folder / "net", predict=predicted_classes, verify=False,
    )  # fmt: skip
    for name, hidden in (("narrow", 4), ("wide", 6)):
        base = Recipe(network(hidden), classification, example, DYNAMIC, sgd, predicted_classes)
        attention_recipe(base, MetaDesign(16, 4)).export(folder / f"{name}-meta", verify=False)
        (folder / name).symlink_to(folder / f"net/width-{hidden}")
    return folder


def samples(sign: int, seed: int, count: int = 60) -> LocalData:
    """Two concepts that contradict each other: the class is the sign of x[0], or the opposite."""
    x = np.random.default_rng(seed).standard_normal((count, 2)).astype(np.float32)
    return LocalData({"x": x, "y": (sign * x[:, 0] > 0).astype(np.int64)})


def learner(
    folder: Path, index: int, sign: int = 1, width: str = "narrow", placement: str = "device"
) -> AttentionLearner:
    data = samples(sign, index)
    return AttentionLearner(
        lambda: data,
        Trainer(folder / width),
        Trainer(folder / f"{width}-meta") if placement == "device" else None,
        device_name(index),
        np.random.default_rng(index),
        placement,  # type: ignore[arg-type]
    )


def layout(folder: Path, width: str = "narrow") -> FlatLayout:
    return layout_of(Trainer(folder / width).artifact)


def method(folder: Path, told: AttentionTraining = TOLD, widest: str = "narrow") -> AttentionMethod:
    names = ["narrow"] if widest == "narrow" else ["narrow", "wide"]
    ladder = FlatLadder.of([Trainer(folder / name).artifact for name in names])
    start = ladder.full.flatten(Trainer(folder / widest).parameters)
    return AttentionMethod(start, ladder, AttentionSettings(training=told))


def accuracy(one: AttentionLearner, sign: int) -> float:
    fresh = samples(sign, 999, 300).train
    found = one.show().predict({"x": fresh["x"]})["logits"].argmax(axis=1)
    return float((found == fresh["y"]).mean())


def after_rounds(one: AttentionMethod, learners: list[AttentionLearner], rounds: int) -> Broadcast:
    """The broadcast that the first learner would get next, attachments that it wants included."""
    simulation = Simulation(one, learners, np.random.default_rng(0))
    for _ in range(rounds):
        simulation.round()
    assert not simulation.failures
    opened = one.open_round(rounds + 1)
    offered = {
        name: 1
        for name, attachment in opened.attachments.items()
        if device_name(0) in opened.cohorts[attachment.cohort]
    }
    offer = replace(opened, attachments={}, cohorts={}, offered=offered)
    wanted = learners[0].wants(offer)
    return replace(offer, attachments={name: opened.attachments[name] for name in wanted})


def test_devices_learn_to_listen_to_their_like(artifacts: Path) -> None:
    signs = [1, 1, 1, -1, -1, -1]
    learners = [learner(artifacts, index, sign) for index, sign in enumerate(signs)]
    one = method(artifacts, replace(TOLD, meta_learning_rate=0.1))
    simulation = Simulation(one, learners, np.random.default_rng(0))
    for _ in range(15):
        simulation.round()
    assert not simulation.failures
    shares = []
    for index, each in enumerate(learners):
        late = each.scores
        assert late.round_id == 15
        assert device_name(index) not in late.neighbours
        np.testing.assert_allclose(late.first.sum(axis=1), 1.0, rtol=1e-4)
        like = [signs[int(name, 16)] == signs[index] for name in late.neighbours]
        assert np.mean(like) == 0.4
        shares.append(late.first.mean(axis=0)[like].sum())
        assert accuracy(each, signs[index]) > 0.9
    assert np.mean(shares) > 0.7


def test_the_warm_up_is_federated_averaging(artifacts: Path) -> None:
    learners = [learner(artifacts, index) for index in range(2)]
    one = method(artifacts)
    broadcast = one.open_round(1)
    assert learners[0].wants(broadcast) == []
    update = learners[0].train(broadcast)
    assert set(update.metadata) == {"samples", "mixture", "loss"}
    assert update.metadata["samples"] == 60
    same = Trainer(artifacts / "narrow")
    same.set_parameters(layout(artifacts).unflatten(one.shared))
    rng = np.random.default_rng(0)
    stream = SampleStream(samples(1, 0).train, 16, rng)
    for _ in range(10):
        same.step(stream.draw(), hyper={"lr": 0.2})
    np.testing.assert_array_equal(
        update.tensors["vector"], layout(artifacts).flatten(same.parameters)
    )
    assert learners[0].scores is None


def test_only_the_favoured_neighbours_are_fetched(artifacts: Path) -> None:
    learners = [learner(artifacts, index) for index in range(5)]
    broadcast = after_rounds(method(artifacts, replace(TOLD, neighbours=2)), learners, 2)
    assert len(broadcast.offered) == 5
    assert len(broadcast.attachments) == 2
    learners[0].train(broadcast)
    scores = learners[0].scores
    assert {f"vector.{name}" for name in scores.neighbours} == set(broadcast.attachments)


@pytest.mark.parametrize("layers", ["first", "second", "both"])
@pytest.mark.parametrize("own", [{}, {"include_self": True}, {"own_weight": 1.0}])
def test_layers_take_part_as_asked(artifacts: Path, layers: str, own: dict[str, float]) -> None:
    told = replace(TOLD, layers=layers, **own)  # type: ignore[arg-type]
    learners = [learner(artifacts, index) for index in range(3)]
    broadcast = after_rounds(method(artifacts, told), learners, 2)
    assert len(broadcast.attachments) == (0 if layers == "second" else 2)
    learners[0].train(broadcast)
    scores = learners[0].scores
    assert scores.first.shape == (len(scores.second), len(scores.neighbours))
    assert (device_name(0) in scores.neighbours) == (bool(own) and layers != "second")
    if layers != "second":
        np.testing.assert_allclose(scores.first.sum(axis=1), 1.0, rtol=1e-4)
    if own.get("own_weight") and layers != "second":
        favourite = scores.first[:, :-1].max(axis=1)
        np.testing.assert_allclose(scores.first[:, -1], favourite, rtol=1e-4)
    if layers == "first":
        np.testing.assert_array_equal(scores.second[:, 0], 1)


def test_a_meta_network_that_does_not_fit_is_refused(artifacts: Path) -> None:
    data = samples(1, 0)

    def build(meta: str) -> AttentionLearner:
        rng = np.random.default_rng(0)
        trainers = Trainer(artifacts / "narrow"), Trainer(artifacts / meta) if meta else None
        return AttentionLearner(lambda: data, *trainers, device_name(0), rng)

    assert build("narrow-meta").scores is None
    with pytest.raises(ValueError, match="not one for a base network of 22 parameters"):
        build("wide-meta")
    with pytest.raises(ValueError, match="is no meta-network: export one"):
        build("narrow")
    with pytest.raises(ValueError, match="needs the meta-network"):
        build("")


def test_a_weak_device_gets_its_mixture_and_nothing_else(artifacts: Path) -> None:
    learners = [learner(artifacts, 0, placement="aggregator")]
    learners += [learner(artifacts, index) for index in (1, 2)]
    broadcast = after_rounds(method(artifacts), learners, 2)
    assert set(broadcast.attachments) == {f"mixture.{device_name(0)}"}
    update = learners[0].train(broadcast)
    assert update.metadata["mixture"] is True
    given = broadcast.attachments[f"mixture.{device_name(0)}"].tensors["mixture"]
    one_step = np.abs(update.tensors["vector"] - given.astype(np.float32)).max()
    assert 0 < one_step < 3


def test_kept_groups_stay_the_devices_own(artifacts: Path) -> None:
    told = replace(TOLD, mix=False, keeps="2", learning_rate=1e-9)
    learners = [learner(artifacts, index) for index in range(3)]
    one = method(artifacts, replace(told, learning_rate=0.2))
    broadcast = after_rounds(one, learners, 2)
    own = learners[0].vector
    assert own is not None
    start, end = layout(artifacts).spans[1]
    slow = replace(broadcast, settings={**broadcast.settings, "learning_rate": 1e-9})
    found = learners[0].train(slow).tensors["vector"]
    np.testing.assert_allclose(found[start:end], own[start:end], atol=1e-6)
    np.testing.assert_allclose(found[:start], one.shared[:start], atol=1e-6)
    bad = replace(broadcast, settings={**broadcast.settings, "keeps": "9"})
    with pytest.raises(LearnerError, match="no parameter group '9'"):
        learners[0].train(bad)


def test_unequal_widths_learn_together(artifacts: Path) -> None:
    widths = ["narrow", "wide", "wide", "narrow"]
    learners = [learner(artifacts, index, width=width) for index, width in enumerate(widths)]
    one = method(artifacts, widest="wide")
    opened = after_rounds(one, learners, 5)
    assert [each.train(opened).metadata["rung"] for each in learners] == [1, 2, 2, 1]
    for each, width in zip(learners, widths, strict=True):
        assert each.vector.shape == (layout(artifacts, width).size,)
        assert accuracy(each, 1) > 0.8


def test_a_task_takes_the_rungs_of_one_ladder_of_slices_and_nothing_else(
    artifacts: Path, tmp_path: Path
) -> None:
    def build(*folders: Path) -> AttentionMethod:
        binding = AttentionBinding("attention", AttentionSettings(training=TOLD))
        rng = np.random.default_rng(0)
        return binding.build(0, rng, [load_artifact(folder) for folder in folders])

    def ladder(name: str, model: Any, **chosen: Any) -> list[Path]:
        example = {"x": torch.randn(20, 20), "y": torch.randint(2, (20,))}
        export.submodels(
            model, classification, example, optimizer=export.Sgd(lr=0.1), dynamic=DYNAMIC,
            directory=tmp_path / name, predict=predicted_classes, verify=False, **chosen,
        )  # fmt: skip
        return rung_folders(tmp_path / name)

    whole = build(artifacts / "narrow", artifacts / "wide")
    start = layout(artifacts, "wide").flatten(Trainer(artifacts / "wide").parameters)
    np.testing.assert_array_equal(whole.shared, start)
    small, full = (Trainer(artifacts / name).artifact for name in ("narrow", "wide"))
    assert full.submodel is not None
    third = replace(full, submodel=replace(full.submodel, rung=3, rungs=3))
    assert FlatLadder.of([small, third]).rungs == (1, 3)
    with pytest.raises(ValueError, match="not parts of one model"):
        build(artifacts / "narrow", artifacts / "wide-meta")
    with pytest.raises(ValueError, match="the full model last"):
        build(artifacts / "wide", artifacts / "narrow")
    with pytest.raises(ValueError, match="takes slices: export the ladder with widths="):
        build(*ladder("ranks", nn.Sequential(nn.Linear(20, 20)), ranks=(1 / 4, 1)))
    normed = ladder(
        "normed",
        lambda n: nn.Sequential(nn.Linear(20, n), nn.BatchNorm1d(n), nn.Linear(n, 2)),
        widths=(2, 4),
    )
    with pytest.raises(ValueError, match="is a buffer"):
        build(*normed)


def test_a_broadcast_of_another_release_is_told_as_such(artifacts: Path) -> None:
    one = learner(artifacts, 0)
    broadcast = after_rounds(method(artifacts), [one], 1)
    others = {name: said for name, said in broadcast.settings.items() if name != "ladder"}
    with pytest.raises(LearnerError, match=r"lacks 'ladder', .* different releases, update the"):
        one.train(replace(broadcast, settings=others))


def test_a_failed_round_changes_nothing(artifacts: Path) -> None:
    learners = [learner(artifacts, index) for index in range(3)]
    broadcast = after_rounds(method(artifacts), learners, 3)
    one = learners[0]
    before = one.state()
    cases = [
        replace(broadcast, settings={}),
        replace(broadcast, settings={**broadcast.settings, "ladder": "[]"}),
        replace(broadcast, tensors={**broadcast.tensors, "global": np.zeros(3, np.float32)}),
        replace(
            broadcast,
            tensors={
                **broadcast.tensors,
                "global": broadcast.tensors["global"] * np.float32("nan"),
            },
        ),
        replace(broadcast, tensors={**broadcast.tensors, "clusters": np.full(3, 7, np.int32)}),
        replace(
            broadcast,
            attachments={
                name: replace(attachment, tensors={"vector": np.zeros(2, np.float32)})
                for name, attachment in broadcast.attachments.items()
            },
        ),
        replace(broadcast, settings={**broadcast.settings, "folds": 61}),
    ]
    for case in cases:
        with pytest.raises((LearnerError, Declined)):
            one.train(case)
        after = one.state()
        assert set(after) == set(before)
        for name, array in after.items():
            np.testing.assert_array_equal(array, before[name])
    good = one._data
    x = np.zeros((60, 2), np.float32)
    x[-1] = np.inf
    one._data = lambda: LocalData({"x": x, "y": np.zeros(60, np.int64)})
    with pytest.raises(LearnerError):
        one.train(broadcast)
    for name, array in one.state().items():
        np.testing.assert_array_equal(array, before[name])
    one._data = good
    one.train(broadcast)


def test_a_restored_device_goes_on_bit_for_bit(artifacts: Path) -> None:
    learners = [learner(artifacts, index) for index in range(3)]
    broadcast = after_rounds(method(artifacts), learners, 3)
    again = learner(artifacts, 0)
    again.restore(learners[0].state())
    learners[0]._rng = np.random.default_rng(5)
    again._rng = np.random.default_rng(5)
    first, second = learners[0].train(broadcast), again.train(broadcast)
    np.testing.assert_array_equal(first.tensors["vector"], second.tensors["vector"])
    for name, array in learners[0].state().items():
        np.testing.assert_array_equal(array, again.state()[name])


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("vector", np.zeros(3, np.float32)),
        ("scores.first", np.zeros((1, 1), np.float32)),
        ("meta.keys", np.zeros(3, np.float32)),
        ("more", np.zeros(3, np.float32)),
    ],
)
def test_states_that_do_not_fit_are_refused(artifacts: Path, name: str, array: np.ndarray) -> None:
    learners = [learner(artifacts, index) for index in range(3)]
    after_rounds(method(artifacts), learners, 3)
    before = learners[0].state()
    with pytest.raises(LearnerError):
        learners[0].restore({**before, name: array})
    for key, value in learners[0].state().items():
        np.testing.assert_array_equal(value, before[key])


def test_a_device_that_was_never_heard_of_starts_from_the_global_model(artifacts: Path) -> None:
    learners = [learner(artifacts, index) for index in range(3)]
    broadcast = after_rounds(method(artifacts), learners, 3)
    late = learner(artifacts, 7)
    assert late.wants(broadcast) == []
    late.train(replace(broadcast, attachments={}))
    assert late.vector is not None
    assert late.scores is None


def test_what_is_evaluated_is_the_global_model_and_then_the_devices_own(artifacts: Path) -> None:
    learners = [learner(artifacts, index) for index in range(3)]
    one = method(artifacts)
    broadcast = after_rounds(one, learners, 3)
    thrown_away = learner(artifacts, 0)
    thrown_away.restore(learners[0].state())
    assert thrown_away.receive(broadcast) and thrown_away.personalises(broadcast)
    shown = layout(artifacts).flatten(thrown_away._trainer.parameters)
    np.testing.assert_allclose(shown, one.shared, atol=1e-3)
    own = learners[0]
    own.train(broadcast)
    assert own.vector is not None
    np.testing.assert_array_equal(layout(artifacts).flatten(own._trainer.parameters), own.vector)
    assert not np.allclose(own.vector, shown)
