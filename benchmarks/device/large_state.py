"""Models whose state is large: peak memory and step time in place, in two banks, and with torch.

Peaks are of processes of their own, six steps each; times are processor time with one thread, by
turns in one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as functional
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.device.memory import our_peak, torch_peak
from benchmarks.device.resnet import ResNet
from benchmarks.device.timing import exported
from benchmarks.device.workloads import Batch, Workload, torch_step
from device_sdk import Trainer

_STEPS = 6


def _double(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """[b, 3, h, w] (multiples of 16) to [b, 3, h, w] logits.

    Ronneberger et al. 2015, U-Net, figure 1, with padding and batch norm, as most code has it.
    """

    def __init__(self, width: int = 64, levels: int = 5) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.first = _double(3, width)
        self.down = nn.ModuleList(_double(a, 2 * a) for a in widths[:-1])
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * a, a, 2, stride=2) for a in reversed(widths[:-1])
        )
        self.joined = nn.ModuleList(_double(2 * a, a) for a in reversed(widths[:-1]))
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.first(x)]
        for down in self.down:
            kept.append(down(functional.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([kept.pop(), up(x)], 1))
        logits: Tensor = self.out(x)
        return logits


class Embeddings(nn.Module):
    """[b, n] ids to [b]: the mean of their vectors, and two layers."""

    def __init__(self, rows: int = 250_000, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.layers = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(self.table(x).mean(1)).squeeze(1)
        return found


class Encoder(nn.Module):
    """[b, n] token ids to [b, 2] logits: BERT-small's sizes (Turc et al. 2019), first token."""

    def __init__(self, tokens: int = 30_522, width: int = 512, depth: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.places = nn.Parameter(torch.randn(128, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, activation="gelu", batch_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(self.tokens(x) + self.places[: x.shape[1]])
        logits: Tensor = self.out(hidden[:, 0])
        return logits


def _classes(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def _squares(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch["x"]), batch["y"])


def workloads() -> list[Workload]:
    """The rows of the table."""

    def row(
        name: str,
        model: Callable[[], nn.Module],
        inputs: Callable[[], Batch],
        optimizer: str,
        loss: Callable[[nn.Module, Batch], Tensor] = _classes,
    ) -> Workload:
        return Workload(name, model, loss, inputs, optimizer, None)

    def images() -> Batch:
        return {"x": torch.randn(8, 3, 32, 32), "y": torch.randint(10, (8,))}

    def ids() -> Batch:
        return {"x": torch.randint(250_000, (256, 8)), "y": torch.randn(256)}

    return [
        row(
            "UNet, Adam",
            UNet,
            lambda: {"x": torch.randn(1, 3, 64, 64), "y": torch.randint(3, (1, 64, 64))},
            "adam",
        ),
        row("ResNet-18, Adam", ResNet, images, "adam"),
        row("ResNet-18, SGD", ResNet, images, "sgd"),
        row("embeddings, Adam", Embeddings, ids, "adam", _squares),
        row("embeddings, SGD", Embeddings, ids, "sgd", _squares),
        row(
            "encoder, Adam",
            Encoder,
            lambda: {"x": torch.randint(30_522, (8, 64)), "y": torch.randint(2, (8,))},
            "adam",
        ),
    ]


def _measured(workload: Workload, turns: int, folder: Path) -> list[str]:
    torch.manual_seed(0)
    model, batch = workload.model(), workload.batch()
    size = sum(p.numel() for p in model.parameters()) * 4 / 2**20
    for name in ("one", "two"):
        with ExitStack() as stack:
            if name == "two":
                stack.enter_context(mock.patch("export.build.LEAST_STATE_BYTES", 1 << 60))
            exported(workload, model, batch, folder / name, verify=False)
    peaks = [
        *(our_peak(folder / name, batch, _STEPS) for name in ("one", "two")),
        torch_peak("benchmarks.device.large_state", workload.name, _STEPS),
    ]
    trainers = [Trainer(folder / name, providers="cpu", threads=1) for name in ("one", "two")]
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    steps = [
        lambda: trainers[0].step(arrays),
        lambda: trainers[1].step(arrays),
        torch_step(workload, model, batch),
    ]
    took = _by_turns(steps, turns)
    ratios = [statistics.median(t / o for o, t in zip(took[0], each, strict=True)) for each in took]
    return [
        workload.name,
        f"{size:.0f}",
        *(f"{peak:.0f}" for peak in peaks),
        *(f"{min(each) * 1e3:.1f}/{statistics.median(each) * 1e3:.1f}" for each in took),
        *(f"{ratio:.2f}" for ratio in ratios[1:]),
    ]


def _by_turns(steps: Sequence[Callable[[], float]], turns: int) -> list[list[float]]:
    took: list[list[float]] = [[] for _ in steps]
    for turn in range(-2, turns):
        for step, found in zip(steps, took, strict=True):
            start = time.process_time()
            step()
            if turn >= 0:
                found.append(time.process_time() - start)
    return took


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="make bench-memory")
    parser.add_argument("--turns", type=int, default=15, help="steps of each (default: 15)")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for workload in workloads():
        if arguments.only in workload.name:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(_measured(workload, arguments.turns, Path(folder)))
            print(rows[-1], file=sys.stderr)
    heads = ["step", "MiB of parameters"]
    heads += [f"{who}: peak MiB" for who in ("in place", "two banks", "torch")]
    heads += [f"{who}: ms, lowest/median" for who in ("in place", "two banks", "torch")]
    heads += [f"times {who}" for who in ("two banks", "torch")]
    print(tabulate(rows, headers=heads, disable_numparse=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
