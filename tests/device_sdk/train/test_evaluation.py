"""What devices find out on data that they hold back adds up to what the union of it shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import mean_absolute_error, mean_squared_error, roc_auc_score

import export
from aggregator.evaluation import DeviceReport, Rules, summarise
from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from benchmarks.recommendation.metrics import full_ranks
from benchmarks.recommendation.split import LeaveOneOut
from device_sdk.evaluation.metrics import METRICS, Auc, PredictionMetric
from device_sdk.evaluation.report import (
    Evaluation,
    EvaluationReport,
    EvaluationTerms,
    Stage,
    read_evaluations,
    write_evaluations,
)
from device_sdk.factorisation import packaged_artifact
from device_sdk.home.home import Home, forget
from device_sdk.local_data import LocalData
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.scatter.contract import BprTraining
from device_sdk.rounds.current_round import commit_round
from device_sdk.status import read_status
from device_sdk.train.arrays import ArrayTrainer
from device_sdk.train.evaluate import RoundEvaluation
from device_sdk.train.job import LocalArtifact, TrainedRound, TrainingJob
from device_sdk.train.scatter import ScatterTrainer
from device_sdk.trainer import Trainer
from device_sdk.wire.arrays.exchange import Broadcast
from tests.fakes.handmade.linear import FEATURES as LINEAR_FEATURES
from tests.fakes.handmade.linear import TARGETS as LINEAR_TARGETS
from tests.fakes.handmade.linear import linear_artifact
from tests.fakes.jobs import artifact_in, job_of
from tests.fakes.step_clock import StepClock
from tests.fakes.worlds import world_of

ASKED = ("loss", "accuracy", "log_loss", "auc", "calibration")
TERMS = EvaluationTerms(ASKED)
FEATURES = 6


def exported(folder: Path, dynamic: dict[str, dict[int, str]]) -> LocalArtifact:
    """Two classes; the last layer is ``head``."""
    torch.manual_seed(3)
    model = torch.nn.Sequential()
    model.add_module("body", torch.nn.Linear(FEATURES, 8))
    model.add_module("act", torch.nn.Tanh())
    model.add_module("head", torch.nn.Linear(8, 2))

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        logits = model(batch["x"])
        return export.losses.cross_entropy(logits, batch["y"]), {"logits": logits}

    export.train_step(
        model,
        loss,
        {"x": torch.randn(8, FEATURES), "y": torch.arange(8) % 2},
        optimizer=export.Sgd(lr=0.1),
        metrics={"loss": "loss"} | dict.fromkeys(ASKED[1:], ("logits", "y")),
        directory=folder,
        dynamic=dynamic,
    )
    return artifact_in(folder, "clicks")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> LocalArtifact:
    folder = tmp_path_factory.mktemp("artifact") / "clicks"
    return exported(folder, {"x": {0: "batch"}, "y": {0: "batch"}})


def samples(count: int, seed: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, FEATURES)).astype(np.float32)
    clicked = rng.random(count) < 1 / (1 + np.exp(-2 * x[:, 0] - 0.3 * seed % 1))
    return {"x": x, "y": clicked.astype(np.int64)}


def job(
    artifact: LocalArtifact,
    evaluation: EvaluationTerms | None = TERMS,
    training: FedAvgTraining | None = None,
    number: int = 1,
) -> TrainingJob:
    trainer = Trainer(artifact.folder)
    settings = FedAvgSettings(training=training or FedAvgTraining(batch_size=8))
    method = FedAvgMethod(trainer.parameters, trainer.buffers, settings)
    broadcast = replace(method.open_round(number), version=7)
    return job_of(broadcast, [artifact], evaluation=evaluation)


Make = Callable[..., ArrayTrainer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Array trainers, each with a home of its own."""
    homes: list[Home] = []

    def made(data: LocalData, clock: StepClock | None = None, **options: object) -> ArrayTrainer:
        homes.append(Home(tmp_path / f"home{len(homes)}", create=True))
        rng = np.random.default_rng(len(homes))
        world = world_of(
            homes[-1], bytes([len(homes)]) * 16, rng, clock or StepClock(), lambda: data, **options
        )
        return ArrayTrainer(world, FedAvgLearner)

    yield made
    for home in homes:
        home.close()


