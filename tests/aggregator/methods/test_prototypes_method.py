from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from aggregator.errors import TaskError
from aggregator.methods.method import Refused, read_binding
from aggregator.methods.prototypes import (
    PrototypeServerSettings,
    PrototypesMethod,
    PrototypesSettings,
    TrainablePrototypes,
    margin_of,
)
from aggregator.tables import TomlTable
from device_sdk.artifact import load_artifact
from device_sdk.methods.labels import LabelKnowledge
from device_sdk.methods.prototypes.contract import PrototypesTraining, encode_prototypes
from device_sdk.methods.state import RestoreError
from device_sdk.wire.arrays.exchange import Update
from export.models.images import ImageShape
from export.models.prototypes import prototypes_recipe
from tests.fakes.handmade import linear_artifact

TRAINING = PrototypesTraining(classes=3, width=2)
QUICK = PrototypeServerSettings(epochs=3, batch_size=4)


def method(**chosen: Any) -> PrototypesMethod:
    settings = PrototypesSettings(TRAINING, server=QUICK, **chosen)
    return PrototypesMethod(settings, np.random.default_rng(0))


def sent(labels: list[int], means: list[list[float]], counts: list[int] | None = None) -> Update:
    return Update(
        1,
        encode_prototypes(
            LabelKnowledge(
                np.asarray(labels, np.int64),
                np.asarray(counts or [1] * len(labels), np.int64),
                np.asarray(means, np.float32).reshape(-1, 2),
            )
        ),
    )


def drawn(seed: int, round_id: int = 1) -> Update:
    rng = np.random.default_rng(seed)
    labels = np.flatnonzero(rng.random(3) < 0.8)
    means = rng.standard_normal((len(labels), 2))
    counts = rng.integers(1, 9, len(labels))
    return Update(round_id, sent(labels.tolist(), means.tolist(), counts.tolist()).tensors)


def closed(one: PrototypesMethod, *updates: Update) -> dict[str, float]:
    one.open_round(1)
    for each in updates:
        one.check(each)
        one.absorb(each)
    return dict(one.close_round().metrics)


def test_a_class_has_the_mean_of_the_devices_that_have_it() -> None:
    one = method()
    found = closed(one, sent([0, 1], [[1, 2], [4, 4]]), sent([1], [[0, 2]], [99]))
    np.testing.assert_array_equal(one.prototypes, [[1, 2], [2, 3], [0, 0]])
    assert found == {"bounded": 0, "labels": 2}
    opened = one.open_round(2)
    assert opened.tensors["devices"].tolist() == [1, 2, 0] and opened.version == 1
    # A class that nobody of the next round has keeps its prototype.
    one.absorb(Update(2, sent([2], [[7, 7]]).tensors))
    one.close_round()
    np.testing.assert_array_equal(one.prototypes, [[1, 2], [2, 3], [7, 7]])


def test_samples_weigh_up_to_what_a_device_may_claim() -> None:
    one = method(weights="samples", most_samples=3)
    closed(one, sent([0], [[1, 0]], [1]), sent([0], [[5, 0]], [2**31 - 1]))
    np.testing.assert_array_equal(one.prototypes[0], [4, 0])


def test_a_prototype_that_is_too_long_is_scaled_down() -> None:
    one = method(most_length=5.0)
    assert closed(one, sent([0, 1], [[30, 40], [3, 4]]))["bounded"] == 1
    np.testing.assert_allclose(one.prototypes[:2], [[3, 4], [3, 4]], rtol=1e-6)


@pytest.mark.parametrize("robust", ["median", "trimmed"])
def test_a_minority_does_not_decide_a_robust_prototype(robust: str) -> None:
    honest = [sent([0], [[value, 1]]) for value in (1.0, 2.0, 3.0, 2.0)]
    one = method(robust=robust, trim_share=0.25)
    closed(one, *honest, sent([0, 2], [[6e4, -6e4], [1, 1]]))
    assert 1 <= one.prototypes[0, 0] <= 3 and one.prototypes[0, 1] == 1
    np.testing.assert_array_equal(one.prototypes[2], [1, 1])


