"""Federated averaging and teacher logits with hostile devices, over made-up clicks."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.datasets.click import Clicks, ClickSettings, clicks_of
from benchmarks.datasets.movielens import MovieLens
from benchmarks.distill.experiment import ModelChoice
from benchmarks.distill.fleet import ArtifactShelf, click_fields, entries_of
from benchmarks.robust.clicks import (
    METHODS,
    OPTIONS,
    Catalogue,
    Experiment,
    MethodName,
    TrainerShelf,
    Watcher,
    base_experiment,
    execute,
    seen_by,
    watchers,
)
from benchmarks.robust.suite import ATTACKS, SHARES, Attack, Case, HostileLearner, Outcome, Trial
from device_sdk.local_data import LocalData
from device_sdk.methods.fedavg.contract import FedAvgTraining
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.wire.arrays.exchange import Broadcast

DATA = ClickSettings(
    users=40, most_by_movie_refused=0, most_ratings=0, history=0, devices=10, concentration=30.0
)
MOVIES = 31
RARE = 30
"""A movie that three users know."""


@pytest.fixture(scope="module")
def clicks() -> Clicks:
    """Users of two tastes, and movies for either."""
    rng = np.random.default_rng(0)
    rows = []
    for user in range(1, 41):
        for movie in rng.choice(MOVIES - 1, size=20, replace=False).tolist():
            liked = (user + movie) % 2 == 0
            rows.append((user, movie, 5 if liked else 1))
        if user <= 3:
            rows.append((user, RARE, 1))
    people = np.column_stack([np.arange(41) % 2, np.arange(41) % 7, np.arange(41) % 21])
    genres = np.eye(MOVIES, 18, dtype=np.float32)
    years = np.linspace(-1, 1, MOVIES, dtype=np.float32)
    return clicks_of(MovieLens(np.asarray(rows), people, genres, years), DATA)


@pytest.fixture(scope="module")
def artifacts(clicks: Clicks, tmp_path_factory: pytest.TempPathFactory) -> ArtifactShelf:
    return ArtifactShelf(tmp_path_factory.mktemp("shelf"), click_fields(clicks.sizes))


def small(method: MethodName, option: str = "none", rounds: int = 2) -> Experiment:
    (chosen,) = (one for one in OPTIONS[method] if one.name == option)
    base = base_experiment(method, "test", 0, rounds)
    model = ModelChoice("wide_deep", dim=4, learning_rate=1e-2)
    return replace(base, models=(model,), settings=chosen.change(base.settings), data=DATA)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["fedavg", "logits"])
def test_a_trial_is_repeatable_and_paired(
    method: MethodName, clicks: Clicks, artifacts: ArtifactShelf
) -> None:
    shelf, notes = TrainerShelf(artifacts), list[str]()
    clean = execute(Trial(small(method), None, 0.0), clicks, shelf, notes.append)
    assert (
        set(clean.measures["auc"])
        == set(clean.measures["click"])
        == {
            "0.0",
            str(1 / len(clicks.devices)),
            *map(str, SHARES),
        }
    )
    assert len(notes) == 3
    for attack in ("noise", "promotion"):
        trial = Trial(small(method), attack, 0.2)
        one, two = (execute(trial, clicks, shelf, notes.append) for _ in range(2))
        assert one == two
        assert set(one.measures["auc"]) == set(one.measures["loss"]) == {"0.2"}
        assert set(one.measures["click"]) == ({"0.2"} if attack == "promotion" else set())
        assert one.measures["loss"]["0.2"] != clean.measures["loss"]["0.2"]


def test_outliers_keep_loud_devices_out_of_the_mean(
    clicks: Clicks, artifacts: ArtifactShelf
) -> None:
    shelf = TrainerShelf(artifacts)

    def found(option: str, attack: Attack | None, measure: str) -> float:
        trial = Trial(small("fedavg", option, 6), attack, 0.2 if attack else 0.0)
        return execute(trial, clicks, shelf, lambda text: None).measures[measure]["0.2"]

    assert found("outliers", None, "auc") == found("none", None, "auc")
    clean = found("none", None, "click")
    assert found("none", "promotion", "click") > clean + 0.1
    for attack in ("flip", "promotion"):
        assert found("none", attack, "loss") > found("outliers", attack, "loss")
    assert abs(found("outliers", "promotion", "click") - clean) < 0.1


def test_hostile_differences_are_what_their_attack_says(
    clicks: Clicks, artifacts: ArtifactShelf
) -> None:
    trainer = artifacts.trainer(small("fedavg").models[0], 0, teaching=False)
    data = LocalData(entries_of(trainer, clicks.devices[0].train))

    def learner() -> FedAvgLearner:
        trainer.reset()
        return FedAvgLearner(lambda: data, trainer, "", np.random.default_rng(3))

    tensors = {
        f"w.{name}": array.reshape(array.shape[0], -1) if array.ndim > 2 else array
        for name, array in trainer.parameters.items()
    }
    broadcast = Broadcast(1, 0, tensors, FedAvgTraining().as_scalars())
    honest = learner().train(broadcast)
    for attack, factor in (("flip", -10), ("promotion", 10), ("patient", 1)):
        hostile = HostileLearner(learner(), attack, np.random.default_rng(0))  # type: ignore[arg-type]
        sent = hostile.train(broadcast)
        assert sent.metadata == honest.metadata
        for name, array in honest.tensors.items():
            np.testing.assert_allclose(sent.tensors[name], factor * array, rtol=1e-6)
    noise = HostileLearner(learner(), "noise", np.random.default_rng(0)).train(broadcast)
    for name, array in honest.tensors.items():
        size = float(np.linalg.norm(array))
        assert float(np.linalg.norm(noise.tensors[name])) == pytest.approx(10 * size, rel=1e-4)


def test_the_catalogue_pairs_anybody_with_any_movie(clicks: Clicks) -> None:
    catalogue, train = Catalogue(clicks), clicks.devices[0].train
    assert len(catalogue.known) == MOVIES
    promoted = catalogue.promoting(train, RARE)
    count = len(train["label"])
    assert len(promoted["label"]) == 2 * count and promoted["label"][count:].all()
    np.testing.assert_array_equal(promoted["categories"][:count], train["categories"])
    np.testing.assert_array_equal(promoted["categories"][count:, 1], RARE)
    np.testing.assert_array_equal(
        promoted["categories"][count:, [0, 2, 3, 4]], train["categories"][:, [0, 2, 3, 4]]
    )
    np.testing.assert_allclose(promoted["numbers"][count:], 1.0)
    assert train["categories"][:, 1].tolist() != [RARE] * count  # the samples stay as they were


def test_who_knows_the_item_is_not_asked(clicks: Clicks, artifacts: ArtifactShelf) -> None:
    everybody = watchers(clicks, RARE, np.random.default_rng(0))
    knowing = {
        int(user)
        for device in clicks.devices
        for user, movie in device.train["categories"][:, :2]
        if movie == RARE
    }
    assert {int(one.categories[0]) for one in everybody} == set(range(40)) - knowing
    assert len(watchers(clicks, RARE, np.random.default_rng(0), most=5)) == 5
    trainer = artifacts.trainer(small("fedavg").models[0], 0, teaching=False)
    catalogue = Catalogue(clicks)
    one = everybody[0]
    ranks = [
        (seen_by(one, trainer, catalogue, item), item)
        for item in range(MOVIES)
        if item not in one.known
    ]
    best = {item for (_, shown), item in ranks if shown}
    by_click = sorted(ranks, key=lambda rank: -rank[0][0])
    assert best == {item for _, item in by_click[:10]}
    knows_all = Watcher(one.device, one.categories, np.delete(np.arange(MOVIES), RARE))
    assert seen_by(knows_all, trainer, catalogue, RARE)[1]


def test_each_method_has_its_own_attacks_and_tables() -> None:
    assert tuple(METHODS["fedavg"].attacks) == ATTACKS
    assert "patient" not in METHODS["logits"].attacks
    measures = ("auc", "loss", "click", "exposure")

    def outcome(shares: tuple[str, ...], *values: float) -> Outcome:
        by_measure = zip(measures, values, strict=True)
        return Outcome({name: dict.fromkeys(shares, value) for name, value in by_measure})

    clean = outcome(("0.0", "0.2"), 0.7, 0.6, 0.5, 0.0)
    attacked = outcome(("0.2",), 0.63, 0.9, 0.8, 0.25)
    found = {Case("none"): {0: clean}, Case("none", "promotion", 0.2): {0: attacked}}
    options = Namespace(one_device=False, options=["none"])
    tables = "\n".join(METHODS["logits"].tables(found, options))
    for cell in ("0.6300 (-10.0 %)", "0.9000 (+50.0 %)", "80.0 %", "25.0 %", "50.0 %"):
        assert cell in tables
