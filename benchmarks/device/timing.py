"""Timing two ways of doing one thing, alternately, so that a noisy machine slows both."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.device.workloads import Batch, Workload, torch_step, workloads
from device_sdk import Trainer

if TYPE_CHECKING:
    from export import Exported, Optimizer


@dataclass(frozen=True)
class Timed:
    """Seconds a call: medians of each contender, and the number of blocks."""

    medians: tuple[float, ...]
    blocks: int

    def ratio(self, contender: int, against: int) -> float:
        """How many times faster ``contender`` is."""
        return self.medians[against] / self.medians[contender]


def alternately(
    contenders: Sequence[Callable[[], object]],
    *,
    seconds: float,
    block_seconds: float = 0.05,
    clock: Callable[[], float] = time.perf_counter,
) -> Timed:
    """Time each contender in short blocks in turn; a block's figure is its mean per call."""
    calls = []
    for contender in contenders:
        contender()
        start = clock()
        contender()
        contender()
        once = max((clock() - start) / 2, 1e-6)
        calls.append(max(1, round(block_seconds / once)))
    figures: list[list[float]] = [[] for _ in contenders]
    end = clock() + seconds
    while clock() < end or len(figures[0]) < 7:
        for index, contender in enumerate(contenders):
            start = clock()
            for _ in range(calls[index]):
                contender()
            figures[index].append((clock() - start) / calls[index])
    return Timed(tuple(statistics.median(found) for found in figures), len(figures[0]))


def exported(
    workload: Workload, model: nn.Module, batch: Batch, folder: Path, *, verify: bool = True
) -> Exported:
    """The workload's artifact, verified beside torch unless told otherwise."""
    import export  # an artifact that was exported elsewhere is timed without it

    optimizer: Optimizer
    if workload.optimizer == "adam":
        optimizer = export.Adam(1e-3)
    else:
        optimizer = export.Sgd(1e-3, momentum=0.0 if "BPR" in workload.name else 0.9)
    return export.train_step(
        model,
        workload.loss,
        batch,
        optimizer=optimizer,
        dynamic=workload.dynamic,
        directory=folder,
        verify=verify,
    )


def our_step(folder: Path, batch: Batch, providers: str = "cpu") -> Callable[[], float]:
    """One step of the artifact with one thread."""
    trainer = Trainer(folder, providers=providers, threads=1)
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    return lambda: trainer.step(arrays)


def main(folder: Path, seconds: float, names: list[str]) -> None:
    """One run of `make bench-device`: each row's step beside torch's, a line of JSON a row.

    Its name, both medians in seconds, and how many times faster than torch ours is. The artifacts
    of the rows of these names are ``folder / str(place)``, in this order.
    """
    torch.set_num_threads(1)
    known = {workload.name: workload for workload in workloads()}
    for place, name in enumerate(names):
        workload = known[name]
        torch.manual_seed(0)
        model, batch = workload.model(), workload.batch()
        timed = alternately(
            [our_step(folder / str(place), batch), torch_step(workload, model, batch)],
            seconds=seconds,
        )
        figure = {
            "work": name,
            "seconds": timed.medians[0],
            "torch_seconds": timed.medians[1],
            "against_torch": timed.ratio(0, 1),
        }
        print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