def test_settings_may_change_between_rounds() -> None:
    plain, trained = method(), method(trained=True)
    closed(plain, drawn(1))
    trained.restore(plain.state())
    assert trained.prototypes.tolist() == plain.prototypes.tolist()
    trained.open_round(2)
    trained.absorb(drawn(2, round_id=2))
    trained.close_round()
    plain.restore(trained.state())
    with pytest.raises(RestoreError):
        plain.restore({**trained.state(), "known": np.zeros((3, 3), np.float32)})


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (Update(2, drawn(0).tensors), "bad-round"),
        (Update(1, drawn(0).tensors, {"loss": 1.0}), "bad-metadata"),
        (Update(1, {}), "bad-tensors"),
        (Update(1, {**sent([0], [[1, 1]]).tensors, "labels": np.array([3], np.uint16)}), "bad-t"),
        (Update(1, {**sent([0], [[1, 1]]).tensors, "counts": np.array([0], np.int32)}), "bad-t"),
        (
            Update(1, {**sent([0], [[1, 1]]).tensors, "prototypes": np.ones((1, 3), np.float32)}),
            "bad-tensors",
        ),
        *(
            (
                Update(1, {**sent([0], [[1, 1]]).tensors, "prototypes": np.array([[1, v]], "f4")}),
                "bad-tensors",
            )
            for v in (np.nan, np.inf, 9.5e11)
        ),
    ],
)
def test_refusals_have_reasons(broken: Update, reason: str) -> None:
    one = method()
    one.open_round(1)
    with pytest.raises(Refused) as caught:
        one.check(broken)
    assert caught.value.reason.startswith(reason)


def test_a_round_that_holds_all_it_may_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aggregator.methods.robust.MOST_HELD_BYTES", 20)
    one = method(trained=True)
    one.open_round(1)
    for _ in range(2):
        assert not one.full
        one.absorb(sent([0], [[1, 1]]))
    assert one.full
    with pytest.raises(Refused) as caught:
        one.check(sent([0], [[1, 1]]))
    assert caught.value.reason == "round-full"


# Trained prototypes.


def server(rate: float = 0.01, epochs: int = 3, seed: int = 0) -> TrainablePrototypes:
    settings = PrototypeServerSettings(epochs=epochs, batch_size=4, learning_rate=rate)
    return TrainablePrototypes(3, 5, settings, np.random.default_rng(seed))


@pytest.mark.parametrize("margin", [0.0, 2.5])
def test_the_gradient_is_torchs(margin: float) -> None:
    """The loss as the paper's authors write it."""
    one = server()
    rng = np.random.default_rng(1)
    vectors, labels = rng.standard_normal((7, 5)), rng.integers(0, 3, 7)
    loss, found = one.gradient(vectors, labels, margin)
    leaves = [torch.from_numpy(array.copy()).requires_grad_() for array in one._arrays()]
    table, weight1, bias1, weight2, bias2 = leaves
    made = torch.relu(table @ weight1 + bias1) @ weight2 + bias2
    distances = torch.cdist(torch.from_numpy(vectors), made)
    hot = torch.nn.functional.one_hot(torch.from_numpy(labels), 3)
    wanted = torch.nn.functional.cross_entropy(
        -(distances + margin * hot), torch.from_numpy(labels)
    )
    wanted.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(wanted.item(), rel=1e-9)
    for array, leaf in zip(found, leaves, strict=True):
        np.testing.assert_allclose(array, leaf.grad.numpy(), rtol=1e-7, atol=1e-10)  # type: ignore[union-attr]


