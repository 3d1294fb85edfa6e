"""Sums at repeated indices: with one thread where that is fastest, else the same at any number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import export
from device_sdk import Trainer
from tests.export.recorded import recorded

ROWS, WIDTH = 40, 64


class _Words(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.places = nn.Parameter(torch.zeros(ROWS, WIDTH))
        self.wide = nn.Sequential(nn.Linear(WIDTH, inner), nn.Tanh(), nn.Linear(inner, 1))

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.wide(self.table(words) + self.places[words])
        return result


def _exported(inner: int, folder: Path, *, verify: bool = True) -> export.Exported:
    torch.manual_seed(0)
    return export.train_step(
        _Words(inner),
        lambda m, b: m(b["words"]).square().mean(),
        {"words": torch.randint(ROWS, (16, 4))},
        optimizer=export.Sgd(lr=0.1),
        dynamic={"words": {0: "batch"}},
        directory=folder,
        verify=verify,
    )


def test_a_step_of_small_products_runs_with_one_thread(tmp_path: Path) -> None:
    assert _exported(8, tmp_path / "small").manifest.sequential


def test_a_step_of_large_products_is_the_same_at_any_number_of_threads(tmp_path: Path) -> None:
    assert not _exported(8192, tmp_path / "large", verify=False).manifest.sequential
    # Rows times width are far above where onnxruntime's ScatterND adds in several threads.
    words = np.random.default_rng(0).integers(ROWS, size=(1024, 4))
    moved = []
    for threads in (1, 2, 4):
        trainer = Trainer(tmp_path / "large", providers="cpu", threads=threads)
        trainer.step({"words": words})
        moved.append({name: trainer.parameters[name].copy() for name in ("table.weight", "places")})
    for other in moved[1:]:
        for name, values in moved[0].items():
            np.testing.assert_array_equal(other[name], values)


def _interpolated(**settings: Any) -> Any:
    return lambda x: nn.functional.interpolate(torch.tanh(x), **settings)


def _images(n: int) -> list[Tensor]:
    return [torch.randn(n, 8, 20, 20, generator=torch.Generator().manual_seed(0))]


def _places(n: int) -> list[Tensor]:
    """Rows whose sizes differ by far, so that another order of adding them is another sum."""
    draw = torch.Generator().manual_seed(0)
    sizes = 10 ** (8 * torch.rand(n, 1, generator=draw) - 4)
    return [
        torch.randint(ROWS, (n,), generator=draw),
        torch.randn(n, WIDTH, generator=draw) * sizes,
        torch.zeros(ROWS, WIDTH),
    ]


SUMS: dict[str, tuple[Any, Any]] = {
    "an embedding": (
        lambda words, rows, table: nn.functional.embedding(words, table) * rows,
        _places,
    ),
    "added rows": (lambda words, rows, table: table.index_add(0, words, rows), _places),
    "nearest": (_interpolated(scale_factor=2), _images),
    "bilinear": (_interpolated(scale_factor=1.5, mode="bilinear"), _images),
    "bicubic": (_interpolated(size=(33, 27), mode="bicubic"), _images),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SUMS)
def test_twenty_runs_at_any_number_of_threads_add_in_one_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients to the last bit, of graphs that are to run with several threads."""
    monkeypatch.setattr("export.convert.several_threads_pay", lambda nodes: True)
    function, make = SUMS[name]
    model, _ = recorded(function, make)
    data = model.SerializeToString()
    tensors = make(4096 if make is _places else 64)
    found: set[bytes] = set()
    for threads in (1, 2, 4):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        fed = {port.name: port.name.removeprefix("batch.") for port in session.get_inputs()}
        given = {port: tensors[int(number)].numpy() for port, number in fed.items()}
        for _ in range(1 if threads == 1 else 20):
            found.add(b"".join(array.tobytes() for array in session.run(None, given)))
    assert len(found) == 1