def total(reports: list[EvaluationReport], stage: Stage, metric: str) -> NDArray[np.float64]:
    """The sum of what the devices sent, as the aggregator reads it."""
    found = [read_evaluations(write_evaluations(each)).of(stage, metric) for each in reports]
    return np.sum([each.statistics for each in found if each is not None], axis=0)


def test_twenty_devices_find_what_the_union_of_their_data_shows(
    make: Make, artifact: LocalArtifact
) -> None:
    tests = [samples(15 + 37 * place, 100 + place) for place in range(20)]
    work = job(artifact)
    reports = []
    for place, test in enumerate(tests):
        result = make(LocalData(samples(10, place), test=test)).train(work)
        assert result.evaluation is not None and result.evaluation.reason == ""
        reports.append(result.evaluation)
    union = {name: np.concatenate([test[name] for test in tests]) for name in ("x", "y")}
    count = len(union["y"])
    # The broadcast's model is the artifact's own, on one batch of everything.
    loss, outputs = Trainer(artifact.folder, providers="cpu").evaluate(union)
    assert loss is not None
    for name in ASKED:
        metric = METRICS[name]
        statistics = total(reports, "global", name)
        assert metric.weight(statistics) == count
        if isinstance(metric, PredictionMetric):
            whole = metric.measure(outputs["logits"], union["y"])
            np.testing.assert_array_equal(
                statistics[: metric.counts], whole[: metric.counts], err_msg=name
            )
            # The same float32 outputs, added up in another order.
            np.testing.assert_allclose(statistics, whole, rtol=1e-9, err_msg=name)
    # The graph rounds each batch's mean loss to float32.
    assert METRICS["loss"].value(total(reports, "global", "loss")) == pytest.approx(loss, rel=1e-6)
    auc = Auc()
    merged = total(reports, "global", "auc")
    logits = outputs["logits"].astype(np.float64)
    exact = roc_auc_score(union["y"], logits[:, 1] - logits[:, 0])
    assert abs(auc.value(merged) - exact) <= auc.error_bound(merged) < 0.02
    assert abs(auc.value(merged) - exact) < 0.01


def test_errors_of_twenty_devices_are_those_of_the_union(make: Make, tmp_path: Path) -> None:
    """Of numbers far from 0, in batches of one too, beside scikit-learn in one place."""
    linear_artifact(tmp_path / "linear", "mae", "rmse")
    linear = artifact_in(tmp_path / "linear")
    rng = np.random.default_rng(4)

    def drawn(count: int, place: int) -> dict[str, NDArray[Any]]:
        x = rng.standard_normal((count, LINEAR_FEATURES)).astype(np.float32)
        y = (1000.0 * place + rng.standard_normal((count, LINEAR_TARGETS))).astype(np.float32)
        return {"x": x, "y": y}

    work = job(linear, EvaluationTerms(("rmse", "mae"), time_share=0.3))
    tests = [drawn(1 + place * place, place) for place in range(20)]
    reports = []
    for place, test in enumerate(tests):
        found = make(LocalData(drawn(4, place), test=test)).train(work).evaluation
        assert found is not None and found.reason == ""
        reports.append(found)
    x, y = (np.concatenate([test[name] for test in tests]) for name in ("x", "y"))
    predicted = Trainer(linear.folder, providers="cpu").predict({"x": x, "y": y})["prediction"]
    flat = y.astype(np.float64), predicted.astype(np.float64)
    rules = Rules(("rmse", "mae"), least_devices=2, sample_cap=0.0)
    figures = summarise([DeviceReport("", report) for report in reports], rules)
    fleet = {each.metric: each for each in figures if each.stage == "global"}
    assert fleet["rmse"].value == pytest.approx(math.sqrt(mean_squared_error(*flat)), rel=1e-6)
    assert fleet["mae"].value == pytest.approx(mean_absolute_error(*flat), rel=1e-6)
    own = [report.of("global", "rmse") for report in reports]
    assert fleet["rmse"].median == pytest.approx(np.median([e.value for e in own if e is not None]))
    assert fleet["rmse"].samples == len(y)


def test_a_batch_of_fixed_length_is_evaluated_by_whole_batches(make: Make, tmp_path: Path) -> None:
    fixed = exported(tmp_path / "fixed", {})
    test = samples(29, 5)
    result = make(LocalData(samples(16, 0), test=test)).train(job(fixed))
    assert result.evaluation is not None and result.evaluation.reason == ""
    assert METRICS["accuracy"].weight(total([result.evaluation], "global", "accuracy")) == 24
    short = make(LocalData(samples(16, 0), test=samples(7, 5))).train(job(fixed)).evaluation
    assert short is not None and short.reason == "too-few-samples" and not short.results


@pytest.mark.parametrize("personal", ["", "head"])
def test_the_model_received_is_evaluated_and_the_one_that_predict_uses(
    make: Make, artifact: LocalArtifact, personal: str
) -> None:
    data = LocalData(samples(400, 1), holdout=0.2)
    training = FedAvgTraining(epochs=5, batch_size=8, learning_rate=0.5, personal=personal)
    result = make(data).train(job(artifact, training=training))
    received = result.evaluation.of("global", "log_loss")
    own = result.evaluation.of("personal", "log_loss")
    assert received is not None and own is not None
    assert own.samples == received.samples == data.test_samples > 30
    assert own.value < received.value - 0.05
    trained = Trainer(artifact.folder, providers="cpu")
    metric = METRICS["log_loss"]
    assert isinstance(metric, PredictionMetric)
    outputs = trained.predict(dict(data.test))["logits"]
    expected = metric.value(metric.measure(outputs, data.test["y"]))
    assert received.value == pytest.approx(expected, rel=1e-9)
    assert result.model is not None  # which Device.predict uses
    trained.set_state(result.model)
    outputs = trained.predict(dict(data.test))["logits"]
    assert own.value == pytest.approx(metric.value(metric.measure(outputs, data.test["y"])))


def test_an_evaluation_changes_nothing_of_the_training(make: Make, artifact: LocalArtifact) -> None:
    data = LocalData(samples(60, 1), test=samples(50, 2))
    bodies = []
    for evaluation in (None, TERMS):
        device = make(data)
        device._rng = np.random.default_rng(5)
        bodies.append(device.train(job(artifact, evaluation)).body)
    assert bodies[0] == bodies[1]


def test_who_is_not_asked_does_not_evaluate(make: Make, artifact: LocalArtifact) -> None:
    data = LocalData(samples(20, 1), test=samples(20, 2))
    device = make(data)
    assert device.train(job(artifact, None)).evaluation is None
    every_third = replace(TERMS, every_rounds=3)
    assert device.train(job(artifact, every_third, number=2)).evaluation is None
    assert device.train(job(artifact, every_third, number=3)).evaluation is not None
    few = replace(TERMS, share=0.5)
    asked = [make(data).train(job(artifact, few)).evaluation is not None for _ in range(12)]
    assert 2 <= sum(asked) <= 10


def test_an_artifact_that_needs_two_rows_is_given_no_single_one(make: Make, tmp_path: Path) -> None:
    linear_artifact(tmp_path / "two", "rmse", least=2)
    work = job(artifact_in(tmp_path / "two"), EvaluationTerms(("rmse",)))

    def rows(count: int) -> dict[str, NDArray[Any]]:
        return {
            "x": np.ones((count, LINEAR_FEATURES), np.float32),
            "y": np.ones((count, LINEAR_TARGETS), np.float32),
        }

    found = make(LocalData(rows(9), test=rows(17))).train(work).evaluation
    assert found is not None and found.reason == ""
    assert METRICS["rmse"].weight(total([found], "global", "rmse")) == 16
    short = make(LocalData(rows(9), test=rows(1))).train(work).evaluation
    assert short is not None and short.reason == "too-few-samples"


@pytest.mark.parametrize(
    ("data", "terms", "reason", "said"),
    [
        (LocalData(samples(9, 1)), TERMS, "no-test-data", "give LocalData a test="),
        (
            LocalData(samples(9, 1), test=samples(4, 2)),
            replace(TERMS, least_samples=5),
            "too-few-samples",
            "4 samples are held back; the task takes 5",
        ),
        (
            LocalData(samples(9, 1), test={"x": np.ones((4, 3), np.float32), "y": np.arange(4)}),
            TERMS,
            "bad-test-data",
            r"has shape \[4, 3\]: axis 1 must have length 6",
        ),
        (
            LocalData(
                samples(9, 1), test={"x": np.ones((4, FEATURES), np.float32), "y": np.arange(4)}
            ),
            EvaluationTerms(("accuracy",)),
            "bad-test-data",
            "no class from 0 to 1",
        ),
        (
            LocalData(
                samples(9, 1),
                test={"x": np.full((4, FEATURES), np.nan, np.float32), "y": np.zeros(4, np.int64)},
            ),
            TERMS,
            "not-finite",
            "not finite",
        ),
    ],
)
def test_a_round_goes_on_without_its_evaluation_and_says_why(
    make: Make,
    artifact: LocalArtifact,
    data: LocalData,
    terms: EvaluationTerms,
    reason: str,
    said: str,
) -> None:
    result = make(data).train(job(artifact, terms))
    assert result.body and result.evaluation is not None
    assert result.evaluation.results == () and result.evaluation.reason == reason
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(result.evaluation_detail)


