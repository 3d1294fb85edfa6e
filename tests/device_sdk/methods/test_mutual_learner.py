from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import device_sdk
from aggregator.methods.mutual import MutualMethod, MutualSettings
from benchmarks.simulation import Simulation, device_name
from device_sdk.local_data import LocalData
from device_sdk.methods.learner import Learner, LearnerError
from device_sdk.methods.mutual.contract import MutualTraining, decode_soft_labels, sample_entries
from device_sdk.methods.mutual.learner import MutualLearner, PublicSet, learnable
from device_sdk.wire.arrays.exchange import Attachment, Broadcast, Update
from tests.fakes.mutual_artifact import (
    CLASSES,
    KNOWN_IDS,
    local_data,
    local_ids,
    samples,
    write_mutual_artifact,
    write_mutual_ids_artifact,
)

TRAINING = MutualTraining(CLASSES, local_steps=3, batch_size=8, public_batch=4)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mutual_artifact(tmp_path_factory.mktemp("mutual") / "linear")


def learner(artifact: Path, place: int, data: LocalData | None = None) -> MutualLearner:
    given = data if data is not None else local_data(place)
    trainer = device_sdk.Trainer(artifact, providers="cpu")
    rng = np.random.default_rng(place)
    return MutualLearner(lambda: given, trainer, device_name(place), rng)


def fleet(artifact: Path, count: int, **changes: object) -> Simulation:
    learners = [learner(artifact, place) for place in range(count)]
    training = replace(TRAINING, **changes)  # type: ignore[arg-type]
    entries = sample_entries(learners[0].trainer.artifact)
    method = MutualMethod(entries, MutualSettings(training))
    return Simulation(method, learners, np.random.default_rng(0))


def right(one: MutualLearner, of: Mapping[str, np.ndarray]) -> float:
    found = one.trainer.predict({"x": of["x"]})["probabilities"].argmax(axis=1)
    return float(np.mean(found == of["y"]))


class Recorded(Learner):
    """Remembers what a learner received and answered."""

    def __init__(self, learner: MutualLearner) -> None:
        self.learner = learner
        self.received: list[Broadcast] = []
        self.sent: list[Update] = []

    def wants(self, broadcast: Broadcast) -> list[str]:
        return list(self.learner.wants(broadcast))

    def train(self, broadcast: Broadcast) -> Update:
        self.received.append(broadcast)
        self.sent.append(self.learner.train(broadcast))
        return self.sent[-1]

    def state(self) -> Mapping[str, np.ndarray]:
        return self.learner.state()

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self.learner.restore(state)


def recorded(artifact: Path, count: int, **changes: object) -> tuple[Simulation, list[Recorded]]:
    simulation = fleet(artifact, count, **changes)
    seen = [Recorded(one) for one in simulation.learners]  # type: ignore[arg-type]
    return Simulation(simulation.method, seen, np.random.default_rng(0)), seen


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"schedule": "joint"},
        {"schedule": "in_turn", "public_steps": 2},
        {"per_teacher": True},
        {"top_classes": 2, "label_form": "uint8"},
        {"combine": "mean", "schedule": "in_turn", "weight_ce": 0.0, "project": False},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()) or "default",
)
def test_devices_learn_each_others_domains(artifact: Path, changes: dict[str, object]) -> None:
    simulation = fleet(artifact, 3, **changes)
    others = samples(200, 77, 1.0)
    before = right(simulation.learners[0], others)  # type: ignore[arg-type]
    for _ in range(12):
        summary = simulation.round()
    assert not simulation.failures
    assert summary.participants == 3 and summary.metrics["owners"] == 3
    after = right(simulation.learners[0], others)  # type: ignore[arg-type]
    assert after > max(0.9, before)


def test_samples_are_shared_once_and_labels_every_round(artifact: Path) -> None:
    simulation, seen = recorded(artifact, 2)
    for _ in range(3):
        simulation.round()
    first, second, third = seen[0].sent
    assert {"public.x", "public.y", "labels"} <= set(first.tensors)
    assert len(str(first.metadata["mark"])) == 16
    assert "public_loss" not in first.metadata
    assert set(second.tensors) == set(third.tensors) == {"labels"}
    assert set(second.metadata) == {"local_loss", "public_loss", "conflict_share"}
    assert 0 <= float(second.metadata["conflict_share"]) <= 1
    received = seen[0].received[1]
    other = device_name(1)
    assert [name.split(".")[1] for name in received.attachments] == [other]
    assert set(received.tensors) == {f"labels.{device_name(0)}", f"labels.{other}"}


