"""``python -m tests.fuzz``: fuzz every decoder for a while, and count what was tried.

Inputs that reach new code are kept in ``--work`` between runs. An input that let anything but the
project's own error escape (or took more than 1 GB or 5 seconds) is a finding: it is added to
``tests/fuzz/corpus/<target>.txt``, which the test suite runs from then on. ``--keep`` adds the
inputs that reached the most code, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fuzz import corpus as kept_corpus
from tests.fuzz.targets import all_targets

TARGETS = all_targets()
_ROOT = Path(__file__).resolve().parent.parent.parent
# Imports are instrumented first: minutes on a busy machine. libFuzzer keeps limits of its own.
_GRACE_SECONDS = 600.0
_MERGE_SECONDS = 600.0


@dataclass(frozen=True)
class Outcome:
    """How fuzzing one target went. ``finding``: the input that broke it, if one did."""

    target: str
    executions: int
    corpus: int
    finding: Path | None
    detail: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz; returns 1 where something was found."""
    options = _parse(arguments)
    names = options.targets.split(",") if options.targets else list(TARGETS)
    unknown = sorted(set(names) - set(TARGETS))
    if unknown:
        print(f"--targets: no target {unknown[0]!r}; known: {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    console = Console()
    seconds = max(1.0, options.minutes * 60.0 / len(names))
    outcomes: list[Outcome] = []
    totals: dict[str, int] = {}
    for index, name in enumerate(names):
        left = (len(names) - index) * seconds / 60.0
        console.print(f"{name}: {seconds:.0f} s ({left:.1f} minutes left)", style="dim")
        outcomes.append(_fuzz(name, seconds, options.work, options.seed))
        totals = _add_to_totals(options.work, outcomes[-1])
        if options.keep and not _keep(name, options.work):
            console.print(f"{name}: choosing inputs to keep took too long; none added", style="red")
    console.print(_table(outcomes, totals))
    findings = [outcome for outcome in outcomes if outcome.finding is not None]
    for outcome in findings:
        console.print(f"\n{outcome.target}: {outcome.finding}\n{outcome.detail}", style="red")
    return 1 if findings else 0


def _fuzz(name: str, seconds: float, work: Path, seed: int) -> Outcome:
    corpus, artifacts = work / name, work / "findings" / name
    for folder in (corpus, artifacts):
        folder.mkdir(parents=True, exist_ok=True)
    for index, data in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed-{index}").write_bytes(data)
    before = set(artifacts.iterdir())
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.fuzz.one_target", name, str(corpus)),
            *(f"-max_total_time={int(seconds)}", f"-artifact_prefix={artifacts}/"),
            f"-seed={seed}",
        ],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": str(_ROOT), "ORT_DISABLE_TELEMETRY": "1"},
    )
    try:
        output, _ = process.communicate(timeout=seconds + _GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += "\nthe fuzzer did not end in time"
    except BaseException:
        process.kill()
        raise
    executions = re.findall(r"stat::number_of_executed_units:\s*(\d+)", output)
    finding = next((path for path in sorted(artifacts.iterdir()) if path not in before), None)
    if finding is None and process.returncode != 0:
        raise SystemExit(f"the fuzzer of {name} failed:\n{output[-2000:]}")
    if finding is not None:
        kept_corpus.add(name, [finding.read_bytes()], limited=False)
    return Outcome(
        name,
        int(executions[-1]) if executions else 0,
        sum(1 for _ in corpus.iterdir()),
        finding,
        output[-2000:],
    )


def _keep(name: str, work: Path) -> bool:
    """Add the least set of inputs that covers what all of them cover; False where it is not found
    in time."""
    least = work / "least" / name
    shutil.rmtree(least, ignore_errors=True)
    least.mkdir(parents=True)
    try:
        subprocess.run(
            [
                *(sys.executable, "-m", "tests.fuzz.one_target", name, str(least)),
                *("-merge=1", str(work / name)),
            ],
            cwd=_ROOT,
            check=True,
            capture_output=True,
            timeout=_MERGE_SECONDS,
            env={**os.environ, "PYTHONPATH": str(_ROOT), "ORT_DISABLE_TELEMETRY": "1"},
        )
    except subprocess.TimeoutExpired:
        return False
    kept_corpus.add(name, [path.read_bytes() for path in least.iterdir()])
    return True


def _add_to_totals(work: Path, outcome: Outcome) -> dict[str, int]:
    """Executions of all runs with this work folder, written after each target."""
    path = work / "executions.json"
    totals: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    totals[outcome.target] = totals.get(outcome.target, 0) + outcome.executions
    path.write_text(json.dumps(totals, indent=1, sort_keys=True))
    return totals


def _table(outcomes: Sequence[Outcome], totals: dict[str, int]) -> Table:
    table = Table(title=f"{sum(totals.values()):,} executions in all runs")
    for column in ("target", "executions", "all runs", "inputs kept", "finding"):
        table.add_column(column, justify="left" if column == "target" else "right")
    for outcome in outcomes:
        table.add_row(
            outcome.target,
            f"{outcome.executions:,}",
            f"{totals[outcome.target]:,}",
            f"{outcome.corpus:,}",
            "none" if outcome.finding is None else outcome.finding.name,
        )
    return table


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        epilog=f"targets: {', '.join(TARGETS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="for all targets together")
    parser.add_argument("--targets", help="names separated by commas (default: all)")
    parser.add_argument(
        "--seed",
        type=int,
        default=int(time.time()),
        help="of the mutations; one process repeats them (default: the time)",
    )
    parser.add_argument(
        "--keep", action="store_true", help="add what covers the most to the test suite's corpus"
    )
    parser.add_argument(
        "--work", type=Path, default=_ROOT / "out" / "fuzz", help="inputs found so far"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
