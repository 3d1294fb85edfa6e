"""GRU4Rec: what comes after a user's latest items, by a vector of k numbers an item."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import export
from aggregator.methods.fedavg import FedAvgBinding, FedAvgSettings
from device_sdk import LocalData, Trainer
from device_sdk.artifact import load_artifact
from device_sdk.methods.fedavg.learner import FedAvgLearner
from device_sdk.wire.arrays.exchange import decode_update, encode_update
from device_sdk.wire.arrays.tensors import Codec
from export.models.next_item import NextItem, next_item_loss, next_item_recipe, next_scores

ITEMS, LENGTH = 30, 9


def windows(users: int, seed: int) -> np.ndarray:
    """Each user goes through the catalogue in steps of one or two, and began not long ago."""
    rng = np.random.default_rng(seed)
    first, step = rng.integers(ITEMS, size=users), rng.integers(1, 3, size=users)
    found = 1 + (first[:, None] + step[:, None] * np.arange(LENGTH)) % ITEMS
    found[np.arange(LENGTH) < rng.integers(LENGTH - 3, size=users)[:, None]] = 0
    return found


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = tmp_path_factory.mktemp("next") / "net"
    next_item_recipe(NextItem(ITEMS, 16), length=LENGTH).export(folder, with_metrics=True)
    return Trainer(folder, providers="cpu")


def test_it_learns_what_comes_next(trainer: Trainer) -> None:
    rng = np.random.default_rng(1)
    data = windows(400, 2)
    for _ in range(250):
        trainer.step({"items": data[rng.integers(400, size=32)]}, hyper={"lr": 0.02})
    fresh = windows(200, 3)
    before = np.concatenate([np.zeros((200, 1), np.int64), fresh[:, :-1]], axis=1)
    scores = trainer.predict({"items": before})["scores"]
    assert (1 + scores.argmax(axis=1) == fresh[:, -1]).mean() > 0.9


def test_padding_is_no_item(trainer: Trainer) -> None:
    trainer.reset()
    data = windows(8, 4)
    more = np.concatenate([np.zeros((8, 1), np.int64), data[:, 1:]], axis=1)
    vectors = trainer.parameters["items.weight"]
    assert not vectors[0].any()
    trainer.step({"items": more})
    assert not trainer.parameters["items.weight"][0].any(), "no step moves it"


def test_its_width_is_a_ladder_s(tmp_path: Path) -> None:
    recipe = next_item_recipe(NextItem(ITEMS, 16), length=LENGTH)
    rungs = export.submodels(
        lambda width: NextItem(ITEMS, width),
        next_item_loss,
        recipe.example_batch,
        widths=(4, 8, 16),
        optimizer=recipe.optimizer,
        dynamic=recipe.dynamic,
        predict=next_scores,
        directory=tmp_path / "net",
        verify=False,
    )
    small, full = (load_artifact(rungs[place].directory).initial for place in (0, 2))
    np.testing.assert_array_equal(small["items.weight"], full["items.weight"][:, :4])
    gates = np.concatenate([full["gru.weight_hh_l0"][g : g + 4, :4] for g in (0, 16, 32)])
    np.testing.assert_array_equal(small["gru.weight_hh_l0"], gates)
    assert torch.get_default_dtype() == torch.float32


def test_the_first_update_of_averaging_names_what_a_user_watched(tmp_path: Path) -> None:
    next_item_recipe(NextItem(ITEMS, 16), length=LENGTH).export(tmp_path / "net")
    rng = np.random.default_rng(5)
    watched = rng.permutation(np.arange(1, ITEMS + 1))[:LENGTH]
    method = FedAvgBinding("fedavg", FedAvgSettings()).build(
        0, rng, [load_artifact(tmp_path / "net")]
    )
    data, trainer = LocalData({"items": watched[None]}), Trainer(tmp_path / "net", providers="cpu")
    update = FedAvgLearner(lambda: data, trainer, "", rng).train(method.open_round(1))
    read = decode_update(encode_update(update, Codec.INT8, rng), 1)
    rose = 1 + np.flatnonzero(read.tensors["w.bias"] > 0)
    assert set(rose) == set(watched[1:]), "each item but the first, that nothing came before"
