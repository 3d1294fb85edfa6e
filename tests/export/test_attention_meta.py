from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from device_sdk import Trainer
from device_sdk.runtime.state import Members
from export.build import Recipe
from export.models.attention_meta import (
    AttentionMeta,
    MetaDesign,
    attention_recipe,
    base_layout,
    meta_loss,
)
from export.models.gru_classifier import (
    DYNAMIC,
    GruClassifier,
    classification,
    example_windows,
)

pytestmark = pytest.mark.slow

FEATURES, HIDDEN, CLASSES, SKETCH = 3, 4, 5, 8
LAYOUT = base_layout(GruClassifier(FEATURES, HIDDEN, CLASSES))
GROUPS, SIZE = len(LAYOUT.groups), LAYOUT.size


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meta") / "artifact"
    base = Recipe(
        GruClassifier(FEATURES, HIDDEN, CLASSES),
        classification,
        example_windows(FEATURES, hours=6),
        DYNAMIC,
    )
    design = MetaDesign(SKETCH, width=4, key_scale=1.0)
    exported = attention_recipe(base, design).export(folder)
    assert exported.report is not None
    return folder


def inputs(n: int, batch: int = 4, *, second: float = 1.0, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)

    return {
        "x": draw(batch, 6, FEATURES),
        "y": rng.integers(0, CLASSES, batch),
        **{f"neighbours.{k}": draw(n, end - start) for k, (start, end) in enumerate(LAYOUT.spans)},
        "start": draw(SIZE),
        "sketches": draw(n, GROUPS, SKETCH),
        "query": draw(GROUPS, SKETCH),
        "second": np.asarray(second, np.float32),
    }


def test_the_mixture_is_the_formula_of_the_documentation(artifact: Path) -> None:
    trainer = Trainer(artifact)
    given = inputs(5)
    drawn = np.random.default_rng(1).standard_normal((GROUPS, 4, SKETCH)).astype(np.float32)
    trainer.set_parameters({"keys": drawn, "second_keys": -drawn})
    found = trainer.predict(given)
    names = ("queries", "keys", "second_keys", "likeness", "bias")
    queries, keys, second_keys, likeness, bias = (trainer.parameters[name] for name in names)
    apart = ((given["sketches"] - given["query"]) ** 2).sum(axis=2).T
    for group, (start, end) in enumerate(LAYOUT.spans):
        q = queries[group] @ given["query"][group]
        k = given["sketches"][:, group] @ keys[group].T
        a = np.exp(k @ q / 2 - likeness[group] @ apart / 2)
        a /= a.sum()
        np.testing.assert_allclose(found["first"][group], a, rtol=1e-4)
        towards = q @ second_keys[group] @ (a @ given["sketches"][:, group]) / 2 + bias[group, 0]
        share = 1 / (1 + np.exp(bias[group, 1] - towards))
        np.testing.assert_allclose(found["second"][group], [share, 1 - share], rtol=1e-4)
        shared = given["start"][start:end]
        u = a @ (shared + given[f"neighbours.{group}"])
        mixed = share * u + (1 - share) * shared
        np.testing.assert_allclose(found["mixed"][start:end], mixed, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_one_graph_serves_any_number_of_neighbours(artifact: Path, n: int) -> None:
    trainer = Trainer(artifact)
    assert trainer.predict(inputs(n))["first"].shape == (GROUPS, n)
    before = trainer.parameters["keys"]
    trainer.step(inputs(n))
    assert np.abs(trainer.parameters["keys"] - before).max() > 0 or n == 1


def first_moments(trainer: Trainer) -> dict[str, np.ndarray]:
    """Adam's m by parameter, which after the first step is the gradient."""
    manifest, state = trainer.artifact, trainer.state
    members = Members(manifest)
    names = {each.like: each.name for each in manifest.state if ".exp_avg." in each.name}
    return {
        member.name: members.view(member.name, state[names[tensor.name]])
        for tensor, member in manifest.members()
    }


@pytest.mark.parametrize("n", [1, 4])
def test_the_meta_gradient_is_that_of_the_base_loss_at_the_mixture(artifact: Path, n: int) -> None:
    trainer = Trainer(artifact)
    given = inputs(n, seed=3)
    # Away from where they start: with keys of 0 the queries have no gradient.
    rng = np.random.default_rng(4)
    start = {
        name: array + (0.5 * rng.standard_normal(array.shape)).astype(np.float32)
        for name, array in trainer.parameters.items()
    }
    trainer.set_parameters(start)
    loss = trainer.step(given)

    torch_meta = AttentionMeta(LAYOUT, MetaDesign(SKETCH, width=4, key_scale=1.0))
    torch_meta.load_state_dict({name: torch.from_numpy(array) for name, array in start.items()})
    optimizer = torch.optim.Adam(torch_meta.parameters(), lr=0.02)
    batch = {name: torch.from_numpy(np.asarray(array)) for name, array in given.items()}
    expected = meta_loss(GruClassifier(FEATURES, HIDDEN, CLASSES), classification)(
        torch_meta, batch
    )
    assert isinstance(expected, Tensor)
    expected.backward()
    optimizer.step()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-4)
    found, moments = trainer.parameters, first_moments(trainer)
    for name, parameter in torch_meta.named_parameters():
        assert parameter.grad is not None
        gradient = parameter.grad.numpy()
        # Adam's first step alone would show little but the gradient's signs.
        np.testing.assert_allclose(moments[name], gradient, rtol=1e-3, atol=1e-7)
        # Where a gradient is rounding alone, so is the sign that Adam follows.
        certain = np.abs(gradient) > 1e-6
        moved = parameter.detach().numpy()
        np.testing.assert_allclose(found[name][certain], moved[certain], rtol=1e-5, atol=1e-6)
        assert certain.any() or (n == 1 and name in ("keys", "likeness"))


