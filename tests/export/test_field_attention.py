"""Attention over fields against its equations, one sample and one channel at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import export
from device_sdk import Trainer
from export.models.field_attention import FieldAttention


def _softmax(scores: np.ndarray) -> np.ndarray:
    shifted = np.exp(scores - scores.max())
    return shifted / shifted.sum()


def _weights(attention: FieldAttention, query: np.ndarray, fields: np.ndarray) -> np.ndarray:
    """Equations 7 and 8 for one sample: query [dim], fields [r, dim]."""
    matrix = attention.query.weight.detach().double().numpy()
    bias = attention.query.bias.detach().double().numpy()
    scores = fields @ (matrix @ query + bias) / np.sqrt(fields.shape[1])
    channels = [_softmax(scores * w) for w in attention.widen.detach().double().numpy()]
    return np.mean(channels, 0)


def test_weights_map_and_picture_follow_the_equations() -> None:
    torch.manual_seed(0)
    attention = FieldAttention(6, channels=5)
    with torch.no_grad():
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
        FieldAttention(5, channels=3),
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


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="dim is 0"):
        FieldAttention(0)