def test_the_margin_is_the_widest_gap_to_a_nearest_class_and_bounded() -> None:
    vectors = np.array([[0.0, 0], [0, 2], [3, 1], [10, 1]])
    labels = np.array([0, 0, 1, 2])
    # Means (0, 1), (3, 1), (10, 1): the nearest are 3, 3 and 7 away.
    assert margin_of(vectors, labels, 100) == 7
    assert margin_of(vectors, labels, 5) == 5
    assert margin_of(vectors[:2], labels[:2], 100) == 100


def test_trained_prototypes_are_further_apart_than_means_and_near_their_own() -> None:
    """What FedTGP is for: devices' prototypes of a class lie apart, and means lose the margin."""
    rng = np.random.default_rng(3)
    centres = 2 * np.eye(3, 5)
    vectors = np.concatenate([centres + 0.8 * rng.standard_normal((3, 5)) for _ in range(6)])
    labels = np.tile(np.arange(3), 6)
    one = server(rate=0.05, epochs=200)
    loss = one.fit(vectors, labels, np.random.default_rng(0))
    means = np.stack([vectors[labels == label].mean(0) for label in range(3)])

    def least(table: NDArray[np.float64]) -> float:
        return min(float(np.linalg.norm(table[a] - table[b])) for a, b in ((0, 1), (0, 2), (1, 2)))

    assert np.isfinite(loss) and least(one.prototypes) > 1.2 * least(means)
    nearest = np.linalg.norm(vectors[:, None] - one.prototypes, axis=2).argmin(1)
    assert (nearest == labels).mean() > 0.9


def test_training_is_the_same_again_and_fails_whole() -> None:
    vectors, labels = np.random.default_rng(0).standard_normal((9, 5)), np.arange(9) % 3
    one, two = server(), server()
    assert [each.fit(vectors, labels, np.random.default_rng(4)) for each in (one, two)]
    np.testing.assert_array_equal(one.prototypes, two.prototypes)
    wild = server(rate=1e3, epochs=2000)
    before = wild.prototypes
    if not np.isfinite(wild.fit(1e4 * vectors, labels, np.random.default_rng(0))):
        np.testing.assert_array_equal(wild.prototypes, before)
    np.testing.assert_array_equal(np.isfinite(wild.prototypes), True)


# The task file.


def table(chosen: dict[str, Any] | None = None, **training: object) -> TomlTable:
    return TomlTable({"training": training, **(chosen or {})}, "prototypes")


def test_a_task_file_makes_the_method_for_fitting_models(tmp_path: Path) -> None:
    shape = ImageShape(size=16, classes=4)
    prototypes_recipe("vgg", shape, width=8).export(tmp_path / "vgg", verify=False)
    artifact = load_artifact(tmp_path / "vgg")
    rng = np.random.default_rng(0)
    chosen = {"trained": True, "server": {"epochs": 7}}
    binding = read_binding("prototypes", table(chosen, classes=4, width=8, pull=0.5))
    built = binding.build(0, rng, [artifact, artifact])
    assert binding.stages == ("personal",) and built.open_round(1).settings["pull"] == 0.5
    other = read_binding("prototypes", table(classes=4, width=9))
    with pytest.raises(ValueError, match=r"takes prototypes \(4, 8\); the task's .* are \(4, 9\)"):
        other.build(0, rng, [artifact])
    linear_artifact(tmp_path / "linear")
    with pytest.raises(ValueError, match="takes no prototype: export it with"):
        other.build(0, rng, [load_artifact(tmp_path / "linear")])


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"trained": True, "robust": "median"}, "robust is 'median'"),
        ({"trained": True, "weights": "samples"}, "weights is 'samples'"),
        ({"rate_decay": 0.5}, "rate_decay needs a learning_rate"),
        ({"server": {"epochs": 0}}, "server.epochs"),
        ({"most_length": -1}, "most_length"),
    ],
)
def test_what_is_wrong_with_the_table_is_said(chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        read_binding("prototypes", table(chosen, classes=3))
