"""The inputs that the test suite runs again: what was found, and what reached much code.

One text file a target, one input a line, in hexadecimal.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent / "corpus"
MOST_CHARACTERS = 60_000
"""Of a target's file: the shortest inputs are kept. Findings are kept whatever their size."""


def read(target: str) -> list[bytes]:
    """The kept inputs of a target; empty where there are none."""
    path = _FOLDER / f"{target}.txt"
    return [bytes.fromhex(line) for line in path.read_text().split()] if path.exists() else []


def add(target: str, inputs: Iterable[bytes], *, limited: bool = True) -> int:
    """Keep these inputs as well, as far as there is room; how many were new."""
    kept = {data.hex() for data in read(target)}
    characters = sum(map(len, kept))
    fresh = 0
    for line in sorted({data.hex() for data in inputs} - kept, key=lambda line: (len(line), line)):
        if not line or (limited and characters + len(line) > MOST_CHARACTERS):
            continue
        kept.add(line)
        characters += len(line)
        fresh += 1
    if fresh:
        _FOLDER.mkdir(exist_ok=True)
        lines = sorted(kept, key=lambda line: (len(line), line))
        (_FOLDER / f"{target}.txt").write_text("".join(f"{line}\n" for line in lines))
    return fresh
