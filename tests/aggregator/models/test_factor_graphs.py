"""Item factors as ONNX graphs: what they score, whom they find, held against NumPy and a device."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from aggregator.methods.scatter_loss import LeastSquaresLoss, LeastSquaresSettings
from aggregator.models import newton, newton_graph, score_graph, solve_graph
from device_sdk.methods.scatter.contract import BprTraining
from device_sdk.methods.scatter.factor_step import NumpyStep
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.methods.scatter.least_squares import LeastSquares, Likes
from device_sdk.methods.scatter.triples import PoolSettings
from device_sdk.recommend import top_items
from device_sdk.wire.arrays.exchange import Broadcast

PRODUCER = ("tessera", "test")


def factors(count: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (0.6 * rng.standard_normal((count, width))).astype(np.float32)


def session(data: bytes) -> ort.InferenceSession:
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    return ort.InferenceSession(data, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(("items", "width", "likes"), [(300, 8, 5), (900, 32, 60), (40, 16, 39)])
@pytest.mark.parametrize("user_l2", [0.01, 1e-4])
def test_newtons_graph_finds_what_numpy_finds(
    items: int, width: int, likes: int, user_l2: float
) -> None:
    vectors = factors(items, width)
    graph = session(newton_graph(vectors, user_l2, {}, PRODUCER))
    liked = np.random.default_rng(1).choice(items, likes, replace=False)
    (user,) = graph.run(None, {"liked": liked})
    wanted = newton(vectors, liked, user_l2)
    assert user.dtype == np.float32 and user.shape == (1, width)
    np.testing.assert_allclose(user[0], wanted, rtol=1e-4, atol=1e-6 * np.abs(wanted).max())
    # An item that is named twice is liked once.
    (again,) = graph.run(None, {"liked": np.concatenate([liked, liked[:1]])})
    np.testing.assert_array_equal(again, user)


@pytest.mark.parametrize(("items", "width", "likes"), [(300, 8, 5), (900, 64, 60), (40, 16, 40)])
@pytest.mark.parametrize(("a0", "l2"), [(0.1, 0.01), (0.003, 1e-4)])
def test_the_solving_graph_finds_what_a_device_solves(
    items: int, width: int, likes: int, a0: float, l2: float
) -> None:
    loss = LeastSquaresLoss((items, width), LeastSquaresSettings(a0, l2))
    turned = loss.turned(factors(items, width))
    problem = LeastSquares.of(loss.told(turned)[0])
    graph = session(solve_graph(turned, problem.unseen_weight, problem.l2, {}, PRODUCER))
    liked = np.random.default_rng(1).choice(items, likes, replace=False)
    (user,) = graph.run(None, {"liked": liked})
    wanted = problem.vectors([Likes.of(np.sort(liked))]) @ problem.items.T
    assert user.dtype == np.float32 and user.shape == (1, width)
    np.testing.assert_allclose(user @ turned.T, wanted, atol=1e-3 * np.abs(wanted).max())
    # An item that is named twice is liked once.
    (again,) = graph.run(None, {"liked": np.concatenate([liked, liked[:1]])})
    np.testing.assert_array_equal(again, user)
    assert not graph.run(None, {"liked": np.empty(0, np.int64)})[0].any()


def test_the_solved_vector_is_the_minimum_of_the_least_squares() -> None:
    vectors, liked, a0, l2 = factors(200, 6), np.array([3, 50, 120]), 0.1, 0.02
    graph = session(solve_graph(vectors, a0, l2, {}, PRODUCER))
    user = graph.run(None, {"liked": liked})[0][0].astype(np.float64)

    def loss(u: np.ndarray) -> float:
        scores = vectors.astype(np.float64) @ u
        errors = float(((1 - scores[liked]) ** 2).sum() + a0 * (scores**2).sum())
        return errors + l2 * (len(liked) + a0 * len(vectors)) * float(u @ u)

    rng = np.random.default_rng(2)
    assert all(loss(user) < loss(user + 1e-3 * rng.standard_normal(6)) for _ in range(50))


def test_newtons_vector_is_the_minimum_of_the_devices_loss() -> None:
    vectors = factors(200, 6)
    liked = np.array([3, 50, 120])
    user = newton(vectors, liked, 0.02)
    others = np.delete(np.arange(200), liked)

    def loss(u: np.ndarray) -> float:
        gaps = (vectors[liked] @ u)[:, None] - (vectors[others] @ u)[None, :]
        return float(np.logaddexp(0, -gaps).mean() + 0.01 * u @ u)

    rng = np.random.default_rng(2)
    assert all(loss(user) < loss(user + 1e-3 * rng.standard_normal(6)) for _ in range(50))


def test_nobody_and_somebody_who_likes_everything_have_no_direction() -> None:
    graph = session(newton_graph(factors(20, 4), 0.01, {}, PRODUCER))
    for liked in (np.empty(0, np.int64), np.arange(20)):
        assert not graph.run(None, {"liked": liked})[0].any()


def test_scores_and_the_best_are_those_of_a_device() -> None:
    vectors = factors(50, 8)
    vectors[7] = vectors[3]  # of equals the lower row comes first
    graph = session(score_graph(vectors, {}, PRODUCER))
    users = np.random.default_rng(3).standard_normal((3, 8)).astype(np.float32)
    seen = [np.array([1, 4]), np.empty(0, np.int64), np.arange(45)]
    pairs = np.array([(u, row) for u, rows in enumerate(seen) for row in rows])
    given = {"user": users, "seen": pairs, "count": np.array([10])}
    found = dict(zip(("scores", "best_items", "best_scores"), graph.run(None, given), strict=True))
    np.testing.assert_allclose(found["scores"], users @ vectors.T, rtol=1e-5, atol=1e-6)
    for user in range(3):
        best = top_items(found["scores"][user], seen[user], 10)
        there = np.isfinite(found["best_scores"][user])
        assert found["best_items"][user][there].tolist() == [row for row, _ in best]
    whole = graph.run(None, {**given, "count": np.array([1000])})
    assert whole[1].shape == (3, 50)


def test_a_device_that_settles_ranks_as_the_fold_in_does() -> None:
    """A learner of the device's own, alone with a matrix that stays, while its rate falls."""
    vectors = factors(120, 8, seed=4)
    liked = np.random.default_rng(5).choice(120, 12, replace=False)

    class Liked:
        def positives(self) -> list[np.ndarray]:
            return [liked]

    training = BprTraining(user_l2=0.05)
    told = Broadcast(1, 1, {"items": vectors}, training.as_scalars())
    pool = PoolSettings(pseudo_per_positive=0.0)
    learner = ScatterLearner(Liked(), NumpyStep(), 8, np.random.default_rng(6), pool)
    for number in range(3000):
        rate = 0.7 * 0.001 ** (number / 3000)
        told = Broadcast(
            number + 1, 1, {"items": vectors}, {**told.settings, "user_learning_rate": rate}
        )
        learner.train(told)
    user = newton(vectors, liked, 0.05)
    settled = learner.users[0]
    cosine = user @ settled / (np.linalg.norm(user) * np.linalg.norm(settled))
    assert cosine > 0.995
    assert np.linalg.norm(settled) == pytest.approx(np.linalg.norm(user), rel=0.05)
    mine = [row for row, _ in top_items(vectors @ settled, liked, 10)]
    found = [row for row, _ in top_items((vectors @ user).astype(np.float32), liked, 10)]
    assert len(set(mine) & set(found)) >= 9
