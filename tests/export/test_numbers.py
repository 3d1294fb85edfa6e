"""Python numbers made of tensors: places that a model keeps, lengths, logs, and checks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from math import log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import export
from device_sdk import Trainer
from device_sdk.errors import DeviceError
from tests.export.recorded import assert_as_torch

PLACES = 12


class Kept(nn.Module):
    """A queue of keys, and where its next ones go."""

    queue: Tensor
    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Linear(5, 3)
        self.register_buffer("queue", F.normalize(torch.randn(3, PLACES), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))


def _contrast(model: Kept, x: Tensor) -> tuple[Tensor, Tensor]:
    found = F.normalize(model.query(x), dim=1)
    return torch.logsumexp(found @ model.queue.clone().detach(), 1).mean(), found.detach()


def _enqueued(model: Kept, x: Tensor) -> Tensor:
    loss, keys = _contrast(model, x)
    pointer = int(model.pointer)
    if PLACES % x.shape[0] != 0:
        raise ValueError("the keys of one step have to divide the queue")
    model.queue[:, pointer : pointer + x.shape[0]] = keys.T
    model.pointer[0] = (pointer + x.shape[0]) % PLACES
    return loss


def _by_item(model: Kept, x: Tensor) -> Tensor:
    loss, keys = _contrast(model, x)
    pointer = model.pointer.item()
    oldest = model.queue[:, pointer : pointer + 2].sum() * model.query.weight.sum()
    model.queue[:, pointer] = keys[0]
    model.pointer.fill_((pointer + 3) % (PLACES - 2))
    return loss + oldest


def _read(model: Kept, x: Tensor) -> Tensor:
    loss, _ = _contrast(model, x)
    pointer = int(model.pointer[0])
    before = model.queue[:, pointer - 1]
    assert isinstance(x.dim(), int) and issubclass(bool, int)
    model.pointer += 2
    return loss * (1 + pointer / 10) + (before * model.query.weight[:, 0]).sum()


def _trained(step: Callable[[Kept, Tensor], Tensor], folder: Path) -> tuple[Kept, Trainer]:
    model = Kept()
    export.train_step(
        copy.deepcopy(model),
        lambda model, batch: step(model, batch["x"]),
        {"x": torch.randn(4, 5, generator=torch.Generator().manual_seed(1))},
        optimizer=export.Sgd(lr=0.2),
        dynamic={"x": {0: "batch"}},
        predict=lambda model, batch: {"found": model.query(batch["x"])},
        directory=folder,
        verify=False,
    )
    return model, Trainer(folder, seed=0)


@pytest.mark.parametrize("step", [_enqueued, _by_item, _read])
def test_a_place_that_the_model_keeps(
    step: Callable[[Kept, Tensor], Tensor], tmp_path: Path
) -> None:
    model, trainer = _trained(step, tmp_path / "step")
    optimizer = torch.optim.SGD([model.query.weight, model.query.bias], lr=0.2)
    draw = torch.Generator().manual_seed(2)
    for _ in range(5):
        x = torch.randn(3, 5, generator=draw)
        loss = step(model, x)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert trainer.step({"x": x.numpy()}) == pytest.approx(loss.item(), rel=1e-5)
    held = {**trainer.parameters, **trainer.buffers}
    for name, tensor in model.state_dict().items():
        np.testing.assert_allclose(held[name], tensor.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    for pointer in (-3, PLACES - 2) if step is _enqueued else ():
        trainer.set_parameters({"pointer": np.array([pointer])})
        with pytest.raises(DeviceError):
            trainer.step({"x": np.ones((3, 5), np.float32)})
        np.testing.assert_array_equal(trainer.buffers["queue"], held["queue"])


def _batch(n: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(n)
    return torch.randn(n + 4, 4, generator=draw), torch.randint(0, 4, (n + 3,), generator=draw)


def _slices(x: Tensor, y: Tensor) -> list[Tensor]:
    start, stop = int(y[0]), y[1].item() + 1
    written = x * 2
    written[:stop] = 1.0
    written = written * 1
    written[start : start + 1] = x[:1]
    written[1, start] = 5.0
    # Without a plain stop, as long as the tensor is; the last: as torch cuts nothing off.
    return [x[start:], x[:stop].sum(0), x[:, start % 3 : start % 3 + 2], x[start], written]


def _lengths(x: Tensor, y: Tensor) -> list[Tensor]:
    """Autoformer's roll, a mask up to the longest, and pooling by as many graphs as there are."""
    graphs = int(y.max()) + 1
    pooled = torch.zeros(graphs).index_add(0, y, y * x.mean())
    inside = torch.arange(max(graphs, 2)) < y.unsqueeze(1)
    return [torch.roll(x, -int(y[1]), 0), pooled.pow(2).sum(), inside.float().sum(1)]


def _counts(x: Tensor, y: Tensor) -> list[Tensor]:
    counted = torch.bincount(y, minlength=5)
    weighed = y.bincount(weights=y / 2)
    return [x.mean() / counted.clamp(min=1), weighed, counted, F.one_hot(y).sum(0).pow(2).sum() * x]


def _arithmetic(x: Tensor, y: Tensor) -> list[Tensor]:
    total = 0.0
    for i in range(3):
        total += float((x.detach() * i).mean())
    assert isinstance(y[0].item(), object) and f"{total:.2f} {x.mean():.2f} {int(y[0]):d}"
    below = -int(y[0] + 1)
    return [
        x * total,
        x * (below // 2),
        x / (below % 3 + 1),
        x * x.mean().item(),
        x * min(below, -2) / float(len(y)),
        x @ torch.tensor([[total], (len(x),), [below], [0.5]]) + x.new_tensor([len(y)]),
    ]


def _functions(x: Tensor, y: Tensor) -> list[Tensor]:
    """Of numbers read and of free sizes, by module, by name, and by numpy."""
    read, n, mean = int(y[0]), len(x), x.mean().item()
    return [
        x * math.exp(-mean) / math.sqrt(n),
        x * log(1 + n, 2) / sqrt(1 + read),
        x * math.sin(mean) * math.cos(read) * math.tanh(mean),
        x * math.pow(0.9, read) * math.log2(n + read),
        x * float(np.sqrt(n)) * abs(read - 2) * abs(mean),
    ]


def _checks(x: Tensor, y: Tensor) -> Tensor:
    if (y < 0).any() or y.max() >= 4:
        raise ValueError(f"labels up to {y.max()}")
    if not torch.isfinite(x).all():
        raise FloatingPointError
    shifted = torch.zeros_like(x)
    shifted[:, 0] = x[:, 1]
    shifted[:, 1] = shifted[:, 0] * 2
    return shifted


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", [_slices, _lengths, _counts, _arithmetic, _functions])
def test_numbers_that_a_step_reads(function: Callable[..., Any]) -> None:
    assert_as_torch(function, _batch)


def test_what_code_raises_for_is_refused() -> None:
    model = assert_as_torch(_checks, _batch)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    x, y = (tensor.numpy() for tensor in _batch(3))
    bad = [(x, np.full_like(y, 4)), (x, np.full_like(y, -1)), (np.full_like(x, np.nan), y)]
    for one, other in bad:
        with pytest.raises(Exception, match="out of data bounds"):
            session.run(None, {"batch.0": one, "batch.1": other})
