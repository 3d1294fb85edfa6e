"""Mixtures and weights made in NumPy, beside those of the exported graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.simulation import device_name
from device_sdk import Trainer
from device_sdk.methods.attention.contract import AttentionTraining, Layers
from device_sdk.methods.attention.fleet import Neighbours
from device_sdk.methods.attention.mixer import Mixer, favoured, layer_weights
from export.build import Recipe
from export.models.attention_meta import MetaDesign, attention_recipe, base_layout
from export.models.gru_classifier import DYNAMIC, classification

SKETCH = 16
BASE = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
LAYOUT = base_layout(BASE)
GROUPS, SIZE = len(LAYOUT.groups), LAYOUT.size
TOLD = AttentionTraining(sketch_rows=SKETCH)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meta") / "artifact"
    example = {"x": torch.randn(4, 2), "y": torch.randint(2, (4,))}
    design = MetaDesign(SKETCH, width=4, key_scale=1.0, own_bias=0.5)
    base = Recipe(BASE, classification, example, DYNAMIC)
    attention_recipe(base, design).export(folder, verify=False)
    return folder


def learned(artifact: Path) -> Trainer:
    """A meta-network that has moved away from where it starts."""
    meta = Trainer(artifact)
    rng = np.random.default_rng(1)
    meta.set_parameters(
        {name: array + draw(rng, *array.shape) for name, array in meta.parameters.items()}
    )
    return meta


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (0.3 * rng.standard_normal(shape)).astype(np.float32)


def fleet(
    rng: np.random.Generator, n: int
) -> tuple[Neighbours, np.ndarray, np.ndarray, np.ndarray]:
    """Neighbours, and the own network, the global model and the own sketch."""
    names = tuple(device_name(index + 1) for index in range(n))
    neighbours = Neighbours(names, draw(rng, n, SIZE), draw(rng, n, GROUPS, SKETCH))
    return neighbours, draw(rng, SIZE), draw(rng, SIZE), draw(rng, GROUPS, SKETCH)


@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize(
    ("layers", "n"), [("both", 5), ("both", 1), ("first", 5), ("second", 5), ("second", 0)]
)
def test_the_mixture_is_the_graphs_prediction(
    artifact: Path, layers: Layers, n: int, include_self: bool
) -> None:
    meta = learned(artifact)
    neighbours, own, shared, query = fleet(np.random.default_rng(2), n)
    told = replace(TOLD, layers=layers, include_self=include_self)
    mixer = Mixer(meta, told, LAYOUT, neighbours, device_name(0), own, shared, query)
    mixed, scores = mixer.mix(), mixer.scores(3)

    vectors, sketches = neighbours.vectors, neighbours.sketches
    if layers == "second":
        vectors, sketches = own[None], query[None]
    elif include_self:
        vectors = np.concatenate([vectors, own[None]])
        sketches = np.concatenate([sketches, query[None]])
    found = meta.predict(
        {
            **{
                f"neighbours.{k}": (vectors - shared)[:, a:b]
                for k, (a, b) in enumerate(LAYOUT.spans)
            },
            "start": shared,
            "sketches": sketches,
            "query": query,
            "second": np.asarray(layers != "first", np.float32),
        }
    )
    np.testing.assert_allclose(mixed, found["mixed"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scores.second, found["second"], rtol=1e-5)
    if layers == "second":
        assert scores.neighbours == ()
        assert scores.first.shape == (GROUPS, 0)
    else:
        np.testing.assert_allclose(scores.first, found["first"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("own_weight", [0.7, 3.0])
def test_the_own_network_weighs_as_much_as_so_many_favourites(
    artifact: Path, own_weight: float
) -> None:
    meta = learned(artifact)
    neighbours, own, shared, query = fleet(np.random.default_rng(3), 4)
    told = replace(TOLD, own_weight=own_weight)
    mixer = Mixer(meta, told, LAYOUT, neighbours, device_name(0), own, shared, query)
    mixed, scores = mixer.mix(), mixer.scores(3)
    assert scores.neighbours == (*neighbours.names, device_name(0))
    np.testing.assert_allclose(scores.first.sum(axis=1), 1, rtol=1e-5)
    favourites = scores.first[:, :-1].max(axis=1)
    np.testing.assert_allclose(scores.first[:, -1], own_weight * favourites, rtol=1e-5)
    told_names = ("queries", "second_keys", "bias")
    queries, second_keys, bias = (meta.parameters[name] for name in told_names)
    heard = np.concatenate([neighbours.vectors, own[None]])
    sketches = np.concatenate([neighbours.sketches, query[None]])
    for group, (start, end) in enumerate(LAYOUT.spans):
        a = scores.first[group]
        likes = queries[group] @ query[group] @ second_keys[group] @ (a @ sketches[:, group]) / 2
        share = 1 / (1 + np.exp(bias[group, 1] - bias[group, 0] - likes))
        np.testing.assert_allclose(scores.second[group], [share, 1 - share], rtol=1e-4)
        mix = share * (a @ heard[:, start:end]) + (1 - share) * shared[start:end]
        np.testing.assert_allclose(mixed[start:end], mix, rtol=1e-4, atol=1e-6)


def test_equal_neighbours_and_the_own_network_are_averaged(artifact: Path) -> None:
    meta = Trainer(artifact)
    meta.set_parameters({"likeness": np.zeros((GROUPS, GROUPS), np.float32)})
    neighbours, _, _, query = fleet(np.random.default_rng(4), 4)
    first, _ = layer_weights(meta.parameters, query, neighbours.sketches, 1.0, second=True)
    np.testing.assert_allclose(first, np.full((GROUPS, 5), 0.2), rtol=1e-6)


def test_weights_stay_finite_for_scores_far_apart(artifact: Path) -> None:
    meta = Trainer(artifact)
    meta.set_parameters(
        {
            "keys": np.full_like(meta.parameters["keys"], 1e4),
            "bias": np.tile(np.asarray([-1e4, 1e4], np.float32), (GROUPS, 1)),
        }
    )
    neighbours, _, _, query = fleet(np.random.default_rng(5), 4)
    first, second = layer_weights(meta.parameters, query, neighbours.sketches, 1.0, second=True)
    np.testing.assert_allclose(first.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(second, [[0, 1]] * GROUPS)


def test_the_favoured_are_those_that_attention_weighs_most(artifact: Path) -> None:
    neighbours, _, _, query = fleet(np.random.default_rng(6), 6)
    sketches = neighbours.sketches
    sketches[4] = query
    assert 4 in favoured(Trainer(artifact), query, sketches, 1)
    meta = learned(artifact)
    first, _ = layer_weights(meta.parameters, query, sketches, 0.0, second=True)
    most = np.argsort(-first[:, :-1].mean(axis=0))[:3]
    assert favoured(meta, query, sketches, 3) == sorted(most.tolist())


def test_meta_steps_do_without_the_own_network(artifact: Path) -> None:
    meta = Trainer(artifact)
    rng = np.random.default_rng(0)
    neighbours, _, shared, query = fleet(rng, 1)
    batch = {"x": draw(rng, 8, 2), "y": rng.integers(0, 2, 8)}
    told = replace(TOLD, own_weight=1.0)
    losses, mixtures = [], []
    for own in (draw(rng, SIZE), draw(rng, SIZE)):
        mixer = Mixer(meta, told, LAYOUT, neighbours, device_name(0), own, shared, query)
        mixtures.append(mixer.mix())
        before = meta.state
        losses.append(mixer.step(batch, np.zeros(SIZE, np.float32)))
        meta.set_state(before)
    assert losses[0] == losses[1]
    assert np.abs(mixtures[0] - mixtures[1]).max() > 0.05
