"""A process that trains one artifact, or the same in torch, whenever it is told to.

    python -m benchmarks.export_survey.contender artifact FOLDER BATCH
    python -m benchmarks.export_survey.contender torch NAME

A line on standard input says how many steps; each is answered by one line of JSON with their
seconds of processor, which a busy machine leaves as they are, and the process's peak memory. The
first answer, unasked, is of opening and the first step.
With an artifact no torch is imported, as on a device.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

from benchmarks.peers.turns import OneProcess

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def main() -> int:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a package prints is no answer
    opened = {"artifact": _artifact, "torch": _torch}[sys.argv[1]](*sys.argv[2:])
    memory = OneProcess()
    steps = 1
    while True:
        start = time.process_time()
        if isinstance(opened, Opening):
            opened = opened.open()
            opened()
        else:
            for _ in range(steps):
                opened()
        seconds = time.process_time() - start
        answer = {"seconds": seconds, "peak_bytes": memory.peak_bytes()}
        print(json.dumps(answer), file=answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            return 0
        steps = int(line)


class Opening:
    """What is still to be opened, so that it can be timed."""

    def __init__(self, open: Callable[[], Callable[[], object]]) -> None:
        self.open = open


def _artifact(folder: str, batch: str) -> Opening:
    import numpy as np

    from device_sdk import Trainer

    with np.load(batch) as held:
        arrays = dict(held)

    def open() -> Callable[[], object]:
        trainer = Trainer(folder, providers="cpu", threads=1)
        return lambda: trainer.step(arrays)

    return Opening(open)


def _torch(name: str) -> Opening:
    import torch

    from benchmarks.export_survey.steps import subjects
    from benchmarks.export_survey.subject import OPTIMIZERS

    torch.set_num_threads(1)
    written = next(one for one in subjects() if one.name == name).step()
    model, batch = written.model.train(), written.batch

    def open() -> Callable[[], object]:
        optimizer = OPTIMIZERS[written.optimizer].torchs(model)

        def step() -> float:
            optimizer.zero_grad(set_to_none=True)
            result = written.loss(model, batch)
            loss = result[0] if isinstance(result, tuple) else result
            loss.backward()
            optimizer.step()
            return float(loss.item())

        return step

    return Opening(open)


if __name__ == "__main__":
    sys.exit(main())
