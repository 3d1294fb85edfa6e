"""``python -m benchmarks.scatter.full_round``: a round of BPR by ML-1M's 6,040 devices.

The same fleet several times over, round by round in turn: each device alone, as devices train, and
all in one call, as they are simulated; with the step that a device of one user takes, NumPy's, and
with the train graph. Each fleet is a process of its own with one thread, so that its memory is its
own. Prints processor seconds, and whether the fleets of a step end with the same item matrix, bit
for bit. In the first round the devices also prepare their triples and make their users' vectors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Before NumPy is loaded: what its BLAS does with more threads is not this benchmark's.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np

from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.simulate.scatter_fleet import scatter_fleet
from benchmarks.harness import data_folder, markdown_table
from benchmarks.recommendation.split import load_split
from benchmarks.scatter.cost import open_step
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.learner import LearnerError
from device_sdk.methods.scatter.contract import decode_scatter_update, encode_scatter_update
from device_sdk.methods.scatter.factor_step import FactorStep
from device_sdk.methods.scatter.learner import ScatterLearner
from device_sdk.train.scatter import factor_step
from device_sdk.wire.arrays.exchange import Broadcast, Update

STEPS: dict[str, Callable[[], FactorStep]] = {
    "graph": lambda: open_step(None),
    "numpy": lambda: factor_step(packaged_artifact()),
}
WAYS = tuple(f"{how}, {step}" for step in STEPS for how in ("alone", "together"))
STAGES = ("train", "encode", "decode", "check", "absorb", "close")
_GROUP = 512
"""Devices in one call: a round's updates are never in memory whole."""


class Fleet:
    """ML-1M's users with k = K = ``width``, and their aggregator's half; every fleet's draws are
    the same. ``way``: one of ``WAYS``."""

    def __init__(self, root: Path, way: str, width: int) -> None:
        split = load_split(root, "ml-1m")
        how, step = way.split(", ")
        self._together = how == "together"
        self._learners = scatter_fleet(
            [[rows] for rows in split.train],
            np.full(split.users, width, dtype=np.int64),
            STEPS[step](),
            np.random.SeedSequence(0),
        )
        self._shape = (split.items, width)
        first = initial_items(*self._shape, 0.1, np.random.default_rng(0))
        self._method = ScatterMethod(first, ScatterSettings(loss="bpr"))
        self._spent: dict[str, float] = {}

    def round(self, number: int) -> dict[str, float]:
        """One round of all devices; its processor seconds by stage."""
        self._spent = dict.fromkeys(STAGES, 0.0)
        broadcast = self._method.open_round(number)
        for start in range(0, len(self._learners), _GROUP):
            with self._stage("train"):
                updates = self._trained(self._learners[start : start + _GROUP], broadcast)
            with self._stage("encode"):
                bodies = [encode_scatter_update(one, self._shape[1], "float16") for one in updates]
            with self._stage("decode"):
                arrived = [decode_scatter_update(one, number, *self._shape) for one in bodies]
            with self._stage("check"):
                for update in arrived:
                    self._method.check(update)
            with self._stage("absorb"):
                for update in arrived:
                    self._method.absorb(update)
        with self._stage("close"):
            self._method.close_round()
        return self._spent

    def mark(self) -> str:
        """Of the item matrix: equal for the same bits."""
        return hashlib.sha256(self._method.items.tobytes()).hexdigest()

    def _trained(self, group: list[ScatterLearner], broadcast: Broadcast) -> Sequence[Update]:
        if not self._together:
            return [learner.train(broadcast) for learner in group]
        updates = []
        for found in ScatterLearner.train_many(group, broadcast):
            if isinstance(found, LearnerError):
                raise found
            updates.append(found)
        return updates

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self._spent[name] += time.process_time() - began


def _serve(root: Path, way: str, width: int) -> None:
    """Carry out a round for each line on standard input; its figures go to standard output."""
    fleet = Fleet(root, way, width)
    for number, _ in enumerate(sys.stdin, start=1):
        spent = fleet.round(number)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_bytes = peak if sys.platform == "darwin" else peak * 1024
        print(json.dumps({"seconds": spent, "mark": fleet.mark(), "peak": peak_bytes}), flush=True)


def measure(root: Path, ways: Sequence[str], width: int, rounds: int) -> dict[str, list[Any]]:
    """By way, the figures of a first round and ``rounds`` more, taken in turn."""
    command = [sys.executable, "-m", "benchmarks.scatter.full_round", "--width", str(width)]
    fleets = {
        way: subprocess.Popen(
            [*command, "--root", str(root), "--serve", way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for way in ways
    }
    found: dict[str, list[Any]] = {way: [] for way in ways}
    try:
        for _ in range(1 + rounds):
            for way, process in fleets.items():
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                found[way].append(json.loads(process.stdout.readline()))
    finally:
        for process in fleets.values():
            process.communicate()
    return found


def table(found: dict[str, list[Any]]) -> str:
    """Processor seconds by way: rounds whole, then the median of each stage."""
    lines = []
    for way, rounds in found.items():
        totals = [sum(one["seconds"].values()) for one in rounds]
        later = totals[1:] or totals
        stages = [
            statistics.median(one["seconds"][stage] for one in rounds[1:] or rounds)
            for stage in STAGES
        ]
        whole = f"{min(later):.2f} / {statistics.median(later):.2f} / {max(later):.2f}"
        peak = f"{rounds[-1]['peak'] / 1e6:.0f} MB"
        first = f"{totals[0]:.2f}"
        lines.append([way, first, whole, *(f"{seconds:.2f}" for seconds in stages), peak])
    headers = ["devices", "first round", "later: min / median / max", *STAGES, "peak memory"]
    return markdown_table(lines, headers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scatter.full_round",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, help="data folder (default: TESSERA_DATA)")
    parser.add_argument("--width", type=int, default=32, help="K, and every device's k")
    parser.add_argument("--rounds", type=int, default=5, help="after the first (default: 5)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    root = data_folder(options.root, "ml-1m/ncf")
    if options.serve:
        _serve(root, options.serve, options.width)
        return 0
    found = measure(root, options.ways, options.width, options.rounds)
    print(table(found))
    for step in STEPS:
        marks = {tuple(one["mark"] for one in found[way]) for way in found if way.endswith(step)}
        if marks:
            print(f"{step}: item matrices {'the same' if len(marks) == 1 else 'differ'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
