from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import device_sdk
import export
from aggregator.methods.teacher_logits import TeacherLogitsMethod
from benchmarks.simulation import Simulation
from device_sdk.local_data import LocalData
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining, decode_knowledge
from device_sdk.methods.teacher_logits.learner import TeacherLogitsLearner
from device_sdk.wire.arrays.exchange import Broadcast, Update
from export.losses import PENALTY, distillation, example_teachers
from tests.fakes.handmade import linear_artifact
from tests.fakes.labelled import CLASSES, FEATURES, frozen, samples, unfit

FAST = TeacherLogitsTraining(classes=CLASSES, batch_size=8, learning_rate=0.5, precision="float32")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two devices' models: another number of hidden units each."""
    folders = []
    for hidden in (2, 5):
        torch.manual_seed(hidden)
        model = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, CLASSES)
        )
        folder = tmp_path_factory.mktemp("models") / f"hidden{hidden}"
        batch = {
            "x": torch.randn(5, FEATURES),
            "label": torch.tensor([0, 1, 2, 0, 1]),
            **example_teachers(CLASSES),
        }
        export.train_step(
            model,
            distillation(lambda m, b: m(b["x"])),
            batch,
            optimizer=export.Sgd(lr=0.1),
            dynamic={"x": {0: "batch"}, "label": {0: "batch"}},
            predict=lambda m, b: {"probabilities": torch.softmax(m(b["x"]), -1)},
            gradient=PENALTY,
            directory=folder,
            verify=False,
        )
        folders.append(folder)
    return folders


def learner(folder: Path, data: LocalData, seed: int = 0) -> TeacherLogitsLearner:
    trainer = device_sdk.Trainer(folder, providers="cpu")
    return TeacherLogitsLearner(lambda: data, trainer, "", np.random.default_rng(seed))


def fleet(artifacts: list[Path], training: TeacherLogitsTraining) -> Simulation:
    learners = [learner(artifacts[i % 2], samples(40, i), seed=i) for i in range(3)]
    return Simulation(TeacherLogitsMethod(training), learners, np.random.default_rng(0))


def test_knowledge_is_the_mean_output_by_label(artifacts: list[Path]) -> None:
    still = replace(FAST, learning_rate=1e-12, epochs=2)
    data = samples(30, 3, labels=(0, 2))
    one = learner(artifacts[0], data)
    predicted = one.trainer.predict(data.train)["probabilities"]
    update = one.train(TeacherLogitsMethod(still).open_round(1))
    found = decode_knowledge(update.tensors, still)
    label = data.train["label"]
    assert found.labels.tolist() == [0, 2]
    assert found.counts.tolist() == [2 * np.sum(label == 0), 2 * np.sum(label == 2)]
    for row, wanted in enumerate((0, 2)):
        np.testing.assert_allclose(found.means[row], predicted[label == wanted].mean(0), atol=1e-5)
    assert (one.report.steps, one.report.samples) == (8, 60)


def test_each_devices_teacher_is_what_the_others_said(artifacts: list[Path]) -> None:
    training = replace(FAST, precision="int8")
    run = fleet(artifacts, training)
    sent: list[Update] = []
    absorb = run.method.absorb
    run.method.absorb = lambda update: (sent.append(update), absorb(update))[1]  # type: ignore[method-assign]
    run.round()
    broadcast = run.method.open_round(2)
    read = [decode_knowledge(update.tensors, training).means for update in sent]
    for device, one in enumerate(run.learners):
        assert isinstance(one, TeacherLogitsLearner)
        others = np.mean([m for place, m in enumerate(read) if place != device], axis=0)
        clipped = np.maximum(others, 1e-4)
        wanted = clipped / clipped.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(one.teachers(broadcast).table, wanted, atol=1e-5)
        # Had its update been late, it would not be in the sums, and nothing may be subtracted.
        one.receipt(1, counted=False)
        everyone = np.maximum(np.mean(read, axis=0), 1e-4)
        np.testing.assert_allclose(
            one.teachers(broadcast).table, everyone / everyone.sum(1, keepdims=True), atol=1e-5
        )
    assert not run.failures


@pytest.mark.parametrize("missed", [1, 11])
def test_a_device_takes_out_all_that_it_sent_since_rounds_missed_their_quorum(
    artifacts: list[Path], missed: int
) -> None:
    """What was counted is carried over, and each next round's update of a device is added to it."""
    method = TeacherLogitsMethod(FAST)
    one = learner(artifacts[0], samples(40, 0))
    two = learner(artifacts[1], samples(40, 1, labels=(0, 1)))
    theirs = two.train(method.open_round(1))
    counted = [theirs]
    for number in range(2, 2 + missed + 1):
        broadcast = method.open_round(number)
        for update in counted:
            method.absorb(update)
        assert not one.teachers(broadcast).taught.any()  # nothing is summed yet
        counted.append(one.train(broadcast))
        method.check(counted[-1])
        method.absorb(counted[-1])
        one.receipt(number, counted=True)
        one.restore(one.state())  # as after a restart
    assert method.close_round().participants == missed + 2
    found = one.teachers(method.open_round(missed + 3))
    assert found.taught.tolist() == [1, 1, 0]
    means = np.maximum(decode_knowledge(theirs.tensors, FAST).means, 1e-4)
    np.testing.assert_allclose(
        found.table[:2], means / means.sum(axis=1, keepdims=True), rtol=0, atol=1e-5
    )
    # The next sums are of its next update alone.
    broadcast = method.open_round(missed + 4)
    method.absorb(one.train(broadcast))
    one.receipt(missed + 4, counted=True)
    method.close_round()
    assert not one.teachers(method.open_round(missed + 5)).taught.any()


