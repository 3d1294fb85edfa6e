from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from device_sdk import Trainer
from device_sdk.runtime.members import packed_view
from export.models.attention_meta import AttentionMeta, base_layout, export_attention, meta_loss
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
    exported = export_attention(
        folder,
        GruClassifier(FEATURES, HIDDEN, CLASSES),
        classification,
        example_windows(FEATURES, hours=6),
        DYNAMIC,
        sketch=SKETCH,
        width=4,
        key_scale=1.0,
    )
    assert exported.report is not None
    return folder


def inputs(
    n: int,
    batch: int = 4,
    *,
    first: float = 1.0,
    second: float = 1.0,
    own_weight: float = 0.0,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)

    return {
        "x": draw(batch, 6, FEATURES),
        "y": rng.integers(0, CLASSES, batch),
        "neighbours": draw(n, SIZE),
        "shared": draw(SIZE),
        "own": draw(SIZE),
        "drift": draw(SIZE),
        "sketches": draw(n, GROUPS, SKETCH),
        "query": draw(GROUPS, SKETCH),
        "first": np.asarray(first, np.float32),
        "second": np.asarray(second, np.float32),
        "own_weight": np.asarray(own_weight, np.float32),
    }


@pytest.mark.parametrize("own_weight", [0.0, 0.7, 3.0])
def test_the_mixture_is_the_formula_of_the_documentation(artifact: Path, own_weight: float) -> None:
    trainer = Trainer(artifact)
    given = inputs(5, own_weight=own_weight)
    drawn = np.random.default_rng(1).standard_normal((GROUPS, 4, SKETCH)).astype(np.float32)
    trainer.set_parameters({"keys": drawn, "second_keys": -drawn})
    found = trainer.predict(given)
    names = ("queries", "keys", "second_keys", "likeness", "bias")
    queries, keys, second_keys, likeness, bias = (trainer.parameters[name] for name in names)
    apart = ((given["sketches"] - given["query"]) ** 2).sum(axis=2).T
    for group, (start, end) in enumerate(LAYOUT.spans):
        q = queries[group] @ given["query"][group]
        k = given["sketches"][:, group] @ keys[group].T
        likes = np.exp(k @ q / 2 - likeness[group] @ apart / 2)
        a = np.append(likes, own_weight * likes.max())
        a /= a.sum()
        np.testing.assert_allclose(found["first"][group], a, rtol=1e-4)
        heard = np.concatenate([given["neighbours"], given["own"][None]])
        likened = np.concatenate([given["sketches"], given["query"][None]])
        u = a @ heard[:, start:end]
        towards = q @ second_keys[group] @ (a @ likened[:, group]) / 2 + bias[group, 0]
        share = 1 / (1 + np.exp(bias[group, 1] - towards))
        np.testing.assert_allclose(found["second"][group], [share, 1 - share], rtol=1e-4)
        mixed = share * u + (1 - share) * given["shared"][start:end]
        np.testing.assert_allclose(
            found["mixed"][start:end], mixed + given["drift"][start:end], rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("n", [1, 2, 9])
def test_one_graph_serves_any_number_of_neighbours(artifact: Path, n: int) -> None:
    trainer = Trainer(artifact)
    assert trainer.predict(inputs(n))["first"].shape == (GROUPS, n + 1)
    before = trainer.parameters["keys"]
    trainer.step(inputs(n))
    assert np.abs(trainer.parameters["keys"] - before).max() > 0 or n == 1


def first_moments(trainer: Trainer) -> dict[str, np.ndarray]:
    """Adam's m by parameter, which after the first step is the gradient."""
    manifest, state = trainer.artifact, trainer.state
    names = {each.like: each.name for each in manifest.state if each.name.startswith("adam.m.")}
    return {
        member.name: packed_view(state[names[tensor.name]], member)
        for tensor, member in manifest.members()
    }


@pytest.mark.parametrize(("n", "own_weight"), [(1, 0.0), (4, 0.0), (4, 0.7)])
def test_the_meta_gradient_is_that_of_the_base_loss_at_the_mixture(
    artifact: Path, n: int, own_weight: float
) -> None:
    trainer = Trainer(artifact)
    given = inputs(n, own_weight=own_weight, seed=3)
    # Away from where they start: with keys of 0 the queries have no gradient.
    rng = np.random.default_rng(4)
    start = {
        name: array + (0.5 * rng.standard_normal(array.shape)).astype(np.float32)
        for name, array in trainer.parameters.items()
    }
    trainer.set_parameters(start)
    loss = trainer.step(given)

    torch_meta = AttentionMeta(LAYOUT, sketch=SKETCH, width=4, key_scale=1.0)
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
        assert certain.any() or (n == 1 and own_weight == 0 and name in ("keys", "likeness"))


def test_layers_can_be_left_out(artifact: Path) -> None:
    trainer = Trainer(artifact)
    alone = trainer.predict(inputs(3, second=0.0))
    np.testing.assert_allclose(alone["second"], [[1, 0]] * GROUPS)
    given = inputs(3, first=0.0)
    mixed = trainer.predict(given)
    for group, (start, end) in enumerate(LAYOUT.spans):
        share = mixed["second"][group]
        expected = share[0] * given["own"] + share[1] * given["shared"] + given["drift"]
        np.testing.assert_allclose(
            mixed["mixed"][start:end], expected[start:end], rtol=1e-3, atol=1e-5
        )


def test_attention_is_uniform_while_its_keys_are_zero() -> None:
    meta = AttentionMeta(LAYOUT, sketch=SKETCH, width=4)
    batch = {n: torch.from_numpy(np.asarray(a)) for n, a in inputs(4).items()}
    first, second = meta.weights(batch)
    torch.testing.assert_close(first[:, :4], torch.full((GROUPS, 4), 0.25))
    torch.testing.assert_close(first[:, 4], torch.zeros(GROUPS))
    torch.testing.assert_close(second, torch.full((GROUPS, 2), 0.5))


def test_attention_starts_with_the_likeness_of_whole_networks() -> None:
    meta = AttentionMeta(LAYOUT, sketch=SKETCH, width=4, key_scale=3.0)
    given = inputs(4)
    first, _ = meta.weights({n: torch.from_numpy(np.asarray(a)) for n, a in given.items()})
    apart = ((given["sketches"] - given["query"]) ** 2).sum(axis=2).mean(axis=1)
    expected = np.exp(-1.5 * apart) / np.exp(-1.5 * apart).sum()
    for group in range(GROUPS):
        np.testing.assert_allclose(first[group, :4].detach().numpy(), expected, rtol=1e-4)


def test_equal_neighbours_and_the_own_network_are_averaged() -> None:
    meta = AttentionMeta(LAYOUT, sketch=SKETCH, width=4)
    batch = {n: torch.from_numpy(np.asarray(a)) for n, a in inputs(4, own_weight=1.0).items()}
    first, _ = meta.weights(batch)
    torch.testing.assert_close(first, torch.full((GROUPS, 5), 0.2))


def test_networks_that_cannot_be_mixed_are_refused(tmp_path: Path) -> None:
    normed = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="buffers"):
        base_layout(normed)
    frozen = nn.Linear(3, 3)
    frozen.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen"):
        base_layout(frozen)
    with pytest.raises(ValueError, match="own inputs"):
        export_attention(
            tmp_path / "a", nn.Linear(3, 3), classification, {"query": torch.zeros(3)}, {}
        )
    with pytest.raises(ValueError, match="at least 1"):
        AttentionMeta(LAYOUT, width=0)
    with pytest.raises(TypeError, match="AttentionMeta"):
        meta_loss(frozen, classification)(frozen, {})
