"""What each generator ends with: the file is written, or compared with what it would be."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def write(file: Path, text: str, arguments: list[str] | None = None) -> int:
    """The exit status of a generator's command line, whose file would hold ``text``."""
    parser = argparse.ArgumentParser(description=f"Write tests/vectors/{file.name}.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it differs")
    if not parser.parse_args(arguments).check:
        file.write_text(text, encoding="utf-8")
        return 0
    if file.read_text(encoding="utf-8") == text:
        return 0
    print(f"{file.name} differs: run python tests/vectors/generate_{file.stem}.py", file=sys.stderr)
    return 1
