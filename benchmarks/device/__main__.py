"""`make bench-device`: the device runtime against torch eager and onnxruntime-training.

One thread. A run is a process of its own that times each row and torch's eager step alternately;
its figure is the ratio of the two medians. Of several runs the lowest figure is given and the
median, so that no good run alone becomes the figure. onnxruntime-training runs in its own
environment, by turns with ours, and is compared through torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import onnx
import torch
from tabulate import tabulate

from benchmarks.device import ort_training
from benchmarks.device.memory import our_peak, torch_peak
from benchmarks.device.timing import exported
from benchmarks.device.workloads import Workload, workloads
from benchmarks.harness import RESULTS, write_lines

STORED = RESULTS / "device.jsonl"
LEAST_RUNS = 5
_MEMORY_STEPS = 50
Row = dict[str, Any]


def main() -> int:
    """Print the table; write the figures to benchmarks/results/device.jsonl."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose name holds TEXT")
    parser.add_argument(
        "--runs", type=int, default=LEAST_RUNS, help=f"processes (default: {LEAST_RUNS})"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="a row and run (default: 4)")
    parser.add_argument("--no-peer", action="store_true", help="leave onnxruntime-training out")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--table-only", action="store_true", help="print stored figures, run none")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"--runs is {arguments.runs}; it must be at least 1")
    if arguments.table_only:
        _print([json.loads(line) for line in STORED.read_text().splitlines()])
        return 0
    torch.set_num_threads(1)
    chosen = [w for w in workloads() if arguments.only in w.name]
    if not chosen:
        parser.error(f"no row's name holds {arguments.only!r}")
    rows = _measured(chosen, arguments.runs, arguments.seconds, peer=not arguments.no_peer)
    if not arguments.no_memory:
        rows.append({"work": "memory", **_peaks()})
    _print(rows)
    if not arguments.only and arguments.runs >= LEAST_RUNS:
        write_lines(STORED, rows)
    return 0


# Measuring.


def _measured(chosen: Sequence[Workload], runs: int, seconds: float, *, peer: bool) -> list[Row]:
    peers = [w.name for w in chosen if w.peer]
    python = ort_training.python() if peer and peers else None
    with tempfile.TemporaryDirectory() as temporary:
        rows = [_exported(w, Path(temporary) / str(place)) for place, w in enumerate(chosen)]
        found: dict[str, list[Row]] = {row["work"]: [] for row in rows}
        theirs: dict[str, list[Row]] = {row["work"]: [] for row in rows}
        for run in range(runs):
            print(f"run {run + 1} of {runs} ...", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "benchmarks.device.timing", temporary, str(seconds)]
            done = subprocess.run([*command, *found], stdout=subprocess.PIPE, text=True, check=True)
            for line in done.stdout.splitlines():
                figure = json.loads(line)
                found[figure["work"]].append(figure)
            if python is not None:
                for figure in ort_training.one_run(python, peers, seconds):
                    theirs[figure["work"]].append(figure)
    return [
        {**row, **_summary(found[row["work"]], theirs[row["work"]]), **_without(workload, peer)}
        for row, workload in zip(rows, chosen, strict=True)
    ]


def _peaks() -> Row:
    workload = next(w for w in workloads() if w.name.startswith("LeNet"))
    batch = workload.batch()
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "lenet"
        exported(workload, workload.model(), batch, artifact)
        ours = our_peak(artifact, batch, _MEMORY_STEPS)
    theirs = torch_peak("benchmarks.device.workloads", workload.name, _MEMORY_STEPS)
    return {"tessera_mib": ours, "torch_mib": theirs}


def _exported(workload: Workload, folder: Path) -> Row:
    print(f"{workload.name}: exporting ...", end=" ", file=sys.stderr, flush=True)
    torch.manual_seed(0)
    start = time.perf_counter()
    exported(workload, workload.model(), workload.batch(), folder)
    seconds = time.perf_counter() - start
    print(f"{seconds:.1f} s", file=sys.stderr, flush=True)
    nodes = len(onnx.load(folder / "train.onnx").graph.node)
    return {
        "work": workload.name,
        "target": workload.target,
        "nodes": nodes,
        "export_seconds": seconds,
    }


