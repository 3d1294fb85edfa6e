"""The artifacts of `make bench-device`, as graphs: of every kind one, with fewer units."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

import export
from benchmarks.device.workloads import Workload, small_workloads
from tests.export.conftest import refuse_trailing_absences

SHIPPED = Path(__file__).parents[2] / "device_sdk" / "artifacts" / "mf"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workload", small_workloads(), ids=lambda workload: workload.name)
def test_no_node_ends_in_an_absent_input(workload: Workload, tmp_path: Path) -> None:
    torch.manual_seed(0)
    exported = export.train_step(
        workload.model(),
        workload.loss,
        workload.batch(),
        optimizer=export.Adam(),
        dynamic=workload.dynamic,
        directory=tmp_path / "artifact",
        verify=False,
    )
    for file in (*exported.directory.glob("*.onnx"), *SHIPPED.glob("*.onnx")):
        refuse_trailing_absences(onnx.load(file).graph)