def test_metrics_that_nobody_declared_are_left_out_and_the_others_measured(
    make: Make, artifact: LocalArtifact
) -> None:
    terms = EvaluationTerms(("mae", "accuracy", "of-tomorrow", "hr10"))
    data = LocalData(samples(9, 1), test=samples(20, 2))
    result = make(data).train(job(artifact, terms))
    assert {each.metric for each in result.evaluation.results} == {"accuracy"}
    assert result.evaluation.reason == "undeclared-metric"
    assert "metric 'mae': the artifact 'clicks' does not declare it (it declares" in (
        result.evaluation_detail
    )
    assert "'of-tomorrow' is unknown to this version" in result.evaluation_detail


def test_a_broadcast_of_another_model_fails_as_it_did(make: Make, artifact: LocalArtifact) -> None:
    work = job(artifact)
    other = Broadcast(1, 0, {"w.odd": np.zeros(3, np.float32)}, work.broadcast.settings)
    with pytest.raises(LearnerError, match="lacks tensor"):
        make(LocalData(samples(9, 1), test=samples(9, 2))).train(replace(work, broadcast=other))


class Own(FedAvgLearner):
    """Shares no model."""

    def receive(self, broadcast: Broadcast) -> bool:
        return False


class Silent(Own):
    """Nor has one of its own."""

    def personalises(self, broadcast: Broadcast) -> bool:
        return False


def test_a_method_says_which_of_its_models_there_are(make: Make, artifact: LocalArtifact) -> None:
    data = LocalData(samples(30, 1), test=samples(9, 2))
    for kind, stages, reason in ((Silent, set(), "no-model"), (Own, {"personal"}, "")):
        device = make(data)
        device._kind = kind
        result = device.train(job(artifact))
        assert result.body and result.evaluation is not None
        assert {each.stage for each in result.evaluation.results} == stages
        assert result.evaluation.reason == reason


# Within a share of the round's time.


