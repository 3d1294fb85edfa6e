from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import device_sdk
from device_sdk.methods.learner import Declined, LearnerError
from device_sdk.methods.local_steps import (
    EachStep,
    Epochs,
    SampleStream,
    StepsReport,
    epoch_batches,
    predict_all,
    train_epochs,
    unchanged_on_error,
)
from device_sdk.wire.publish.report import Reason
from tests.fakes.handmade import FEATURES, TARGETS, linear_artifact


def samples(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        "x": rng.standard_normal((count, FEATURES), dtype=np.float32),
        "y": rng.standard_normal((count, TARGETS), dtype=np.float32),
    }


@pytest.fixture
def trainer(tmp_path: Path) -> device_sdk.Trainer:
    linear_artifact(tmp_path / "linear")
    return device_sdk.Trainer(tmp_path / "linear", providers="cpu")


def test_each_pass_holds_every_sample_once_and_in_another_order() -> None:
    rows = {"row": np.arange(10)}
    batches = [b["row"] for b in epoch_batches(rows, 4, 2, np.random.default_rng(0))]
    assert [len(b) for b in batches] == [4, 4, 2, 4, 4, 2]
    first, second = np.concatenate(batches[:3]), np.concatenate(batches[3:])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize(("count", "size"), [(10, 4), (7, 7), (3, 5), (9, 8), (1, 1)])
def test_a_stream_gives_whole_batches_without_repeats_and_all_samples_equally(
    count: int, size: int
) -> None:
    stream = SampleStream({"row": np.arange(count)}, size, np.random.default_rng(1))
    drawn = [stream.draw()["row"] for _ in range(60)]
    assert {len(batch) for batch in drawn} == {min(count, size)}
    assert all(len(set(batch.tolist())) == len(batch) for batch in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=count)
    assert counts.max() - counts.min() <= 2


def test_training_reports_steps_samples_and_the_mean_loss(trainer: device_sdk.Trainer) -> None:
    seen: list[int] = []
    report = train_epochs(
        trainer,
        samples(10),
        Epochs(4, 3),
        np.random.default_rng(0),
        EachStep({"lr": 0.0}, after=lambda _: seen.append(trainer.step_count)),
    )
    assert (report.steps, report.samples, seen) == (9, 30, list(range(1, 10)))
    everything = samples(10)
    prediction = predict_all(trainer, everything, "prediction", batch_size=3)
    assert report.loss == pytest.approx(float(np.mean((prediction - everything["y"]) ** 2)))
    assert (report + StepsReport()).loss == report.loss
    assert (report + report).samples == 60


def test_what_is_too_few_for_a_batch_is_left_to_other_passes(tmp_path: Path) -> None:
    linear_artifact(tmp_path / "two", least=2)
    trainer = device_sdk.Trainer(tmp_path / "two", providers="cpu")
    data = samples(9)
    report = train_epochs(
        trainer, data, Epochs(4, 3), np.random.default_rng(0), EachStep({"lr": 0.0})
    )
    assert (report.steps, report.samples) == (6, 24)
    rows = {"row": np.arange(9)}
    drawn = epoch_batches(rows, 4, 20, np.random.default_rng(0), least=2)
    assert set(np.concatenate([batch["row"] for batch in drawn])) == set(range(9))
    whole = predict_all(trainer, data, "prediction")
    np.testing.assert_array_equal(predict_all(trainer, data, "prediction", batch_size=4), whole)
    few = "has 1 sample to train on; the task's model needs at least 2"
    with pytest.raises(Declined, match=few) as declined:
        train_epochs(trainer, samples(1), Epochs(4, 1), np.random.default_rng(0))
    assert declined.value.reason is Reason.TOO_FEW_SAMPLES
    with pytest.raises(LearnerError, match=r"batches are of 1 samples.*takes at least 2"):
        train_epochs(trainer, data, Epochs(1, 1), np.random.default_rng(0))


def test_most_steps_ends_early(trainer: device_sdk.Trainer) -> None:
    rng = np.random.default_rng(0)
    report = train_epochs(trainer, samples(10), Epochs(2, 9, most_steps=7), rng)
    assert report.steps == 7


def test_a_failure_gives_the_trainer_its_state_back(trainer: device_sdk.Trainer) -> None:
    before = trainer.state
    data = samples(8)
    data["x"][5] = np.nan
    with pytest.raises(LearnerError, match="not finite"), unchanged_on_error(trainer):
        train_epochs(trainer, data, Epochs(2, 1), np.random.default_rng(3))
    with pytest.raises(KeyError), unchanged_on_error(trainer):
        train_epochs(trainer, samples(8), Epochs(2, 1), np.random.default_rng(3))
        raise KeyError("the caller's own")
    assert all(np.array_equal(before[name], array) for name, array in trainer.state.items())


def test_what_cannot_be_is_refused(trainer: device_sdk.Trainer) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="batch_size is 0"):
        list(epoch_batches(samples(4), 0, 1, rng))
    with pytest.raises(ValueError, match="no samples"):
        SampleStream(samples(0), 2, rng)
    with pytest.raises(LearnerError, match="'logits' is needed"):
        predict_all(trainer, samples(4), "logits")
