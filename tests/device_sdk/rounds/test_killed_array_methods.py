"""Mutual learning and attention over a real broker, while everybody is killed once or twice.

The oracle is the simulator: the same devices' data, without broker, processes and deaths. Batches
hold all samples, so that chance decides about the order of sums alone; steps are counted exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import export
from aggregator.methods.attention import AttentionMethod, AttentionSettings
from aggregator.methods.method import Method
from aggregator.methods.mutual import MutualMethod, MutualSettings
from aggregator.methods.robust import unpack_updates
from benchmarks.simulation import Simulation
from device_sdk import Trainer
from device_sdk.artifact.flat_layout import FlatLadder
from device_sdk.home.home import Home
from device_sdk.methods.attention.contract import AttentionTraining
from device_sdk.methods.attention.learner import AttentionLearner
from device_sdk.methods.learner import Learner
from device_sdk.methods.local_steps import predict_all
from device_sdk.methods.mutual.contract import (
    MutualTraining,
    encode_samples,
    encode_soft_labels,
    sample_entries,
    samples_mark,
)
from device_sdk.methods.mutual.learner import MutualLearner
from device_sdk.methods.state import part
from device_sdk.wire.arrays.exchange import Update
from export.build import Recipe
from export.models.attention_meta import MetaDesign, attention_recipe
from export.models.gru_classifier import DYNAMIC, classification, predicted_classes
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.array_device import classed_data, shared_data
from tests.fakes.handmade import FEATURES, TARGETS
from tests.fakes.killed_rounds import (
    DEVICES,
    ROUNDS,
    Death,
    final_state,
    make_home,
    run_with_deaths_at,
)
from tests.fakes.mutual_artifact import write_mutual_artifact

Arrays = Mapping[str, NDArray[Any]]
DEVICE_DEATHS: Sequence[Death] = (
    ("in the device's transaction", 3),
    ("while fetching", 5),
    ("before a receipt is settled", 4),
)
SERVER_DEATHS: Sequence[Death] = (
    ("between commit and absorb", DEVICES + 2),
    ("in the close's transaction", 2),
    ("in the update's transaction", 2),
)
MUTUAL = MutualTraining(
    TARGETS, local_steps=3, batch_size=64, public_batch=8, sample_form="float32"
)
ATTENTION = AttentionTraining(
    aggregator_mixes=False,
    warm_up_rounds=2,
    base_steps=4,
    batch_size=64,
    learning_rate=0.2,
    folds=2,
    meta_every=2,
    meta_batch_size=64,
    sketch_rows=16,
)


def name_and_state(folder: Path) -> tuple[str, Arrays]:
    """Who a device is for the others, and what it keeps of the method."""
    home = Home(folder)
    try:
        membership, state = home.membership.load(), home.models.learner("default")
        assert membership is not None and state is not None
        return membership.grant.device_id.hex(), state
    finally:
        home.close()


def _last(state: Arrays, book: str) -> dict[str, Update]:
    """Of each device the update that a method keeps of it, in ``PARTS`` ``book``."""
    return {update.sender: update for update in unpack_updates(part(f"{book}.", state))}


def _without(state: Arrays, *books: str) -> Arrays:
    """But for what a method keeps of single devices, which is compared with theirs."""
    return {name: each for name, each in state.items() if name.partition(".")[0] not in books}


def assert_equal(found: Arrays, expected: Arrays) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def simulated(method: Method, learners: Sequence[Learner], names: Sequence[str]) -> list[Arrays]:
    """All rounds without a death; the learners' states."""
    simulation = Simulation(method, learners, np.random.default_rng(0), names=names)
    for _ in range(ROUNDS):
        assert simulation.round().participants == DEVICES
    assert not simulation.failures
    return [learner.state() for learner in learners]


def assert_same(found: Arrays, expected: Arrays) -> None:
    """Whole numbers to the last one, others but for the order of sums."""
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        if array.dtype.kind == "f":
            np.testing.assert_allclose(found[name], array, rtol=2e-3, atol=2e-4, err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.slow
def test_killed_devices_learn_mutually_as_if_nobody_had_died(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    artifact = write_mutual_artifact(tmp_path / "linear")
    home = make_home(tmp_path, mosquitto.url, method="mutual", settings=MUTUAL.as_scalars())
    folders, _ = run_with_deaths_at(
        home, mosquitto.url, tmp_path, "shared", devices=DEVICE_DEATHS, server=SERVER_DEATHS
    )
    found = final_state(home)
    kept = [name_and_state(folder) for folder in folders]
    # What was shared is there bit for bit and nothing else, the labels being those of the model
    # that the device keeps.
    trainer = Trainer(artifact)
    public, labels = (_last(found, book) for book in ("public", "labels"))
    assert public.keys() == labels.keys() == {name for name, _ in kept}
    for place, (name, state) in enumerate(kept):
        shared = shared_data(place).public
        samples = encode_samples(shared, MUTUAL.sample_form)
        assert_equal(public[name].tensors, samples)
        assert samples_mark(samples) in public[name].metadata.values()
        trainer.set_state({each.removeprefix("trainer."): array for each, array in state.items()})
        predicted = predict_all(trainer, shared, MUTUAL.output)
        assert_equal(labels[name].tensors, encode_soft_labels(predicted, MUTUAL.label_form))
        assert labels[name].round_id == ROUNDS
    learners = [
        MutualLearner(
            lambda place=place: shared_data(place),  # type: ignore[misc]
            Trainer(artifact),
            name,
            np.random.default_rng(place),
        )
        for place, (name, _) in enumerate(kept)
    ]
    entries = sample_entries(trainer.artifact)
    method = MutualMethod(entries, MutualSettings(MUTUAL))
    expected = simulated(method, learners, [name for name, _ in kept])
    for (_, state), wanted in zip(kept, expected, strict=True):
        assert_same(state, wanted)
    assert_same(*(_without(state, "public", "labels") for state in (found, method.state())))


def write_classifier(folder: Path) -> None:
    """A linear softmax in ``linear``, and the meta-network that mixes such in ``meta``."""
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, TARGETS)
    example = {"x": torch.randn(5, FEATURES), "y": torch.arange(5) % TARGETS}
    base = Recipe(model, classification, example, DYNAMIC, export.Sgd(lr=0.1), predicted_classes)
    base.export(folder / "linear", verify=False)
    design = MetaDesign(ATTENTION.sketch_rows, width=4)
    attention_recipe(base, design).export(folder / "meta", verify=False)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_killed_devices_attend_to_each_other_as_if_nobody_had_died(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    write_classifier(tmp_path)
    home = make_home(
        tmp_path,
        mosquitto.url,
        method="attention",
        settings=ATTENTION.as_scalars(),
        task=f'companions = ["{tmp_path / "meta"}"]',
        table="half = false",
    )
    folders, _ = run_with_deaths_at(
        home, mosquitto.url, tmp_path, "classed", devices=DEVICE_DEATHS, server=SERVER_DEATHS
    )
    found = final_state(home)
    kept = {
        name: (place, state) for place, (name, state) in enumerate(map(name_and_state, folders))
    }
    last = _last(found, "last")
    names = list(last)
    assert sorted(names) == sorted(kept)
    for name, update in last.items():
        place, state = kept[name]
        # The vector that was counted last is the one that its device keeps, bit for bit.
        (vector,) = (array for array in update.tensors.values() if array.ndim == 1)
        np.testing.assert_array_equal(vector, state["vector"])
        assert classed_data(place).samples in update.metadata.values()
    learners = [
        AttentionLearner(
            lambda name=name: classed_data(kept[name][0]),  # type: ignore[misc]
            Trainer(tmp_path / "linear"),
            Trainer(tmp_path / "meta"),
            name,
            np.random.default_rng(0),
        )
        for name in names
    ]
    trainer = Trainer(tmp_path / "linear")
    ladder = FlatLadder.of([trainer.artifact])
    settings = AttentionSettings(training=ATTENTION, half=False)
    method = AttentionMethod(ladder.full.flatten(trainer.parameters), ladder, settings)
    expected = simulated(method, learners, names)
    for name, wanted in zip(names, expected, strict=True):
        assert_same(kept[name][1], wanted)
    assert_same(*(_without(state, "last") for state in (found, method.state())))
