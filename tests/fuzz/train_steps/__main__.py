"""``python -m tests.fuzz.train_steps``: random train steps exported and trained beside torch.

Prints each program whose artifact computes something else than torch, or whose export fails with
another error than the exporter's own, made as small as it goes; and counts all others. The same
``--seed`` is the same programs.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch

from tests.fuzz.train_steps.beside import shrunk, tried_by_parts
from tests.fuzz.train_steps.programs import draw_program


def main() -> int:
    """Returns 1 where something was found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.train_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first program")
    parser.add_argument("--programs", type=int, default=10**9, help="at most as many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    end = time.monotonic() + 60 * options.minutes
    for seed in range(options.seed, options.seed + options.programs):
        if time.monotonic() > end:
            break
        for program, outcome in tried_by_parts(draw_program(seed)):
            kinds[outcome.kind] += 1
            if outcome.kind == "refused":
                refusals[outcome.reason] += 1
            elif outcome.found:
                program, outcome = shrunk(program, outcome)
                print(f"--seed {seed} --programs 1: {outcome.kind}: {outcome.detail}")
                print(f"{program.held}\n{program.optimizer}\n{program.source}", flush=True)
        if not (seed - options.seed + 1) % 20:
            print(seed - options.seed + 1, dict(kinds), flush=True)
    print(dict(kinds))
    for reason, count in refusals.most_common():
        print(f"{count:6} refused: {reason}")
    return int(bool(kinds["wrong"] or kinds["crashed"]))


if __name__ == "__main__":
    raise SystemExit(main())
