"""`make bench-gpu`: train steps on an accelerator, against the CPU and torch on the same device."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime
import torch
from torch import nn

from benchmarks.device.timing import alternately, exported
from benchmarks.device.workloads import (
    Batch,
    Workload,
    drawn_batch,
    large_workloads,
    small_workloads,
    torch_step,
    workloads,
)
from benchmarks.harness import RESULTS, StoredRuns, markdown_table
from device_sdk import ProviderError, Trainer
from device_sdk.runtime.providers import CUDA, KNOWN, Provider, candidates, relative_error

DESCRIPTION = """\
Every artifact of bench-device, a transformer with LoRA, a ViT and ResNet-50 on an accelerator. Each
row trains beside the CPU first (TF32 off) and says how far the changes of its state tensors are
apart; then it is timed (TF32 on, as torch's) beside torch eager and torch.compile on the same
device, all from arrays in main memory. Each row runs in a process of its own and is stored as soon
as it is done: a run that was stopped, by --minutes or otherwise, continues where it was."""

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures" / "training.md"
BEGIN, END = "<!-- bench-gpu: begin -->", "<!-- bench-gpu: end -->"
BATCHES = (32, 256, 1024, 4096)
# TF32 keeps 10 bits of mantissa, and sums of squares keep less.
_FAST = replace(CUDA, options={"use_tf32": "1"}, tolerance=0.2)


@dataclass(frozen=True)
class Row:
    """What is measured."""

    provider: str
    device: str
    work: str
    batch: int
    parity_only: bool


@dataclass(frozen=True)
class Outcome:
    """``errors``: of each state tensor's change in a step. Seconds are of one step; 0: not timed.

    ``problem``: why there are no figures; the provider's own report where the CPU took over.
    """

    report: str = ""
    problem: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    ours: float = 0.0
    eager: float = 0.0
    compiled: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing; 1 where a row has a problem, 2 where there is nothing to run on."""
    options = _parser().parse_args(arguments)
    provider = next(each for each in KNOWN if each.name == options.provider)
    reason = _missing(provider, parity_only=options.parity)
    if reason:
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 2
    if options.row:
        print(json.dumps(asdict(_measured(provider, Row(**json.loads(options.row)), options))))
        return 0
    stored = StoredRuns[Row, Outcome](options.results, "device_gpu", Outcome)
    until = time.monotonic() + 60 * options.minutes
    rows = _rows(provider, options)
    found: dict[Row, Outcome] = {}
    measured = False
    for row in rows:
        outcome = stored.load(row)
        left = until - time.monotonic()
        if outcome is None and left > 0 and not options.table_only:
            print(f"{row.work}, batch {row.batch} ...", file=sys.stderr, flush=True)
            outcome = _in_a_process(row, options, left, first=not measured)
            measured = True
            if outcome is not None:
                stored.save(row, outcome)
        if outcome is not None:
            found[row] = outcome
    table = _table(found)
    print(table)
    if options.write_docs:
        _write_figures(table, next(iter(found)).device)
    if len(found) < len(rows):
        print(f"{len(rows) - len(found)} rows are left: run this again", file=sys.stderr)
    return int(any(outcome.problem for outcome in found.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_gpu", description=DESCRIPTION
    )
    names = [provider.name for provider in KNOWN]
    parser.add_argument("--provider", choices=names, default="cuda", help="default: cuda")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name holds TEXT")
    parser.add_argument("--small", action="store_true", help="small models, as the tests run them")
    parser.add_argument("--parity", action="store_true", help="compare with the CPU, time nothing")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), metavar="ROWS")
    parser.add_argument("--seconds", type=float, default=8.0, help="timing a row (default: 8)")
    parser.add_argument("--minutes", type=float, default=9.0, help="then stop (default: 9)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where rows are stored")
    parser.add_argument(
        "--artifacts",
        type=Path,
        default=ROOT / "out" / "gpu-artifacts",
        help="exported ones, and where missing ones are put (default: out/gpu-artifacts)",
    )
    parser.add_argument("--table-only", action="store_true", help="print stored rows, run none")
    parser.add_argument(
        "--write-docs", action="store_true", help="put the table into docs/figures/training.md"
    )
    parser.add_argument("--row", help=argparse.SUPPRESS)
    return parser


def _missing(provider: Provider, *, parity_only: bool) -> str:
    """Why nothing can be measured here; empty where it can."""
    if provider is CUDA and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # finds CUDA's libraries beside torch's
    try:
        candidates(provider)
    except ProviderError as error:
        return str(error)
    if provider is CUDA and not parity_only and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return ""


def _device_name(provider: Provider) -> str:
    if provider is CUDA and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return provider.title


def _known(options: argparse.Namespace) -> list[Workload]:
    return small_workloads() if options.small else [*workloads(), *large_workloads()]


def _rows(provider: Provider, options: argparse.Namespace) -> list[Row]:
    chosen = [work for work in _known(options) if options.only in work.name]
    batches = [0] if options.small else options.batches
    return [
        Row(provider.name, _device_name(provider), work.name, batch, options.parity)
        for work in chosen
        for batch in batches
    ]


