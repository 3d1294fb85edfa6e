"""Learning on one device alone, with the artifact that ships."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from device_sdk.artifact.errors import ArtifactError
from device_sdk.factorisation import (
    ITEMS,
    USERS,
    LocalFactorisation,
    LocalSettings,
    packaged_artifact,
    triple_batch,
)
from device_sdk.interactions import Interactions
from device_sdk.trainer import Trainer
from tests.fakes.handmade import linear_artifact


def two_tastes() -> Interactions:
    """Twenty users; the even ones like items 0 to 9, the odd ones 10 to 19, each all but one."""
    likes = [
        (user, item + 10 * (user % 2))
        for user in range(20)
        for item in range(10)
        if item != user // 2
    ]
    rows = np.array(likes, np.int64)
    names = tuple(str(n) for n in range(20))
    return Interactions(rows[:, 0], rows[:, 1], names, names)


def test_the_missing_item_is_recommended() -> None:
    model = LocalFactorisation(
        packaged_artifact(), two_tastes(), LocalSettings(8), rng=np.random.default_rng(0)
    )
    losses = list(model.epochs(60))
    assert losses[-1] < 0.5 * losses[0]
    for user in range(20):
        assert model.recommend(user, 1)[0][0] == user // 2 + 10 * (user % 2)


def test_each_epoch_is_fresh_and_each_seed_repeats() -> None:
    def losses(seed: int) -> list[float]:
        model = LocalFactorisation(
            packaged_artifact(),
            two_tastes(),
            LocalSettings(8, lr=1e-9, batch=7),
            rng=np.random.default_rng(seed),
        )
        return list(model.epochs(2))

    first, second = losses(3)
    assert losses(3) == [first, second] and losses(4)[0] != first
    assert first != second  # the factors have hardly moved: these are other triples


def test_who_has_touched_every_item_gives_no_triples() -> None:
    everything = Interactions(np.array([0, 0, 1]), np.array([0, 1, 0]), ("u", "v"), ("a", "b"))
    model = LocalFactorisation(
        packaged_artifact(), everything, LocalSettings(2), rng=np.random.default_rng(0)
    )
    before = model.trainer.parameters[USERS]
    assert all(np.isfinite(list(model.epochs(3))))
    after = model.trainer.parameters[USERS]
    assert np.array_equal(before[0], after[0]) and not np.array_equal(before[1], after[1])


def test_the_step_is_the_one_of_the_paper() -> None:
    # Rendle et al. 2009: with s = sigmoid(-u.(p - n)), u moves by rate x (s (p - n) - l2 u), etc.
    rng = np.random.default_rng(1)
    users = rng.standard_normal((2, 3), dtype=np.float32)
    items = rng.standard_normal((4, 3), dtype=np.float32)
    trainer = Trainer(packaged_artifact())
    trainer.set_parameters({USERS: users, ITEMS: items})
    one = np.ones(1, np.int64)
    trainer.step(
        triple_batch(one, 2 * one, 3 * one, rates=(0.5, 0.25), l2=(0.1, 0.2)),
        hyper={"lr": 1.0},
    )
    u, p, n = users[1], items[2], items[3]
    s = 1.0 / (1.0 + np.exp(u @ (p - n)))
    after = trainer.parameters
    np.testing.assert_allclose(after[USERS][1], u + 0.5 * (s * (p - n) - 0.1 * u), rtol=1e-5)
    np.testing.assert_allclose(after[ITEMS][2], p + 0.25 * (s * u - 0.2 * p), rtol=1e-5)
    np.testing.assert_allclose(after[ITEMS][3], n + 0.25 * (-s * u - 0.2 * n), rtol=1e-5)
    np.testing.assert_array_equal(after[USERS][0], users[0])
    np.testing.assert_array_equal(after[ITEMS][:2], items[:2])


def test_another_artifact_is_refused(tmp_path: Path) -> None:
    linear_artifact(tmp_path)
    with pytest.raises(ArtifactError, match="is no matrix factorisation"):
        LocalFactorisation(tmp_path, two_tastes(), LocalSettings(4), rng=np.random.default_rng(0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": 0}, "k is 0"),
        ({"k": 1, "batch": 0}, "batch is 0"),
        ({"k": 1, "lr": float("nan")}, "lr is nan"),
        ({"k": 1, "l2": -0.1}, "l2 is -0.1"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalSettings(**wrong)  # type: ignore[arg-type]
