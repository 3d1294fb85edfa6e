"""Runs as event files that TensorBoard shows: ``tensorboard --logdir runs/tensorboard``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from aggregator.simulate.sinks import RunSink, SinkRun

try:
    from tensorboardX import SummaryWriter
except ImportError:
    raise ImportError(
        "tensorboardX is not installed: pip install 'tessera-edge[aggregator,tensorboard]'"
    ) from None


class TensorBoardSink(RunSink):
    """A folder for each run of a seed; a run that is played anew gets another."""

    def begin(self, run: SinkRun) -> None:
        self._writer: Any = SummaryWriter(str(_new(run.folder / "tensorboard" / run.name, run)))
        lines = [f"| {key} | {json.dumps(value)} |" for key, value in run.settings.items()]
        table = ["| setting | in force |", "|---|---|", *lines]
        self._writer.add_text("settings", "\n".join(table))

    def round(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)

    def end(self, state: str, number: int, values: Mapping[str, float]) -> None:
        self.round(number, values)
        self._writer.add_text("state", state)
        self._writer.close()


def _new(folder: Path, run: SinkRun) -> Path:
    for place in count(1):
        path = folder / f"seed-{run.seed}{'' if place == 1 else f'-{place}'}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError
