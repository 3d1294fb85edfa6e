"""Rounds of least squares on a device, and what is recommended from its home between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator.methods.scatter_loss import LeastSquaresLoss, LeastSquaresSettings
from device_sdk.errors import NothingLearnt, UnknownUser
from device_sdk.evaluation.report import EvaluationTerms
from device_sdk.factorisation import packaged_artifact
from device_sdk.home.home import Home
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.scatter.contract import BprTraining, decode_scatter_update
from device_sdk.methods.scatter.least_squares import LeastSquares, Likes
from device_sdk.recommender import Recommender
from device_sdk.rounds.current_round import commit_round
from device_sdk.train.job import LocalArtifact, TrainedRound, TrainingJob
from device_sdk.train.scatter import ScatterTrainer
from device_sdk.wire.arrays.exchange import Broadcast
from device_sdk.world import DeviceWorld
from tests.fakes.jobs import job_of
from tests.fakes.step_clock import StepClock
from tests.fakes.worlds import world_of

ITEMS, K = 60, 4
DEVICE = b"c" * 16
RANKED = EvaluationTerms(("hr10", "hr10_all"))


def told(number: int = 1, width: int = K) -> Broadcast:
    items = 0.6 * np.random.default_rng(number).standard_normal((ITEMS, width))
    loss = LeastSquaresLoss((ITEMS, width), LeastSquaresSettings(0.1, 0.02))
    tensors, settings = loss.told(loss.turned(items.astype(np.float32)))
    return Broadcast(number, number, tensors, settings)


def job(broadcast: Broadcast, evaluation: EvaluationTerms | None = None) -> TrainingJob:
    artifact = LocalArtifact(bytes(32), "mf", packaged_artifact())
    return job_of(broadcast, [artifact], "scatter", evaluation=evaluation)


@dataclass
class Bench:
    home: Home
    world: DeviceWorld
    trainer: ScatterTrainer

    def round(self, work: TrainingJob) -> TrainedRound:
        result = self.trainer.train(work)
        commit_round(self.home, DEVICE, work, result)
        return result


def bench_of(home: Home, k: int | None) -> Bench:
    world = world_of(home, DEVICE, np.random.default_rng(2), StepClock(), None, k=k)
    return Bench(home, world, ScatterTrainer(world))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    home = Home(tmp_path / "home", create=True)
    home.interactions.add([("anna", "3"), ("anna", "5"), ("bert", "7"), ("bert", "5")])
    yield bench_of(home, K)
    home.close()


def best(broadcast: Broadcast, liked: list[int], count: int) -> list[tuple[str, float]]:
    """Solved for and scored here, in float64."""
    tensors = broadcast.tensors
    items = tensors["items"].astype(np.float64) * tensors["strengths"]
    a0, l2 = tensors["solve"].astype(np.float64)
    system = a0 * items.T @ items + items[liked].T @ items[liked]
    system += l2 * (len(liked) + a0 * len(items)) * np.eye(items.shape[1])
    scores = items @ np.linalg.solve(system, items[liked].sum(axis=0))
    scores[liked] = -np.inf
    order = np.argsort(-scores)[:count]
    return [(str(row), float(scores[row])) for row in order]


def require_best(found: list[tuple[str, float]], expected: list[tuple[str, float]]) -> None:
    assert [item for item, _ in found] == [item for item, _ in expected]
    np.testing.assert_allclose(
        [score for _, score in found], [score for _, score in expected], rtol=1e-3
    )


def test_what_is_recommended_counts_what_was_recorded_a_moment_ago(bench: Bench) -> None:
    recommender = Recommender(bench.world)
    with pytest.raises(NothingLearnt):
        recommender.recommend(3, "anna")
    bench.round(job(told()))
    require_best(recommender.recommend(5, "anna"), best(told(), [3, 5], 5))
    bench.home.interactions.add([("anna", "11"), ("anna", "not in the catalogue")])
    require_best(recommender.recommend(5, "anna"), best(told(), [3, 5, 11], 5))
    # Somebody who came after the last round needs none.
    bench.home.interactions.add([("new", "20"), ("new", "20")])
    require_best(recommender.recommend(5, "new"), best(told(), [20], 5))
    with pytest.raises(UnknownUser):
        recommender.recommend(5, "nobody")
    # After the next round by its items, and after a restart of the app.
    bench.round(job(told(2)))
    for one in (recommender, Recommender(bench.world)):
        require_best(one.recommend(5, "bert"), best(told(2), [5, 7], 5))
    assert recommender.recommend(0, "anna") == []
    assert len(recommender.recommend(99, "anna")) == ITEMS - 3


def test_a_user_whose_items_the_model_does_not_know_is_told_so(bench: Bench) -> None:
    bench.round(job(told()))
    bench.home.interactions.add([("odd", "not in the catalogue")])
    recommender = Recommender(bench.world)
    with pytest.raises(NothingLearnt, match="'odd' is in the task's catalogue yet"):
        recommender.recommend(3, "odd")
    bench.home.interactions.add([("odd", "7")])
    require_best(recommender.recommend(3, "odd"), best(told(), [7], 3))


def test_a_device_of_few_columns_recommends_at_full_width(tmp_path: Path) -> None:
    home = Home(tmp_path / "home", create=True)
    home.interactions.add([("anna", "3"), ("anna", "5")])
    narrow = bench_of(home, 1)
    result = narrow.round(job(told()))
    assert result.k == 1
    update = decode_scatter_update(result.body, 1, ITEMS, K).tensors
    posed, users = LeastSquares.of(told().tensors), [Likes.of(np.array([3, 5]))]
    assert update["k"] == 1
    np.testing.assert_allclose(update["factor"], posed.trained(users, 1)["factor"], rtol=1e-5)
    require_best(Recommender(narrow.world).recommend(5, "anna"), best(told(), [3, 5], 5))
    home.close()


def test_the_body_is_what_the_home_s_users_pull(bench: Bench) -> None:
    result = bench.round(job(told()))
    update = decode_scatter_update(result.body, 1, ITEMS, K).tensors
    assert (result.k, int(update["users"])) == (K, 2)
    assert update["rows"].tolist() == [3, 5, 7] and update["counts"].tolist() == [1, 2, 1]
    posed = LeastSquares.of(told().tensors)
    scored = posed.vectors([Likes.of(np.array(rows)) for rows in ([3, 5], [5, 7])])
    vectors = scored / posed.strengths
    np.testing.assert_allclose(
        update["factor"].T @ update["factor"], vectors.T @ vectors, rtol=1e-3, atol=1e-6
    )


def test_k_is_chosen_by_timing_the_very_solve(tmp_path: Path) -> None:
    home = Home(tmp_path / "home", create=True)
    home.interactions.add([("anna", str(row)) for row in range(20)])
    one = bench_of(home, None)
    first = one.round(job(told()))
    assert first.capability is not None and first.k == int(first.capability.option)
    assert 1 <= first.k <= K
    # Timing leaves no trace: the same body as of a device that is told its k.
    other_home = Home(tmp_path / "other", create=True)
    other_home.interactions.add([("anna", str(row)) for row in range(20)])
    other = bench_of(other_home, first.k)
    assert other.round(job(told())).body == first.body
    # Known from then on, until the loss or the width is another.
    assert one.round(job(told(2))).capability == first.capability
    wider = one.round(job(told(3, width=2 * K)))
    assert wider.capability.conditions != first.capability.conditions
    for each in (home, other_home):
        each.close()


def test_held_out_items_are_ranked_by_the_vectors_that_the_model_brings(bench: Bench) -> None:
    """Of least squares training leaves no other vectors: there is one stage."""
    result = bench.round(job(told(), RANKED))
    assert result.evaluation is not None and result.evaluation.reason == ""
    assert {each.stage for each in result.evaluation.results} == {"global"}
    hits = result.evaluation.of("global", "hr10_all")
    assert hits is not None and hits.statistics[0] == 2
    update = decode_scatter_update(result.body, 1, ITEMS, K).tensors
    assert update["rows"].tolist() == [3, 7], "each user's latest item is held out"


def broken(**changed: Any) -> Broadcast:
    whole = told()
    tensors = {**whole.tensors, **changed}
    return replace(whole, tensors={n: array for n, array in tensors.items() if array is not None})


@pytest.mark.parametrize(
    "bad",
    [
        broken(strengths=None),
        broken(items=np.ones((ITEMS, K + 1), np.float32)),
        replace(told(), settings=BprTraining().as_scalars(), tensors={}),
        replace(told(), settings={}),
    ],
)
def test_a_bad_broadcast_ends_the_round_in_words_and_leaves_the_home_as_it_was(
    bench: Bench, bad: Broadcast
) -> None:
    bench.round(job(told()))
    before = Recommender(bench.world).recommend(5, "anna")
    with pytest.raises(LearnerError):
        bench.trainer.train(job(replace(bad, round_id=2)))
    assert Recommender(bench.world).recommend(5, "anna") == before
    bench.round(job(told(2)))


def test_a_task_that_changes_its_loss_goes_on(bench: Bench) -> None:
    bench.round(job(told()))
    items = told().tensors["items"]
    bpr = Broadcast(2, 2, {"items": items}, BprTraining().as_scalars())
    bench.round(job(bpr))
    assert len(Recommender(bench.world).recommend(5, "anna")) == 5
    bench.round(job(told(3)))
    require_best(Recommender(bench.world).recommend(5, "anna"), best(told(3), [3, 5], 5))