def timed(seconds: float, stages: int = 1, slowdown: float = 1.0) -> tuple[RoundEvaluation, Any]:
    """An evaluation whose rows take a second each, and what measures them."""
    clock = StepClock(tick=0.0)
    rng = np.random.default_rng(1)
    evaluation = RoundEvaluation(TERMS, seconds, stages, clock, rng, slowdown)

    def measure(rows: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        clock.seconds += len(rows)
        seen.extend(rows.tolist())
        return {"loss": np.array([len(rows), float(rows.sum())])}

    seen: list[int] = []
    evaluation.stage("global", 10_000, ["loss"], measure)
    return evaluation, (clock, seen, measure)


def test_an_evaluation_takes_no_more_than_its_time_and_is_then_of_a_sample() -> None:
    evaluation, (clock, seen, _) = timed(300.0)
    assert 250 <= clock.seconds <= 300
    (loss,) = evaluation.report.results
    assert loss.samples == len(seen) == len(set(seen)) == clock.seconds
    # A uniform sample of rows 0 to 9,999, and not the first ones.
    assert 4000 < loss.value < 6000
    assert evaluation.report.reason == ""


def test_two_stages_share_the_time_and_the_rows() -> None:
    evaluation, (clock, seen, measure) = timed(300.0, stages=2)
    assert 100 <= clock.seconds <= 150
    first = list(seen)
    evaluation.stage("personal", 10_000, ["loss"], measure)
    assert 200 <= clock.seconds <= 300
    assert seen[len(first) :][: len(first)] == first[: len(seen) - len(first)]


def test_an_emulated_slow_device_evaluates_less() -> None:
    _, (clock, seen, _) = timed(300.0, slowdown=10.0)
    assert 16 <= len(seen) <= 30 and clock.seconds <= 300


def test_a_first_batch_that_takes_all_the_time_is_the_last() -> None:
    evaluation, (_, seen, measure) = timed(1.0, stages=2)
    assert len(seen) == 16
    evaluation.stage("personal", 10_000, ["loss"], measure)
    assert len(seen) == 16 and evaluation.report.reason == "out-of-time"


# What is kept of it on the device.


def test_the_last_evaluation_is_in_the_status(
    tmp_path: Path, make: Make, artifact: LocalArtifact
) -> None:
    home = Home(tmp_path / "kept", create=True)
    data = LocalData(samples(9, 1), test={name: a[:3] for name, a in samples(9, 2).items()})
    world = world_of(home, b"a" * 16, np.random.default_rng(1), StepClock(), lambda: data)
    work = job(artifact, EvaluationTerms(("accuracy", "mae")))
    assert read_status(world).evaluation == {}
    commit_round(home, b"a" * 16, work, ArrayTrainer(world, FedAvgLearner).train(work))
    status = read_status(world)
    assert (status.evaluated_round, status.evaluated_version) == (1, 7)
    assert set(status.evaluation["global"]) == {"accuracy", "samples"}
    assert status.evaluation["global"]["samples"] == 3
    assert "does not declare it" in status.evaluation_detail
    home.close()


# Ranks of held-out items.

ITEMS, WIDTH = 150, 4
RANKED = EvaluationTerms(("hr10", "ndcg10", "hr10_all", "ndcg10_all"))


def ranked_job(evaluation: EvaluationTerms | None, number: int = 1) -> TrainingJob:
    artifact = LocalArtifact(bytes(32), "mf", packaged_artifact())
    items = np.random.default_rng(9).standard_normal((ITEMS, WIDTH)).astype(np.float32)
    settings = BprTraining().as_scalars()
    broadcast = Broadcast(number, 7, {"items": items}, settings)
    return job_of(broadcast, [artifact], "scatter", evaluation=evaluation)


@pytest.fixture
def recommending(tmp_path: Path) -> Iterator[tuple[Home, ScatterTrainer]]:
    """Users 0 to 4 touch items in a falling order of rows; user 5 has one only."""
    home = Home(tmp_path / "scatter", create=True)
    for user in range(5):
        home.interactions.add([(f"u{user}", str(120 - 20 * user - place)) for place in range(8)])
    home.interactions.add([("single", "3")])
    rng = np.random.default_rng(2)
    world = world_of(home, b"c" * 16, rng, StepClock(), None, k=WIDTH)
    yield home, ScatterTrainer(world)
    home.close()


HELD = {user: 120 - 20 * user - 7 for user in range(5)}


def commit(home: Home, work: TrainingJob, result: TrainedRound) -> None:
    commit_round(home, b"c" * 16, work, result)


def test_the_latest_item_is_not_trained_on_where_the_task_evaluates(
    recommending: tuple[Home, ScatterTrainer],
) -> None:
    home, device = recommending
    all_rows = home.interactions.positives({str(row): row for row in range(ITEMS)})
    device.train(ranked_job(None))
    assert [len(rows) for rows in device._local.rows] == [8, 8, 8, 8, 8, 1]
    # In rounds too in which this device does not evaluate: what was trained on is not held out.
    device.train(ranked_job(replace(RANKED, every_rounds=5)))
    for user, held in HELD.items():
        rows = device._local.rows[user]
        assert held not in rows and {*rows.tolist(), held} == {*all_rows[user].tolist()}
    assert device._local.rows[5].tolist() == [3], "a user's only item is trained on"


def test_what_was_trained_on_is_not_held_out_once_a_later_item_is_forgotten(
    recommending: tuple[Home, ScatterTrainer],
) -> None:
    home, device = recommending

    def held_out(number: int, work: TrainingJob | None = None) -> dict[int, int]:
        work = work or ranked_job(RANKED, number)
        result = device.train(work)
        commit(home, work, result)
        known = {str(row): row for row in range(ITEMS)}
        recorded = home.interactions.positives(known)
        found = {
            user: {*all_rows.tolist()} - {*kept.tolist()}
            for user, (all_rows, kept) in enumerate(zip(recorded, device._local.rows, strict=True))
        }
        personal = result.evaluation.of("personal", "hr10")
        weight = 0 if personal is None else personal.statistics[0]
        assert weight == sum(map(len, found.values()))
        return {user: rows.pop() for user, rows in found.items() if rows}

    assert held_out(1) == HELD
    forget(home, "u0", str(HELD[0]))
    forget(home, "u1", str(HELD[1]))
    forget(home, "u1", str(HELD[1] + 1))  # the number of what u1 records next was trained on
    forget(home, "u2", str(HELD[2] + 1))
    left = {user: HELD[user] for user in (2, 3, 4)}
    assert held_out(2) == left, "what is u0's latest now was trained on in round 1"
    home.interactions.add([("u1", "119"), ("single", "7")])
    assert held_out(3) == left | {1: 119, 5: 7}
    forget(home, "u1", None)  # those behind take the place, with what is theirs
    home.interactions.add([("u0", "90")])
    expected = {0: 90, 1: HELD[2], 2: HELD[3], 3: HELD[4], 4: 7}
    assert held_out(4) == expected
    forget(home, "u0", "90")
    # Of a new model nothing was trained on.
    assert held_out(5, replace(ranked_job(RANKED, 5), fresh=True)) == expected | {0: HELD[0] + 1}


def test_an_item_that_the_catalogue_comes_to_know_is_held_out_where_it_is_the_latest(
    recommending: tuple[Home, ScatterTrainer],
) -> None:
    home, device = recommending
    home.interactions.add(
        [("early", "not known yet"), ("early", "5"), ("late", "5"), ("late", "not known yet")]
    )
    work = ranked_job(RANKED)
    commit(home, work, device.train(work))
    with home.database.transaction() as sql:
        sql.execute("UPDATE interaction SET item = '9' WHERE item = 'not known yet'")
    device.train(ranked_job(RANKED, 2))
    early, late = device._local.rows[6:]
    assert early.tolist() == [5, 9], "the latest was the only one, and trained on"
    assert late.tolist() == [5]


def test_ranks_are_those_of_the_benchmarks(recommending: tuple[Home, ScatterTrainer]) -> None:
    home, device = recommending
    work = ranked_job(RANKED)
    first = device.train(work)
    # Nobody had a vector when the model came.
    assert {each.stage for each in first.evaluation.results} == {"personal"}
    assert first.evaluation.reason == "no-model"
    commit(home, work, first)
    work = ranked_job(RANKED, 2)
    users = first.learner_state["users"]
    items = np.asarray(work.broadcast.tensors["items"])
    second = device.train(work)
    assert second.evaluation is not None and second.evaluation.reason == ""
    train = tuple(rows for rows in device._local.rows[:5])
    split = LeaveOneOut(
        ITEMS, train, np.array(list(HELD.values())), tuple(np.array([], np.int64) for _ in range(5))
    )
    for stage, vectors in (("global", users), ("personal", second.learner_state["users"])):
        ranks = full_ranks(vectors[:5], items, split)
        hits = second.evaluation.of(stage, "hr10_all")  # type: ignore[arg-type]
        gains = second.evaluation.of(stage, "ndcg10_all")  # type: ignore[arg-type]
        assert hits is not None and gains is not None
        assert hits.statistics.tolist() == [5, np.count_nonzero(ranks < 10)]
        expected = sum(1 / math.log2(rank + 2) for rank in ranks if rank < 10)
        assert gains.statistics[1] == pytest.approx(expected)
        sampled = second.evaluation.of(stage, "hr10")  # type: ignore[arg-type]
        assert sampled is not None and sampled.statistics[1] >= hits.statistics[1]


def test_a_task_that_recommends_has_no_accuracy(recommending: tuple[Home, ScatterTrainer]) -> None:
    _, device = recommending
    result = device.train(ranked_job(EvaluationTerms(("accuracy", "hr10"))))
    assert result.evaluation is not None and result.evaluation.reason == "undeclared-metric"
    assert {each.metric for each in result.evaluation.results} == {"hr10"}
    assert "measured by hr10, ndcg10" in result.evaluation_detail


def test_results_that_do_not_fit_a_report_are_left_out() -> None:
    """Of every bin of both histograms counts of five bytes: no device has so many samples."""
    evaluation, _ = timed(300.0)
    evaluation._results.clear()
    for stage in ("global", "personal"):
        evaluation._results.append(Evaluation(stage, "auc", np.full(512, 2.0**30)))  # type: ignore
    report = evaluation.report
    assert [each.stage for each in report.results] == ["global"]
    assert report.reason == evaluation.report.reason == "too-large"
