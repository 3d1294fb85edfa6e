"""`make bench-device`: the device runtime against torch eager and onnxruntime-training.

Every figure is a ratio of medians, measured alternately in one run with one thread.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import onnx
import torch
from tabulate import tabulate

from benchmarks.device import memory, ort_training
from benchmarks.device.timing import alternately, exported, our_step
from benchmarks.device.workloads import Workload, torch_step, workloads
from benchmarks.harness import RESULTS, write_lines


def main() -> int:
    """Print the table; write the figures to benchmarks/results/device.jsonl."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose name holds TEXT")
    parser.add_argument("--seconds", type=float, default=8.0, help="timing a row (default: 8)")
    parser.add_argument("--no-peer", action="store_true", help="leave onnxruntime-training out")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [w for w in workloads() if arguments.only in w.name]
    rows = [_row(workload, arguments.seconds) for workload in chosen]
    if not arguments.no_peer:
        ort_training.add_to(rows, chosen, arguments.seconds)
    print(tabulate([_shown(row) for row in rows], headers="keys", disable_numparse=True))
    if not arguments.no_memory:
        ours, theirs = memory.lenet_peaks()
        rows.append({"work": "memory", "tessera_mib": ours, "torch_mib": theirs})
        print(
            f"\npeak resident memory, training LeNet: {ours:.0f} MiB against torch's "
            f"{theirs:.0f} MiB: {ours / theirs:.2f} of it (target: at most 0.25)"
        )
    print("\ninstall size and import time: make bench-size")
    if not arguments.only:
        write_lines(RESULTS / "device.jsonl", rows)
    return 0


def _row(workload: Workload, seconds: float) -> dict[str, object]:
    print(f"{workload.name}: exporting ...", end=" ", file=sys.stderr, flush=True)
    torch.manual_seed(0)
    model, batch = workload.model(), workload.batch()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "artifact"
        start = time.perf_counter()
        exported(workload, model, batch, folder)
        export_seconds = time.perf_counter() - start
        nodes = len(onnx.load(folder / "train.onnx").graph.node)
        print(f"{export_seconds:.1f} s; timing ...", file=sys.stderr, flush=True)
        timed = alternately(
            [our_step(folder, batch), torch_step(workload, model, batch)], seconds=seconds
        )
    return {
        "work": workload.name,
        "tessera_seconds": timed.medians[0],
        "torch_seconds": timed.medians[1],
        "against_torch": timed.ratio(0, 1),
        "target": workload.target,
        "nodes": nodes,
        "export_seconds": export_seconds,
    }


def _shown(row: dict[str, object]) -> dict[str, str]:
    def milliseconds(key: str) -> str:
        value = row.get(key)
        return f"{value * 1e3:.3f}" if isinstance(value, float) else "-"

    target, peer = row["target"], row.get("against_ort_training")
    return {
        "work": str(row["work"]),
        "tessera ms": milliseconds("tessera_seconds"),
        "torch ms": milliseconds("torch_seconds"),
        "times torch": f"{row['against_torch']:.2f}",
        "target": f"{target:.2f}" if isinstance(target, float) else "reported",
        "times ort-training": f"{peer:.2f}" if isinstance(peer, float) else str(peer or "-"),
        "nodes": str(row["nodes"]),
        "export s": f"{row['export_seconds']:.1f}",
    }


if __name__ == "__main__":
    sys.exit(main())
