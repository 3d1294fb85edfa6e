from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.datasets.click import Clicks, ClickSettings, load_clicks
from benchmarks.distill.__main__ import (
    cost_table,
    device_table,
    harder_table,
    quality_table,
    verdict,
)
from benchmarks.distill.experiment import (
    AFD,
    BASELINE,
    GLOBAL,
    PAPER,
    ROWS,
    Experiment,
    ModelChoice,
    Outcome,
    Point,
)
from benchmarks.distill.fleet import ArtifactShelf, click_fields, execute
from benchmarks.recommendation.click_metrics import ClickQuality
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining
from device_sdk.methods.teacher_logits.learner import TeacherLogitsLearner
from device_sdk.wire.arrays.exchange import Broadcast, Update
from tests.benchmarks.made_up_movielens import made_up_movielens

DATA = ClickSettings(
    users=40, least_by_user=10, most_by_movie_refused=2, most_ratings=20, history=4, devices=3
)
TRAINING = TeacherLogitsTraining(classes=2, batch_size=32)
MODEL = ModelChoice("wide_deep", dim=4)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Clicks:
    return load_clicks(made_up_movielens(tmp_path_factory.mktemp("data")), DATA)


@pytest.fixture(scope="module")
def shelf(clicks: Clicks, tmp_path_factory: pytest.TempPathFactory) -> ArtifactShelf:
    return ArtifactShelf(tmp_path_factory.mktemp("shelf"), click_fields(clicks.sizes))


def experiment(method: str = "teacher_logits", rounds: int = 2) -> Experiment:
    return Experiment(0, method, MODEL, rounds, TRAINING, data=DATA)  # type: ignore[arg-type]


def ran(one: Experiment, clicks: Clicks, shelf: ArtifactShelf) -> Outcome:
    return execute(one, clicks, shelf, lambda text: None)


def test_a_run_is_repeatable_and_knowledge_is_small(clicks: Clicks, shelf: ArtifactShelf) -> None:
    first, again = (ran(experiment(), clicks, shelf) for _ in range(2))
    assert [p.quality for p in first.curve] == [p.quality for p in again.curve]
    assert [p.validation_loss for p in first.curve] == [p.validation_loss for p in again.curve]
    assert set(first.best.quality) == {"A", "B", "C", GLOBAL}
    assert first.up_bytes < 300 and first.down_bytes < 1500
    assert first.curve[1].seconds > first.curve[0].seconds > 0


def test_models_travel_under_fedavg_and_all_devices_share_one(
    clicks: Clicks, shelf: ArtifactShelf
) -> None:
    found = ran(experiment("fedavg"), clicks, shelf)
    # float16 each way: two bytes a parameter, and a little around it.
    for size in (found.up_bytes, found.down_bytes):
        assert 2 * found.parameters < size < 2.2 * found.parameters + 2000
    moved = {point.validation_loss for point in found.curve}
    assert len(moved) == len(found.curve)


def test_one_device_with_everything_is_no_fleet(clicks: Clicks, shelf: ArtifactShelf) -> None:
    found = ran(experiment("pooled"), clicks, shelf)
    assert set(found.best.quality) == {"A", "B", "C", GLOBAL}


def test_liars_are_not_measured_and_some_may_be_missing(
    clicks: Clicks, shelf: ArtifactShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying = ran(replace(experiment(), noisy=1), clicks, shelf)
    assert set(lying.best.quality) == {"A", "B", GLOBAL}
    train, trained = TeacherLogitsLearner.train, list[int]()

    def counted(learner: TeacherLogitsLearner, broadcast: Broadcast) -> Update:
        trained.append(broadcast.round_id)
        return train(learner, broadcast)

    monkeypatch.setattr(TeacherLogitsLearner, "train", counted)
    one_of_three = ran(replace(experiment(), present=0.4), clicks, shelf)
    assert trained == [point.round_id for point in one_of_three.curve]


def test_a_falling_rate_is_told_to_devices(clicks: Clicks, shelf: ArtifactShelf) -> None:
    steady = replace(experiment(), model=replace(MODEL, learning_rate=0.05))
    falling = replace(steady, decay=0.5)
    one, two = ran(steady, clicks, shelf), ran(falling, clicks, shelf)
    # The first round's rate is the same, the second's is half.
    assert one.curve[0].validation_loss == two.curve[0].validation_loss
    assert one.curve[1].validation_loss != two.curve[1].validation_loss
    with pytest.raises(ValueError, match="decay is 0"):
        replace(steady, decay=0.0)


def outcome(losses: list[float], auc: float, bytes_up: float = 100) -> Outcome:
    quality = ClickQuality(accuracy=auc - 0.1, auc=auc, ndcg=auc, mae=0.4, loss=0.5)
    named = {"A": quality, "B": quality, GLOBAL: quality}
    curve = [Point(place, loss, 10.0 * place, named) for place, loss in enumerate(losses, start=1)]
    return Outcome(tuple(curve), bytes_up, 10 * bytes_up, 50)


def test_time_to_a_loss_lies_between_rounds() -> None:
    found = outcome([0.8, 0.6, 0.7], auc=0.7)
    assert found.best.round_id == 2
    assert found.seconds_to(0.9) == 10
    assert found.seconds_to(0.7) == pytest.approx(15)
    assert found.seconds_to(0.5) is None
    assert found.rounds_to(0.7) == pytest.approx(1.5)


def test_tables_show_ours_and_the_papers() -> None:
    outcomes = {
        AFD: {0: outcome([0.6, 0.5], 0.76), 1: outcome([0.6, 0.5], 0.78)},
        BASELINE: {0: outcome([0.7, 0.6], 0.72), 1: outcome([0.7, 0.6], 0.73)},
        "FedAvg, Wide & Deep": {0: outcome([0.7, 0.65], 0.7, bytes_up=90_000)},
        "AFD, int8": {0: outcome([0.6, 0.5], 0.75)},
        "local only": {},
    }
    assert "0.7700 ± 0.0141 (0.78)" in quality_table(outcomes)
    assert "0.400 (0.15)" in device_table(outcomes)
    costs = cost_table(outcomes)
    # AFD is at 0.6 after its first round, FD after its second; the paper: 13.4 of 32 minutes.
    assert "never" in costs and "0.50" in costs and "0.42" in costs
    assert "-1.00 points" in harder_table(outcomes)
    said = verdict(outcomes)
    assert "ahead of FD in AUC: +0.0450 (seed spread 0.0141)" in said
    assert "900 times up" in said
    assert "no verdict" in verdict({})


def test_rows_differ_and_cover_the_papers_tables() -> None:
    made = [row.make(0) for row in ROWS]
    assert len(set(map(repr, made))) == len(ROWS) == len({row.name for row in ROWS})
    assert set(PAPER) <= {row.name for row in ROWS}
    assert all(row.make(1) not in made for row in ROWS)


def test_noise_stays_within_what_the_method_takes() -> None:
    from aggregator.methods.teacher_logits import TeacherLogitsMethod
    from benchmarks.distill.fleet import LyingTeacher, random_claims

    method = TeacherLogitsMethod(replace(TRAINING, least_confidence=0.5))
    liar = LyingTeacher(random_claims(np.random.default_rng(0)))
    for round_id in range(1, 6):
        update = liar.train(method.open_round(round_id))
        method.check(update)
        method.absorb(update)
        method.close_round()
        assert (np.diagonal(method.knowledge) >= 0.5 - 1e-6).all()