def test_soft_labels_are_those_of_the_model_after_the_round(artifact: Path) -> None:
    one = learner(artifact, 1)
    update = one.train(Broadcast(1, 0, {}, TRAINING.as_scalars()))
    found = decode_soft_labels({"labels": update.tensors["labels"]}, CLASSES, "float16")
    expected = one.trainer.predict({"x": local_data(1).public["x"]})["probabilities"]
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_new_public_samples_are_sent_again(artifact: Path) -> None:
    simulation, seen = recorded(artifact, 2)
    simulation.round()
    simulation.round()
    changed = local_data(0, public=11)
    seen[0].learner._data = lambda: changed
    for _ in range(3):
        simulation.round()
    assert not simulation.failures
    sent = [("public.x" in update.tensors) for update in seen[0].sent]
    assert sent == [True, False, True, False, False]
    assert len(seen[0].sent[-1].tensors["labels"]) == 11
    last = seen[1].received[-1].attachments
    assert [len(attachment.tensors["y"]) for attachment in last.values()] == [11]


def public_loss(
    artifact: Path, received: Broadcast, labels: np.ndarray, training: MutualTraining
) -> float:
    """Of one device at its first weights, on all of device 1's public samples, hardly moving."""
    told = replace(training, public_batch=8, local_steps=1, learning_rate=1e-7)
    tensors = {f"labels.{device_name(1)}": labels}
    update = learner(artifact, 0).train(
        replace(received, tensors=tensors, settings=told.as_scalars())
    )
    return float(update.metadata["public_loss"])


def test_a_teacher_weighs_as_much_as_its_labels_are_right(artifact: Path) -> None:
    simulation, seen = recorded(artifact, 2)
    simulation.round()
    simulation.round()
    received = seen[0].received[1]
    public = local_data(1).public
    x, y = {"x": public["x"]}, public["y"]
    model = learner(artifact, 0).trainer.predict(x)["probabilities"].astype(float)
    entropy = float(-np.log(model[np.arange(len(y)), y]).mean())

    def labels_of(shift: int) -> np.ndarray:
        found = np.full((len(y), CLASSES), 0.125, np.float16)
        found[np.arange(len(y)), (y + shift) % CLASSES] = 0.75
        return found

    teacher = labels_of(0).astype(float)
    divergence = float((teacher * np.log(teacher / model)).sum(1).mean())
    loss = {
        name: public_loss(artifact, received, labels_of(shift), replace(TRAINING, **changes))
        for name, shift, changes in (
            ("right", 0, {}),
            ("wrong", 1, {}),
            ("soft labels alone", 0, {"weight_ce": 0.0}),
            ("nobody to trust", 1, {"weight_ce": 0.0}),
            ("all wrong ones believed", 1, {"use_confidence": False}),
            ("too few right ones", 1, {"use_confidence": False, "least_confidence": 0.4}),
        )
    }
    tolerance = {"abs": 0.02}  # public samples travel in 8 bits
    assert loss["right"] == pytest.approx(entropy + divergence, **tolerance)
    assert loss["wrong"] == pytest.approx(entropy, **tolerance)
    assert loss["soft labels alone"] == pytest.approx(divergence, **tolerance)
    # The classes themselves are learned then.
    assert loss["nobody to trust"] == pytest.approx(entropy, **tolerance)
    assert loss["all wrong ones believed"] > entropy + 0.1
    assert loss["too few right ones"] == pytest.approx(entropy, **tolerance)


def test_a_device_may_learn_without_sharing(artifact: Path) -> None:
    learners = [learner(artifact, 0, LocalData(samples(20, 5))), learner(artifact, 1)]
    entries = sample_entries(learners[0].trainer.artifact)
    method = MutualMethod(entries, MutualSettings(TRAINING))
    simulation = Simulation(method, learners, np.random.default_rng(0))
    for _ in range(3):
        summary = simulation.round()
    assert not simulation.failures
    assert summary.metrics["owners"] == 1 and method.owners == (device_name(1),)


class Hostile(Recorded):
    """Shows samples of its own making."""

    def __init__(self, learner: MutualLearner, shown: Mapping[str, np.ndarray]) -> None:
        super().__init__(learner)
        self._shown = shown

    def train(self, broadcast: Broadcast) -> Update:
        update = self.learner.train(broadcast)
        tensors = dict(update.tensors)
        if "public.y" in tensors:
            tensors |= {f"public.{name}": array for name, array in self._shown.items()}
        return Update(update.round_id, tensors, update.metadata)


