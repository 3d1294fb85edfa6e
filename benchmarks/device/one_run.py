"""One run of `make bench-device`, in a process of its own: each row's step beside torch's.

Prints a line of JSON for each row: its name, both medians in seconds, and how many times faster
than torch ours is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.device.timing import alternately, our_step
from benchmarks.device.workloads import torch_step, workloads


def main(folder: Path, seconds: float, names: list[str]) -> None:
    """Time the rows of these names, whose artifacts are ``folder / str(place)``, in this order."""
    torch.set_num_threads(1)
    known = {workload.name: workload for workload in workloads()}
    for place, name in enumerate(names):
        workload = known[name]
        torch.manual_seed(0)
        model, batch = workload.model(), workload.batch()
        timed = alternately(
            [our_step(folder / str(place), batch), torch_step(workload, model, batch)],
            seconds=seconds,
        )
        figure = {
            "work": name,
            "seconds": timed.medians[0],
            "torch_seconds": timed.medians[1],
            "against_torch": timed.ratio(0, 1),
        }
        print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
