"""``python -m tests.fuzz.train_steps.power``: which defects of the exporter random steps find.

Each of :mod:`tests.fuzz.train_steps.defects` is put alone into a copy of the code, and programs
are tried there until one is found wrong. Prints after how many that was, and whether the
verification that every other export goes through refuses that program as well.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tabulate import tabulate

from tests.fuzz.train_steps.beside import refused_by_verification, tried_by_parts
from tests.fuzz.train_steps.defects import ONCE, OTHERS, Defect
from tests.fuzz.train_steps.programs import draw_program

ROOT = Path(__file__).parents[3]
_COPIED = ("device_sdk", "export", "tests/fuzz")
_HEADERS = ("defect", "found by program", "as", "verification refuses it")


def main() -> int:
    """0, or 1 where a defect was not found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.train_steps.power",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", help="of the defects to try; default: all")
    parser.add_argument("--programs", type=int, default=100, help="at most as many each")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--here", action="store_true", help="try this code as it is")
    options = parser.parse_intermixed_args()
    if options.here:
        print(*search(options.seed, options.programs), sep="\t")
        return 0
    rows = []
    for defect in (*ONCE, *OTHERS):
        if all(word in defect.what for word in options.words):
            rows.append((defect.what, *_found(defect, options.seed, options.programs)))
            print(*rows[-1], sep=" | ", flush=True)
    print(f"\n{tabulate(rows, _HEADERS, tablefmt='github')}")
    missed = sum(not row[1] for row in rows)
    print(f"\n{len(rows) - missed} of {len(rows)} found within {options.programs} programs")
    return int(bool(missed))


def search(seed: int, programs: int) -> tuple[str, str, str]:
    """The columns behind a defect's name; empty where no program finds any."""
    torch.set_num_threads(1)
    for number in range(programs):
        for program, outcome in tried_by_parts(draw_program(seed + number)):
            if outcome.found:
                refused = "yes" if refused_by_verification(program) else "no"
                return str(number + 1), outcome.kind, refused
    return "", "", ""


def planted(defect: Defect, root: Path) -> str:
    """The file's text with the defect; ValueError where it does not stand there once."""
    text = (root / defect.file).read_text(encoding="utf-8")
    if text.count(defect.was) != 1:
        raise ValueError(f"{defect.what}: not once in {defect.file}: {defect.was}")
    return text.replace(defect.was, defect.now)


def _found(defect: Defect, seed: int, programs: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        for name in _COPIED:
            unneeded = shutil.ignore_patterns("corpus", "__pycache__")
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=unneeded)
        (Path(folder) / defect.file).write_text(planted(defect, ROOT), encoding="utf-8")
        command = [sys.executable, "-m", __spec__.name, "--here"]
        command += ["--seed", str(seed), "--programs", str(programs)]
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return done.stdout.splitlines()[-1].split("\t")


if __name__ == "__main__":
    raise SystemExit(main())