# Within reach they are held; beyond all, the aggregator refuses.
@pytest.mark.parametrize("size", [90.0, 1e4, 1e7])
@pytest.mark.parametrize("changes", [{}, {"combine": "mean"}], ids=["own", "mean"])
def test_absurd_samples_of_one_device_spoil_nobodys_round(
    artifact: Path, size: float, changes: dict[str, object]
) -> None:
    simulation = fleet(artifact, 3, **changes)
    *honest, last = simulation.learners
    hostile = Hostile(last, {"x.step": np.asarray(size / 255, np.float32)})  # type: ignore[arg-type]
    simulation = Simulation(simulation.method, [*honest, hostile], np.random.default_rng(0))
    for _ in range(8):
        summary = simulation.round()
    assert not simulation.failures
    assert summary.participants == 3 and summary.metrics["owners"] == 3
    assert summary.metrics["public_loss"] < 10
    # The honest ones go on teaching each other.
    assert right(honest[0], samples(200, 77, 1.0)) > 0.9  # type: ignore[arg-type]


def test_public_samples_are_held_within_three_times_the_readers_own(artifact: Path) -> None:
    reader = learner(artifact, 0)
    own = {"x": np.full((4, 2), -2.0, np.float32)}
    theirs = {
        "x": np.asarray([[1.0, -5.0], [6.5, -90.0]], np.float32),
        TRAINING.target: np.arange(2),
    }
    one = PublicSet("ab" * 16, theirs, np.zeros((2, 2), np.float32), 0.0)
    (found,) = learnable([one], own, reader.trainer, TRAINING)
    assert found.samples["x"].tolist() == [[1.0, -5.0], [6.0, -6.0]]
    assert learnable([one], {"x": own["x"] / 1000}, reader.trainer, TRAINING)


def test_ids_that_a_model_does_not_know_spoil_nobodys_round(tmp_path: Path) -> None:
    artifact = write_mutual_ids_artifact(tmp_path / "ids")
    learners = [learner(artifact, place, local_ids(place)) for place in range(3)]
    hostile = Hostile(learners[2], {"x": np.full((8, 2), KNOWN_IDS, np.int32)})
    method = MutualMethod(sample_entries(learners[0].trainer.artifact), MutualSettings(TRAINING))
    simulation = Simulation(method, [*learners[:2], hostile], np.random.default_rng(0))
    for _ in range(3):
        summary = simulation.round()
    assert not simulation.failures
    assert summary.participants == 3 and summary.metrics["owners"] == 3


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda b: replace(b, settings={}), "lacks the training settings"),
        (
            lambda b: replace(b, settings=replace(TRAINING, classes=5).as_scalars()),
            "soft labels of|classes",
        ),
        (
            lambda b: replace(b, settings=replace(TRAINING, target="kind").as_scalars()),
            "'kind' is not in both",
        ),
        (
            lambda b: replace(b, settings=replace(TRAINING, output="logits").as_scalars()),
            "'logits' is needed",
        ),
        (
            lambda b: replace(
                b,
                attachments={
                    n: Attachment({"x": np.zeros((2, 9), np.uint8)}) for n in b.attachments
                },
            ),
            "public samples of",
        ),
        (
            lambda b: replace(b, tensors={n: a[:2] for n, a in b.tensors.items()}),
            "2 soft labels came for 8",
        ),
    ],
)
def test_what_does_not_fit_changes_nothing(artifact: Path, broken, message: str) -> None:  # type: ignore[no-untyped-def]
    simulation, seen = recorded(artifact, 2)
    simulation.round()
    simulation.round()
    one = seen[0].learner
    before = one.state()
    with pytest.raises(LearnerError, match=message):
        one.train(broken(seen[0].received[-1]))
    after = one.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_data_that_does_not_fit_is_said(artifact: Path) -> None:
    told = Broadcast(1, 0, {}, TRAINING.as_scalars())
    none = {"x": np.zeros((0, 4), np.float32), "y": np.zeros(0, np.int64)}
    with pytest.raises(LearnerError, match="no local samples"):
        learner(artifact, 0, LocalData(none)).train(told)
    with pytest.raises(LearnerError, match="'y' is not in both"):
        learner(artifact, 0, LocalData({"x": np.zeros((2, 4), np.float32)})).train(told)


def test_state_goes_round(artifact: Path) -> None:
    one, other = learner(artifact, 0), learner(artifact, 1)
    one.train(Broadcast(1, 0, {}, TRAINING.as_scalars()))
    other.restore(one.state())
    x = {"x": samples(5, 9)["x"]}
    np.testing.assert_array_equal(
        one.trainer.predict(x)["probabilities"], other.trainer.predict(x)["probabilities"]
    )
    with pytest.raises(LearnerError, match="expected"):
        other.restore({})
