"""Packed sequences train as torch's own do, whatever the lengths and however they are sorted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import export
from device_sdk import NonFiniteStep, Trainer
from tests.export.recorded import assert_as_torch

# Several layers are in the test with dropout between them.
LAYERS = {
    "gru both ways": lambda: nn.GRU(4, 5, batch_first=True, bidirectional=True),
    "lstm both ways": lambda: nn.LSTM(4, 5, batch_first=True, bidirectional=True),
    "lstm projected": lambda: nn.LSTM(
        4, 5, bias=False, batch_first=True, bidirectional=True, proj_size=3
    ),
    "rnn": lambda: nn.RNN(4, 5, batch_first=True),
}


def _batch(n: int, *, falling: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    lengths = torch.randint(1, 7, (n,), generator=generator)
    lengths = lengths.sort(descending=True).values if falling else lengths
    return torch.randn(n, 7, 4, generator=generator), lengths


# How they are sorted decides how they are packed, which no layer sees: one kind shows it.
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "falling"),
    [(name, name == "gru both ways") for name in LAYERS],
)
def test_packed(name: str, falling: bool) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    names = [key for key, _ in layer.named_parameters()]

    def run(x: Tensor, lengths: Tensor, *weights: Tensor) -> list[Tensor]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=falling)
        given: Any = dict(zip(names, weights, strict=True))
        y, last = torch.func.functional_call(layer, given, (packed,))
        full, seen = pad_packed_sequence(y, batch_first=True, total_length=9, padding_value=0.5)
        longest, _ = pad_packed_sequence(y, batch_first=True)
        states = list(last) if isinstance(last, tuple) else [last]
        return [full, seen, longest.sum(1), (y.data * y.data).sum(0), *states]

    weights = [weight.detach() for weight in layer.parameters()]
    assert_as_torch(run, lambda n: (*_batch(n, falling=falling), *weights))


def test_packed_data_of_ones_own() -> None:
    """What packs itself anew, with the layout of another."""

    def run(x: Tensor, lengths: Tensor, weight: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        changed = packed._replace(data=torch.tanh(packed.data @ weight))
        return pad_packed_sequence(changed, batch_first=True, total_length=7)[0]

    assert_as_torch(run, lambda n: (*_batch(n), torch.eye(4) * 2))


def test_layers_with_dropout_between_them(assert_parity: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(4, 5, 2, batch_first=True, dropout=0.4)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            y, (h, _) = self.layers(packed)
            result: Tensor = pad_packed_sequence(y, True, total_length=7)[0].sum(1) + h[:2].sum()
            return result

    torch.manual_seed(0)
    x, lengths = _batch(5)
    assert_parity(Model(), {"x": x, "lengths": lengths})


def test_lengths_that_are_not_sorted_refuse_the_step(tmp_path: Path) -> None:
    layer = nn.GRU(4, 5, batch_first=True)

    def loss(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        packed = pack_padded_sequence(b["x"], b["lengths"], batch_first=True)
        return m(packed)[0].data.square().mean()

    x, lengths = _batch(5, falling=True)
    exported = export.train_step(
        layer, loss, {"x": x, "lengths": lengths}, optimizer=export.Sgd(0.1),
        dynamic={"x": {0: "b"}, "lengths": {0: "b"}}, directory=tmp_path / "artifact",
    )  # fmt: skip
    trainer = Trainer(exported.directory)
    batch = {"x": x.numpy(), "lengths": lengths.numpy()}
    assert trainer.step(batch) == pytest.approx(loss(layer, {"x": x, "lengths": lengths}).item())
    with pytest.raises(NonFiniteStep):
        trainer.step(batch | {"lengths": lengths.numpy()[::-1].copy()})
