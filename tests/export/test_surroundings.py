"""The same model gives the same bytes, whatever surrounds the export."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import export


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Dropout(0.1)
    )


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["index"]), batch["label"])


def _export(model: nn.Module, directory: Path, surroundings: AbstractContextManager[Any]) -> str:
    with surroundings:
        return export.train_step(
            model,
            _loss,
            {"index": torch.arange(24).reshape(8, 3) % 10, "label": torch.arange(8) % 6},
            optimizer=export.Adam(0.01),
            dynamic={"index": {0: "batch"}, "label": {0: "batch"}},
            directory=directory,
            verify=False,
            name="model",
        ).id


def test_same_bytes_without_gradients_in_inference_mode_and_in_threads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _model()
    made = [
        _export(model, tmp_path / "plain", nullcontext()),
        _export(model, tmp_path / "no_grad", torch.no_grad()),
        _export(model, tmp_path / "inference", torch.inference_mode()),
    ]

    def run(number: int) -> None:
        made.append(_export(model, tmp_path / str(number), nullcontext()))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 5
    assert len(set(made)) == 1


class _Watched(torch.optim.SGD):
    """SGD with a thread beside each of its steps, which does something else with torch."""

    def __init__(self, parameters: Any, beside: Callable[[], object]) -> None:
        super().__init__(parameters, 0.1)
        self.beside, self.seen = beside, []  # type: ignore[var-annotated]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        watch(self.beside, self.seen)
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * max(self.param_groups[0]["lr"], 0.0))


def watch(beside: Callable[[], object], seen: list[object]) -> None:
    thread = threading.Thread(target=lambda: seen.append(beside()))
    thread.start()
    thread.join()


def test_another_thread_sees_nothing_of_what_recording_replaces(tmp_path: Path) -> None:
    """Of Python's functions and torch's, in the optimizer's step and in the loss."""
    number = torch.tensor(4.0)

    def beside() -> tuple[object, ...]:
        square = torch.ones(2, 2, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = square @ square
        return (
            torch.compiler.is_compiling(),
            type(math.sqrt(number)),
            max(number, 3) is number,
            min(3, number),
            type(torch.autograd.profiler.record_function("x")).__name__,
            product.dtype,
        )

    right = beside()
    model = _model()
    optimizer = _Watched(model.parameters(), beside)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        watch(beside, optimizer.seen)
        return _loss(model, batch)

    own = (min, max, len, math.sqrt, torch.compiler.is_compiling)
    export.train_step(
        model,
        loss,
        {"index": torch.arange(24).reshape(8, 3) % 10, "label": torch.arange(8) % 6},
        optimizer=optimizer,
        dynamic={},
        directory=tmp_path / "a",
        verify=False,
    )
    assert len(optimizer.seen) > 4
    assert set(optimizer.seen) == {right}
    assert own == (min, max, len, math.sqrt, torch.compiler.is_compiling)
