"""What this device tells of its rounds, made here and nowhere else."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from functools import cache

import numpy as np

from device_sdk.evaluation.report import write_evaluations
from device_sdk.system.version import __version__
from device_sdk.train.job import TrainedRound
from device_sdk.wire.codec.message import encode
from device_sdk.wire.publish.report import (
    MOST_TEXT_BYTES,
    Details,
    ItemCount,
    Reason,
    Report,
    ReportedOutcome,
)
from device_sdk.world import DeviceWorld

_MOST_COUNT = 2**32 - 1


class Reporter:
    """Makes reports, of what the app lets out."""

    def __init__(self, world: DeviceWorld) -> None:
        self._options = world.options

    def of(
        self,
        outcome: ReportedOutcome,
        reason: Reason | None = None,
        received_bytes: int = 0,
        result: TrainedRound | None = None,
        items: ItemCount | None = None,
    ) -> bytes:
        """A report's bytes. ``items``: what was recorded, where there is no ``result`` that says
        it."""
        report = Report(outcome, "" if reason is None else reason.value)
        if self._options.report == "full":
            evaluation = None if result is None else result.evaluation
            report = Report(
                outcome,
                report.reason,
                self._details(received_bytes, result, items),
                b"" if evaluation is None else write_evaluations(evaluation),
            )
        return encode(report)

    def _details(
        self, received_bytes: int, result: TrainedRound | None, items: ItemCount | None
    ) -> Details:
        return Details(
            _fitting("sdk", __version__),
            _fitting("runtime", _runtime_version()),
            _fitting("platform", f"{sys.platform}-{platform.machine()}"),
            "" if result is None else _fitting("option", _option(result)),
            # Single precision: a report is small.
            None if result is None else float(np.float32(result.seconds)),
            min(received_bytes, _MOST_COUNT),
            self._options.labels,
            items if result is None else result.items,
        )


def _option(result: TrainedRound) -> str:
    name = "" if result.artifact is None else result.artifact.name
    return name or f"k={result.k}"


def _fitting(name: str, text: str) -> str:
    return text.encode()[: MOST_TEXT_BYTES[name]].decode(errors="ignore")


@cache
def _runtime_version() -> str:
    """Of the onnxruntime that is installed, without loading it; empty where there is none."""
    try:
        return importlib.metadata.version("onnxruntime")
    except importlib.metadata.PackageNotFoundError:
        return ""
