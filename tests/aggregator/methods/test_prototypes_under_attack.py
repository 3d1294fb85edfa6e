"""One hostile device's prototypes, and the models of devices that nobody can roll back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from aggregator.methods.prototypes import PrototypesMethod, PrototypesSettings
from device_sdk.local_data import LocalData
from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.prototypes.contract import PrototypesTraining, encode_prototypes
from device_sdk.methods.prototypes.learner import PrototypesLearner
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Update
from export.models.prototypes import prototypes_recipe

DEVICES, EACH, ROUNDS, HOSTILE_ROUND = 5, 120, 9, 4
TRAINING = PrototypesTraining(10, width=64, epochs=2, pull=1.0)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prototypes") / "lenet"
    prototypes_recipe("lenet").export(folder)
    return folder


def digits() -> tuple[np.ndarray, np.ndarray]:
    """The 8 x 8 digits as pictures of 28 x 28, in a fixed order."""
    pictures, labels = load_digits(return_X_y=True)
    small = (pictures / 16).astype(np.float32).reshape(-1, 8, 8)
    large = np.pad(np.kron(small, np.ones((3, 3), np.float32)), ((0, 0), (2, 2), (2, 2)))
    order = np.random.default_rng(0).permutation(len(labels))
    return large[order][:, None], labels.astype(np.int64)[order]


def own_accuracy(artifact: Path, evil: float) -> float:
    """The honest devices' own models', mean, where the first device sends ``evil`` in all numbers
    of one update."""
    pictures, labels = digits()
    method = PrototypesMethod(PrototypesSettings(TRAINING), np.random.default_rng(1))
    learners = []
    for place in range(DEVICES):
        rows = slice(place * EACH, (place + 1) * EACH)
        data = LocalData({"x": pictures[rows], "label": labels[rows]})
        learners.append(
            PrototypesLearner(
                lambda data=data: data,  # type: ignore[misc]
                Trainer(artifact),
                f"{place + 1:032x}",
                np.random.default_rng(place),
            )
        )
    for number in range(1, ROUNDS + 1):
        opened = method.open_round(number)
        for place, learner in enumerate(learners):
            sent = learner.train(opened)
            tensors = dict(sent.tensors)
            if place == 0 and number == HOSTILE_ROUND and evil:
                means = np.full((10, 64), evil, np.float32)
                tensors = encode_prototypes(LabelKnowledge(np.arange(10), np.full(10, 20), means))
            update = Update(number, tensors, sender=f"{place + 1:032x}")
            method.check(update)
            method.absorb(update)
        method.close_round()
    test = slice(1200, None)
    right = [
        np.mean(
            each.trainer.predict({"x": pictures[test]})["logits"].argmax(axis=-1) == labels[test]
        )
        for each in learners[1:]
    ]
    return float(np.mean(right))


def test_devices_own_models_are_as_good_as_without_the_hostile_update(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = own_accuracy(artifact, 0.0)
    for evil in (100.0, 6e4):
        assert own_accuracy(artifact, evil) == pytest.approx(without, abs=0.03)
    # What they would be without the stage: the attack is one.
    monkeypatch.setattr(PrototypesMethod, "bounds", None)
    assert own_accuracy(artifact, 6e4) < without - 0.1