def _in_a_process(
    row: Row, options: argparse.Namespace, seconds: float, *, first: bool
) -> Outcome | None:
    """A device that runs out of memory, or a driver that crashes, ends no more than its row.

    None where the seconds were over: for the next run, unless this one had them all (``first``).
    """
    command = [sys.executable, "-m", "benchmarks.device_gpu", "--row", json.dumps(asdict(row))]
    command += ["--provider", row.provider, "--seconds", str(options.seconds)]
    command += ["--artifacts", str(options.artifacts)]
    for flag in ("small", "parity", "no_compile"):
        if getattr(options, flag):
            command.append(f"--{flag.replace('_', '-')}")
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Outcome(problem=f"not done after {seconds:.0f} s") if first else None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Outcome(problem=f"status {done.returncode}: {last:.300}")
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def _measured(provider: Provider, row: Row, options: argparse.Namespace) -> Outcome:
    workload = next(work for work in _known(options) if work.name == row.work)
    torch.manual_seed(0)
    model, example = workload.model(), workload.batch()
    batch = drawn_batch(workload, row.batch) if row.batch else example
    kind = "small " if options.small else ""
    folder = options.artifacts / re.sub(r"[^a-z0-9]+", "-", f"{kind}{row.work}".lower())
    if not folder.exists():
        # The large ones take minutes to verify, and are of operators that the others hold too.
        large = {work.name for work in large_workloads()}
        exported(workload, model, example, folder, verify=workload.name not in large)
    outcome = parity(provider, folder, batch)
    if row.parity_only or outcome.problem:
        return outcome
    return _timed(provider, workload, model, batch, folder, outcome, options)


def parity(provider: Provider, folder: Path, batch: Batch) -> Outcome:
    """One step from the same state on both; the Trainer's own two-step check comes before."""
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    ours, theirs = Trainer(folder, providers=provider), Trainer(folder, providers="cpu")
    start = theirs.state
    ours.step(arrays)
    theirs.step(arrays)
    report = ours.provider_report
    if ours.providers[0] != provider.title:
        return Outcome(report, report)
    found, wanted = ours.state, theirs.state
    errors = {name: relative_error(found[name], wanted[name], start[name]) for name in wanted}
    return Outcome(report, errors=errors)


def _timed(
    provider: Provider,
    workload: Workload,
    model: nn.Module,
    batch: Batch,
    folder: Path,
    outcome: Outcome,
    options: argparse.Namespace,
) -> Outcome:
    fast = _FAST if provider is CUDA else provider
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    trainer = Trainer(folder, providers=fast)
    trainer.step(arrays)
    if trainer.providers[0] != fast.title:
        return replace(outcome, problem=trainer.provider_report)
    target = "cuda" if provider is CUDA else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    ours, eager = _pair(trainer, arrays, workload, model, batch, target, options.seconds)
    compiled = 0.0
    if not options.no_compile:
        gc.collect()
        try:
            shaped = torch.compile(workload.model().to(target))
            _, compiled = _pair(trainer, arrays, workload, shaped, batch, target, options.seconds)
        except Exception as error:  # what torch.compile cannot take is not our row's failure
            print(f"torch.compile: {error}", file=sys.stderr)
    return replace(outcome, ours=ours, eager=eager, compiled=compiled)


def _pair(
    trainer: Trainer,
    arrays: dict[str, object],
    workload: Workload,
    model: nn.Module,
    batch: Batch,
    target: str,
    seconds: float,
) -> tuple[float, float]:
    """Median seconds of our step and torch's, both with the batch in main memory."""
    moved: Batch = {}
    step = torch_step(workload, model.to(target), moved)

    def theirs() -> float:
        moved.update({name: tensor.to(target) for name, tensor in batch.items()})
        return step()

    contenders: list[Callable[[], object]] = [lambda: trainer.step(arrays), theirs]
    found = alternately(contenders, seconds=seconds)
    return found.medians[0], found.medians[1]


def _table(found: dict[Row, Outcome]) -> str:
    def milliseconds(seconds: float) -> str:
        return f"{seconds * 1e3:.3g}" if seconds else "-"

    def times(seconds: float, outcome: Outcome) -> str:
        return f"{seconds / outcome.ours:.2f}" if seconds and outcome.ours else "-"

    lines = [
        [
            row.work,
            row.batch or "example",
            f"{max(outcome.errors.values()):.1e}" if outcome.errors else "-",
            milliseconds(outcome.ours),
            milliseconds(outcome.eager),
            milliseconds(outcome.compiled),
            times(outcome.eager, outcome),
            times(outcome.compiled, outcome),
            outcome.problem,
        ]
        for row, outcome in found.items()
    ]
    headers = ["work", "batch", "largest error against the CPU", "Tessera ms", "torch eager ms"]
    headers += ["torch.compile ms", "times eager", "times compile", "problem"]
    return markdown_table(lines, headers)


def _write_figures(table: str, device: str) -> None:
    text = FIGURES.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    FIGURES.write_text(f"{before}{BEGIN}\n\nOn {device}.\n\n{table}\n\n{END}{after}", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
