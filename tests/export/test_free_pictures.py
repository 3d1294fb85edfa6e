"""Pictures of any height and width, behind poolings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import export
from device_sdk import BatchError, Trainer


def _padded(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    down, right = x.shape[2] - y.shape[2], x.shape[3] - y.shape[3]
    return functional.pad(y, [right // 2, right - right // 2, down // 2, down - down // 2]), x


Join = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""What was pooled and is large again, and what it is joined with, to two of one size."""

JOINS: dict[str, Join] = {
    "padded": _padded,
    "drawn": lambda y, x: (functional.interpolate(y, size=x.shape[2:], mode="bilinear"), x),
    "cropped": lambda y, x: (y, x[:, :, : y.shape[2], : y.shape[3]]),
}


class UNet(nn.Module):
    def __init__(self, join: Join) -> None:
        super().__init__()
        self.join = join
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.third, self.pool = nn.Conv2d(6, 6, 3, padding=1), nn.MaxPool2d(2)
        self.up, self.last = nn.ConvTranspose2d(6, 4, 2, 2), nn.ConvTranspose2d(10, 4, 2, 2)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.first(x))
        b = torch.tanh(self.second(self.pool(a)))
        c = torch.tanh(self.third(self.pool(b)))
        b = torch.cat(self.join(self.up(c), b), 1)
        result: Tensor = self.out(torch.cat(self.join(self.last(b), a), 1))
        return result


def _exported(model: nn.Module, directory: Path) -> Trainer:
    export.train_step(
        model,
        lambda m, b: m(b["x"]).square().mean(),
        {"x": torch.randn(2, 1, 12, 11)},
        optimizer=export.Sgd(0.5),
        dynamic={"x": {0: "batch", 2: "h", 3: "w"}},
        directory=directory,
    )
    return Trainer(directory)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", JOINS)
def test_a_unet_of_any_picture(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = UNet(JOINS[name])
    trainer = _exported(model, tmp_path / "artifact")
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.5)
    for n, h, w in ((2, 4, 4), (1, 5, 7), (3, 16, 8), (2, 6, 9)):
        x = torch.randn(n, 1, h, w)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step({"x": x.numpy()}) == pytest.approx(loss.item(), rel=1e-5)
    for key, value in model.named_parameters():
        torch.testing.assert_close(torch.from_numpy(trainer.parameters[key]), value.detach())
    with pytest.raises(BatchError, match="axis 'h' must be at least 4"):
        trainer.step({"x": torch.ones(2, 1, 3, 8).numpy()})
    with pytest.raises(BatchError, match="axis 'w' must be at least 4"):
        trainer.predict({"x": torch.ones(2, 1, 8, 3).numpy()})


def test_sizes_that_only_some_pictures_make_equal_are_refused(tmp_path: Path) -> None:
    with pytest.raises(export.ExportError, match=r"only at some sizes of 'h'.*functional\.pad\(y"):
        _exported(UNet(lambda y, x: (y, x)), tmp_path / "artifact")
