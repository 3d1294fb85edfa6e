"""`make shape`: how many files, lines and class names the product has, of any checkout.

    python -m benchmarks.shape [CHECKOUT ...]
    python -m benchmarks.shape --round

A class name that stands twice is one that two or more product files define at their top level. Many
arguments are more than five, ``self`` aside. ``--round``: through which files and functions of
``device_sdk`` a device's threads go in a warm round, from one version of a fleet of one (fedavg, a
real broker and ``serve``) to the next; depth is of calls within the product.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from tabulate import tabulate

PRODUCT = ("device_sdk", "aggregator", "export")
SMALL = 60
"""Lines of a small file, at most."""
MANY = 5
"""Arguments of a function, at most, that are not many."""
_WARM_ROUNDS = 2


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


class Way:
    """A profiler of threads: which functions below ``folder`` run while it is on."""

    def __init__(self, folder: Path) -> None:
        self.on = False
        self.functions: set[tuple[str, str]] = set()
        self.depth = 0
        self._folder = f"{folder}/"

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """See ``threading.setprofile``."""
        code = frame.f_code
        if not self.on or event != "call" or code.co_name.startswith("<"):
            return
        if code.co_filename.startswith(self._folder):
            self.functions.add((code.co_filename, code.co_qualname))
            depth, outer = 1, frame.f_back
            while outer is not None:
                depth += outer.f_code.co_filename.startswith(self._folder)
                outer = outer.f_back
            self.depth = max(self.depth, depth)

    @property
    def files(self) -> set[str]:
        """Those of the functions."""
        return {file for file, _ in self.functions}


def warm_round(folder: Path) -> Way:
    """Play a fleet of one device in an empty folder, and follow its third round."""
    import torch

    import device_sdk
    import export
    from device_sdk import LocalData
    from examples.local_fleet import FleetTask, Member, local_fleet

    batch = {"x": torch.ones(4, 3), "y": torch.ones(4, 1)}
    export.train_step(
        torch.nn.Linear(3, 1),
        lambda model, given: ((model(given["x"]) - given["y"]) ** 2).mean(),
        example_batch=batch,
        optimizer=export.Sgd(lr=0.01),
        dynamic={"x": {0: "batch"}, "y": {0: "batch"}},
        directory=folder / "line",
        verify=False,
    )
    way = Way(Path(device_sdk.__file__).parent)
    data = LocalData({name: np.ones(each.shape, np.float32) for name, each in batch.items()})
    task = FleetTask("fedavg", [folder / "line"], rounds=_WARM_ROUNDS + 2, pause_seconds=1.0)
    threading.setprofile(way)
    try:
        with local_fleet(task, [Member("anna", data)], folder / "fleet") as fleet:
            for row in fleet.rounds():
                way.on = row.round == _WARM_ROUNDS
    finally:
        threading.setprofile(None)
    return way


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts of each checkout; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shape", description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path()], metavar="CHECKOUT")
    parser.add_argument("--names", action="store_true", help="list what was counted by name")
    parser.add_argument("--round", action="store_true", help="what a device's warm round runs")
    options = parser.parse_intermixed_args(arguments)
    if options.round:
        with tempfile.TemporaryDirectory() as folder:
            way = warm_round(Path(folder))
        files, functions = len(way.files), len(way.functions)
        print(f"a warm round: {files} files, {functions} functions, {way.depth} deep")
        if options.names:
            print("\n".join(sorted(f"{file}: {function}" for file, function in way.functions)))
        return 0
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