def _summary(ours: Sequence[Row], theirs: Sequence[Row]) -> Row:
    """Lowest and median over the runs; figures of one run's two processes belong together."""
    against = [figure["against_torch"] for figure in ours]
    row: Row = {
        "tessera_seconds": statistics.median(figure["seconds"] for figure in ours),
        "torch_seconds": statistics.median(figure["torch_seconds"] for figure in ours),
        "against_torch": _spread(against),
    }
    errors = [figure["error"] for figure in theirs if "error" in figure]
    if errors:
        row |= {"against_ort_training": "fails", "ort_training_error": errors[0]}
    elif theirs:
        beside = [figure["against_torch"] for figure in theirs]
        row["ort_training_against_torch"] = _spread(beside)
        row["against_ort_training"] = _spread([a / b for a, b in zip(against, beside, strict=True)])
    return row


def _spread(figures: list[float]) -> Row:
    return {"lowest": min(figures), "median": statistics.median(figures), "runs": figures}


def _without(workload: Workload, peer: bool) -> Row:
    return {"against_ort_training": "not expressible"} if peer and not workload.peer else {}


# Printing: the table and what docs/figures/training.md and README copy.


def _print(rows: Sequence[Row]) -> None:
    timed = [row for row in rows if row["work"] != "memory"]
    print(tabulate([_shown(row) for row in timed], headers="keys", disable_numparse=True))
    for row in rows:
        if row["work"] == "memory":
            ours, theirs = row["tessera_mib"], row["torch_mib"]
            print(
                f"\npeak resident memory, training LeNet: {ours:.0f} MiB against torch's "
                f"{theirs:.0f} MiB: {ours / theirs:.2f} of it (target: at most 0.25)"
            )
    print("\ninstall size and import time: make bench-size")
    print("\nfor docs/figures/training.md:\n")
    for line in _markdown(timed):
        print(line)
    by_speed = sorted(timed, key=lambda row: float(row["against_torch"]["lowest"]))
    lowest, highest = by_speed[0], by_speed[-1]
    print(
        f"\nfor README, lowest of the runs: {lowest['against_torch']['lowest']:.1f} "
        f"({lowest['work']}) to {highest['against_torch']['lowest']:.1f} ({highest['work']})"
    )


def _shown(row: Mapping[str, Any]) -> dict[str, str]:
    target = row["target"]
    return {
        "work": row["work"],
        "tessera ms": f"{row['tessera_seconds'] * 1e3:.3f}",
        "torch ms": f"{row['torch_seconds'] * 1e3:.3f}",
        "times torch: lowest (median)": _pair(row["against_torch"], 2),
        "target": "reported" if target is None else f"{target:.2f}",
        "times ort-training": _pair(row.get("against_ort_training"), 2) or "-",
        "nodes": str(row["nodes"]),
        "export s": f"{row['export_seconds']:.1f}",
    }


def _pair(found: object, digits: int) -> str:
    if isinstance(found, dict):
        return f"{found['lowest']:.{digits}f} ({found['median']:.{digits}f})"
    return str(found or "")


def _markdown(rows: Iterable[Row]) -> Iterable[str]:
    """The rows of docs/figures/training.md."""
    yield "| work | ms | times torch eager | times onnxruntime-training |"
    yield "|---|---|---|---|"
    for row in rows:
        peer = row.get("against_ort_training")
        beside = _pair(peer, 2) if isinstance(peer, dict) else ""
        cells = [
            row["work"],
            f"{row['tessera_seconds'] * 1e3:.2f}",
            _pair(row["against_torch"], 2),
            beside,
        ]
        yield f"| {' | '.join(cells)} |".replace("|  |", "| |")


if __name__ == "__main__":
    sys.exit(main())