def test_unequal_models_learn_from_one_another(artifacts: list[Path]) -> None:
    run = fleet(artifacts, replace(FAST, alpha=0.6, beta=0.2))
    first = run.round().metrics["confidence"]
    for _ in range(9):
        last = run.round().metrics["confidence"]
    assert not run.failures
    assert last > first + 0.2
    data = samples(200, 99).train
    for one in run.learners:
        predicted = one.trainer.predict(data)["probabilities"]
        assert np.mean(predicted.argmax(1) == data["label"]) > 0.85


def test_teachers_pull_only_labels_that_have_one(artifacts: list[Path]) -> None:
    """With all weight on the teacher, a device without teachers stays where it is."""
    training = replace(FAST, alpha=0.0, beta=1.0, divergence=False)
    one = learner(artifacts[0], samples(24, 1))
    method = TeacherLogitsMethod(training)
    before = one.trainer.parameters
    one.train(method.open_round(1))
    for name, array in one.trainer.parameters.items():
        np.testing.assert_array_equal(array, before[name])
    method.absorb(learner(artifacts[1], samples(24, 2)).train(method.open_round(2)))
    method.close_round()
    one.train(method.open_round(3))
    moved = one.trainer.parameters
    assert any(not np.array_equal(moved[name], before[name]) for name in before)


def test_blending_sends_half_of_the_teacher(artifacts: list[Path]) -> None:
    still = replace(FAST, learning_rate=1e-12, blend_teacher=True)
    run = fleet(artifacts, still)
    run.round()
    broadcast = run.method.open_round(2)
    one = run.learners[0]
    assert isinstance(one, TeacherLogitsLearner)
    plain = Broadcast(2, 1, broadcast.tensors, replace(still, blend_teacher=False).as_scalars())
    teachers = one.teachers(broadcast)
    saved = one.state()
    own = decode_knowledge(one.train(plain).tensors, still).means
    one.restore(saved)
    blended = decode_knowledge(one.train(broadcast).tensors, still).means
    np.testing.assert_allclose(blended, (own + teachers.table) / 2, atol=1e-4)


def test_a_restored_learner_continues_bit_for_bit(artifacts: list[Path]) -> None:
    method = TeacherLogitsMethod(FAST)
    one = learner(artifacts[0], samples(24, 1))
    update = one.train(method.open_round(1))
    method.absorb(update)
    one.receipt(1, counted=True)
    method.close_round()
    two = learner(artifacts[0], samples(24, 1), seed=7)
    two.restore(one.state())
    assert frozen(two) == frozen(one)
    broadcast = method.open_round(2)
    np.testing.assert_array_equal(two.teachers(broadcast).table, one.teachers(broadcast).table)
    assert not two.teachers(broadcast).taught.any()  # nobody else took part
    for name in one.state():
        with pytest.raises(LearnerError):
            two.restore({key: array for key, array in one.state().items() if key != name})
    with pytest.raises(LearnerError):
        two.restore({**one.state(), "trainer.step": np.zeros(3, dtype=np.float32)})
    assert frozen(two) == frozen(one)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (LocalData({"x": np.zeros((2, 4), np.float32)}), "'label' is missing"),
        (unfit([0, 3]), "below the task's 3 classes"),
        (unfit([0, 1], width=9), "training failed"),
        (unfit([0, 1], np.nan), "training failed"),
    ],
)
def test_data_that_do_not_fit_change_nothing(
    artifacts: list[Path], data: LocalData, words: str
) -> None:
    one = learner(artifacts[0], data)
    before = frozen(one)
    with pytest.raises(LearnerError, match=words):
        one.train(TeacherLogitsMethod(FAST).open_round(1))
    assert frozen(one) == before


def test_what_the_model_does_not_read_is_left_aside(artifacts: list[Path]) -> None:
    plain = samples(24, 1)
    more = LocalData({**plain.train, "history": np.zeros((24, 2), dtype=np.int64)})
    broadcast = TeacherLogitsMethod(FAST).open_round(1)
    one, two = learner(artifacts[0], plain), learner(artifacts[0], more)
    np.testing.assert_array_equal(
        one.train(broadcast).tensors["values"], two.train(broadcast).tensors["values"]
    )


def test_a_task_of_other_classes_is_refused(artifacts: list[Path]) -> None:
    one = learner(artifacts[0], samples(10, 0))
    with pytest.raises(LearnerError):
        one.train(TeacherLogitsMethod(replace(FAST, classes=4)).open_round(1))
    broadcast = TeacherLogitsMethod(FAST).open_round(1)
    with pytest.raises(LearnerError, match="lacks the training settings"):
        one.train(Broadcast(1, 0, broadcast.tensors))


def test_a_device_without_samples_says_nothing_but_is_heard(artifacts: list[Path]) -> None:
    method = TeacherLogitsMethod(FAST)
    update = learner(artifacts[0], LocalData({})).train(method.open_round(1))
    method.check(update)
    method.absorb(update)
    assert method.close_round().metrics["labels"] == 0


def test_an_artifact_of_another_loss_is_refused(tmp_path: Path) -> None:
    linear_artifact(tmp_path / "linear")
    trainer = device_sdk.Trainer(tmp_path / "linear", providers="cpu")
    with pytest.raises(ValueError, match="label_counts"):
        TeacherLogitsLearner(lambda: LocalData({}), trainer, "", np.random.default_rng(0))
