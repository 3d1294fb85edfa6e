"""`python -m benchmarks.scatter.factor_steps`: the exported step against NumPy's, by size.

A step's gradients as scatter's learner asks for them, on made-up triples, one thread, timed
alternately. Above 1 NumPy is faster. `StepByUsers` takes NumPy's for one user.
`--threads` leaves NumPy's BLAS its own threads.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

if "--threads" not in sys.argv:
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from tabulate import tabulate

from benchmarks.device.timing import alternately
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.scatter.descent import touched_rows
from device_sdk.methods.scatter.factor_step import FactorBatch, NumpyStep, TrainerStep
from device_sdk.trainer import Trainer

# Users of one device, their triples together, items in the catalogue.
SIZES = (
    (1, 20, 1_682),
    (1, 100, 1_682),
    (1, 400, 3_706),
    (1, 2_000, 3_706),
    (1, 10_000, 26_744),
    (5, 500, 3_706),
    (20, 2_000, 3_706),
    (50, 5_000, 3_706),
    (100, 10_000, 3_706),
    (200, 20_000, 26_744),
    (1_000, 20_000, 3_706),
)
KS = (1, 8, 64)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scatter.factor_steps", description=__doc__
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="timing a cell (default: 2)")
    parser.add_argument("--threads", action="store_true", help="BLAS with threads of its own")
    seconds = parser.parse_args().seconds
    graph = TrainerStep(Trainer(packaged_artifact(), providers="cpu", threads=1))
    rng = np.random.default_rng(0)
    rows = []
    for users, triples, catalogue in SIZES:
        touched, positive, negative = touched_rows(
            rng.integers(catalogue, size=triples), rng.integers(catalogue, size=triples), catalogue
        )
        batch = FactorBatch(
            user=np.sort(rng.integers(users, size=triples)),
            positive=positive,
            negative=negative,
            weight=np.ones(triples, np.float32),
            offset=rng.standard_normal(triples).astype(np.float32),
            user_l2=0.01,
            item_l2=0.01,
        )
        row = [f"{users:,}", f"{triples:,}", f"{len(touched):,}"]
        row.append(f"{users * len(touched) / triples:.1f}")
        for k in KS:
            matrices = [
                np.float32(0.1) * rng.standard_normal((count, k), dtype=np.float32)
                for count in (users, len(touched))
            ]
            steps = [
                partial(step.gradients, *matrices, batch=batch) for step in (graph, NumpyStep())
            ]
            timed = alternately(steps, seconds=seconds)
            row.append(f"{timed.ratio(1, 0):.2f} ({timed.medians[1] * 1e3:.3g} ms)")
        rows.append(row)
    headers = ["users", "triples", "rows", "cells a triple", *(f"k = {k}" for k in KS)]
    print(tabulate(rows, headers, disable_numparse=True, colalign=("right",) * len(headers)))


if __name__ == "__main__":
    main()
