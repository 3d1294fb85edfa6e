"""Attention over fields against its equations, one sample and one channel at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import export
from device_sdk import Trainer
from export.models.fields import FieldAttention


def _softmax(scores: np.ndarray) -> np.ndarray:
    shifted = np.exp(scores - scores.max())
    return shifted / shifted.sum()


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _weights(attention: FieldAttention, query: np.ndarray, fields: np.ndarray) -> np.ndarray:
    """Equations 7 and 8 for one sample: query [dim], fields [r, dim]."""
    matrix = attention.query.weight.detach().double().numpy()
    bias = attention.query.bias.detach().double().numpy()
    keys = _unit(_unit(fields) + attention.place.detach().double().numpy())
    scores = keys @ (matrix @ _unit(query) + bias)
    channels = [_softmax(scores * w) for w in attention.widen.detach().double().numpy()]
    return np.mean(channels, 0)


def test_weights_map_and_picture_follow_the_equations() -> None:
    torch.manual_seed(0)
    attention = FieldAttention(3, 6, channels=5)
    with torch.no_grad():
        attention.query.weight.normal_()
        attention.widen.copy_(torch.tensor([-3.0, 0.5, 1.0, 4.0, 9.0]))
    fields = torch.randn(4, 3, 6)
    field_map, summed, weights = (x.detach().numpy() for x in attention(fields))
    pictures = []
    for index, sample in enumerate(fields.double().numpy()):
        a = _weights(attention, sample.mean(0), sample)
        np.testing.assert_allclose(weights[index], a, rtol=1e-4)
        np.testing.assert_allclose(summed[index], a @ sample, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(field_map[index], 3 * a[:, None] * sample, rtol=1e-4, atol=1e-5)
        pictures.append([_weights(attention, query, sample) for query in sample])
    picture = attention.interactions(fields).detach().numpy()
    np.testing.assert_allclose(picture, np.mean(pictures, 0), rtol=1e-4)
    np.testing.assert_allclose(picture.sum(1), 1, rtol=1e-5)


def test_a_step_trains_query_and_channels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = {"fields": torch.randn(7, 4, 5), "y": torch.randn(7, 5)}
    exported = export.train_step(
        FieldAttention(4, 5, channels=3),
        lambda m, b: ((m(b["fields"])[1] - b["y"]) ** 2).sum(1).mean(),
        batch,
        optimizer=export.Sgd(0.2),
        dynamic={name: {0: "batch"} for name in batch},
        predict=lambda m, b: {"weights": m(b["fields"])[2]},
        directory=tmp_path / "a",
    )
    assert exported.report is not None and exported.report.unmoved == ()
    trainer = Trainer(tmp_path / "a", providers="cpu")
    given = {name: value.numpy() for name, value in batch.items()}
    start = trainer.parameters
    losses = [trainer.step(given) for _ in range(40)]
    assert losses[-1] < losses[0]
    assert all(np.any(start[name] != value) for name, value in trainer.parameters.items())
    np.testing.assert_allclose(trainer.predict(given)["weights"].sum(1), 1, rtol=1e-5)


def test_weights_start_uniform_and_learn_as_fast_on_small_embeddings(tmp_path: Path) -> None:
    """What is wanted is the second of five fields, all as small as embeddings start.

    Bare products of such embeddings are about 1e-3: their softmax stayed uniform.
    """
    torch.manual_seed(0)
    fields = 0.1 * torch.randn(256, 5, 8)
    batch = {"fields": fields, "y": 10 * fields[:, 1]}
    export.train_step(
        FieldAttention(5, 8),
        lambda m, b: ((10 * m(b["fields"])[1] - b["y"]) ** 2).sum(1).mean(),
        batch,
        optimizer=export.Adam(lr=0.01),
        dynamic={name: {0: "batch"} for name in batch},
        predict=lambda m, b: {"weights": m(b["fields"])[2]},
        directory=tmp_path / "a",
    )
    trainer = Trainer(tmp_path / "a", providers="cpu")
    given = {name: value.numpy() for name, value in batch.items()}
    np.testing.assert_allclose(trainer.predict(given)["weights"], 0.2, atol=0.08)
    for _ in range(150):
        trainer.step(given)
    assert trainer.predict(given)["weights"].mean(0).argmax() == 1
    assert trainer.predict(given)["weights"][:, 1].min() > 0.5


def test_a_field_that_is_zero_is_looked_at_by_its_place_alone() -> None:
    """A sample without genres: its embedding is 0, and nothing divides by its length."""
    torch.manual_seed(0)
    fields = torch.randn(2, 3, 4)
    fields[0] = 0
    fields.requires_grad_()
    field_map, _, weights = FieldAttention(3, 4)(fields)
    (field_map.sum() + weights[:, 0].sum()).backward()
    assert torch.isfinite(weights).all() and fields.grad is not None
    assert torch.isfinite(fields.grad).all() and torch.equal(field_map[0], torch.zeros(3, 4))


@pytest.mark.parametrize(("count", "dim", "named"), [(0, 4, "0 fields"), (3, 0, "dim is 0")])
def test_wrong_sizes_are_refused(count: int, dim: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        FieldAttention(count, dim)