def test_the_global_model_can_be_left_out(artifact: Path) -> None:
    given = inputs(3, second=0.0)
    found = Trainer(artifact).predict(given)
    np.testing.assert_array_equal(found["second"], [[1, 0]] * GROUPS)
    for group, (start, end) in enumerate(LAYOUT.spans):
        heard = given["start"][start:end] + found["first"][group] @ given[f"neighbours.{group}"]
        np.testing.assert_allclose(found["mixed"][start:end], heard, rtol=1e-3, atol=1e-5)


def test_a_neighbour_without_others_has_all_the_weight(artifact: Path) -> None:
    """Which is how layer 2 works alone: the own network is that neighbour."""
    np.testing.assert_array_equal(Trainer(artifact).predict(inputs(1))["first"], [[1]] * GROUPS)


def test_attention_is_uniform_while_its_keys_are_zero() -> None:
    meta = AttentionMeta(LAYOUT, MetaDesign(SKETCH, width=4))
    batch = {n: torch.from_numpy(np.asarray(a)) for n, a in inputs(4).items()}
    first, heard, shared = meta.weights(batch)
    torch.testing.assert_close(first, torch.full((GROUPS, 4), 0.25))
    torch.testing.assert_close(heard, torch.full((GROUPS, 1), 0.5))
    torch.testing.assert_close(shared, torch.full((GROUPS, 1), 0.5))


def test_attention_starts_with_the_likeness_of_whole_networks() -> None:
    meta = AttentionMeta(LAYOUT, MetaDesign(SKETCH, width=4, key_scale=3.0))
    given = inputs(4)
    first, _, _ = meta.weights({n: torch.from_numpy(np.asarray(a)) for n, a in given.items()})
    apart = ((given["sketches"] - given["query"]) ** 2).sum(axis=2).mean(axis=1)
    expected = np.exp(-1.5 * apart) / np.exp(-1.5 * apart).sum()
    for group in range(GROUPS):
        np.testing.assert_allclose(first[group].detach().numpy(), expected, rtol=1e-4)


def test_networks_that_cannot_be_mixed_are_refused() -> None:
    normed = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="buffers"):
        base_layout(normed)
    frozen = nn.Linear(3, 3)
    frozen.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen"):
        base_layout(frozen)
    with pytest.raises(ValueError, match="own inputs"):
        attention_recipe(Recipe(nn.Linear(3, 3), classification, {"query": torch.zeros(3)}, {}))
    with pytest.raises(ValueError, match="at least 1"):
        MetaDesign(width=0)
    with pytest.raises(TypeError, match="AttentionMeta"):
        meta_loss(frozen, classification)(frozen, {})
