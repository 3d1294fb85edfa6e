"""`make shape`: how many files, lines and class names the product has, of any checkout.

    python -m benchmarks.shape [CHECKOUT ...]

A class name that stands twice is one that two or more product files define at their top level. Many
arguments are more than five, ``self`` aside.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

PRODUCT = ("device_sdk", "aggregator", "export")
SMALL = 60
"""Lines of a small file, at most."""
MANY = 5
"""Arguments of a function, at most, that are not many."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Counts of a package, or of several: ``classes`` has the files that define each name."""

    files: int
    lines: int
    small: int
    many: int
    classes: dict[str, list[str]]

    @property
    def twice(self) -> dict[str, list[str]]:
        """Class names that more than one file defines."""
        return {name: files for name, files in sorted(self.classes.items()) if len(files) > 1}


def shape_of(checkout: Path, packages: Sequence[str]) -> Shape:
    """Of all Python files below the packages. Raises FileNotFoundError where one is missing."""
    files = lines = small = many = 0
    classes = defaultdict[str, list[str]](list)
    for package in packages:
        if not (checkout / package).is_dir():
            raise FileNotFoundError(f"{checkout} has no folder {package}")
        for path in sorted((checkout / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            count = len(text.splitlines())
            files, lines, small = files + 1, lines + count, small + (count <= SMALL)
            tree = ast.parse(text)
            many += sum(map(_has_many_arguments, ast.walk(tree)))
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append(path.relative_to(checkout).as_posix())
    return Shape(files, lines, small, many, dict(classes))


def _has_many_arguments(node: ast.AST) -> bool:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([each for each in given if each.arg not in ("self", "cls")]) > MANY


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts of each checkout; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shape", description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path()], metavar="CHECKOUT")
    parser.add_argument("--names", action="store_true", help="list what was counted by name")
    options = parser.parse_args(arguments)
    rows, named = [], []
    for checkout in options.checkouts:
        try:
            shapes = {one: shape_of(checkout, [one]) for one in PRODUCT}
            shapes["together"] = shape_of(checkout, PRODUCT)
        except FileNotFoundError as error:
            print(error, file=sys.stderr)
            return 2
        for package, found in shapes.items():
            counts = (found.files, found.lines, found.small, found.many, len(found.twice))
            rows.append((str(checkout), package, *(f"{count:,}" for count in counts)))
        named += [f"{checkout}: {name}: {', '.join(f)}" for name, f in found.twice.items()]
    headers = (
        *("checkout", "", "files", "lines", f"files to {SMALL} lines"),
        *(f"functions of more than {MANY} arguments", "class names twice"),
    )
    print(tabulate(rows, headers=headers, disable_numparse=True))
    if options.names:
        print("\n".join(("", *named)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
