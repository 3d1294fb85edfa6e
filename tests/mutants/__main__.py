"""`make mutants`: change the code that must not be wrong, and see whether the tests notice.

Each group (`tests/mutants/groups.py`) is mutated by mutmut in a copy of the tree. What survives is
either killed by a new test or stands in `tests/mutants/explained.toml`, with the reason why no test
can or should notice it. Fails for a survivor that is not explained, and for an explanation of
something that did not survive. Changes that concern nothing but the words of an error are counted
apart: those are for people, and tests pin the reason that travels beside them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from tabulate import tabulate

from tests.mutants.groups import GROUPS, Group
from tests.mutants.survivors import Mutant, Outcome, read_outcome

ROOT = Path(__file__).parents[2]
EXPLAINED = Path(__file__).with_name("explained.toml")
_COPIED = ("device_sdk", "aggregator", "benchmarks", "examples", "tests")
_HEADERS = ("group", "mutants", "killed", "timed out", "words only", "explained", "alive", "s")


def main() -> int:
    """0, or 1 when the list of survivors and the explanations differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1, help="at once")
    arguments = parser.parse_intermixed_args()
    if unknown := set(arguments.groups) - GROUPS.keys():
        parser.error(f"no group {', '.join(sorted(unknown))}")
    explained = read_explanations(EXPLAINED)
    rows = []
    differs = False
    for name in arguments.groups or GROUPS:
        began = time.monotonic()
        group = GROUPS[name]
        outcome = mutate(group, arguments.children)
        known = {mutant for mutant in explained if source_of(mutant) in group.sources}
        alive = set(outcome.alive)
        rows.append(_row(name, outcome, len(alive & known), time.monotonic() - began))
        print(tabulate(rows[-1:], _HEADERS))
        for mutant in sorted(alive - known):
            print(f"\n# alive\n{_entry(mutant)}")
        gone = known - alive - set(outcome.timed_out)
        for mutant in sorted(gone):
            print(f"\n# explained, but killed or gone\n{_entry(mutant)}")
        sys.stdout.flush()
        differs |= bool(gone or alive - known)
    print(f"\n{tabulate(rows, _HEADERS, tablefmt='github')}")
    return int(differs)


def mutate(group: Group, children: int) -> Outcome:
    """Run mutmut on a copy of the tree. Raises RuntimeError, with its output, when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in _COPIED:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        (tree / "pyproject.toml").write_text(f"{settings}\n{_settings(group)}", encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "mutmut", "run", "--max-children", str(children)],
            cwd=tree,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"mutmut ended with {done.returncode}:\n{done.stdout[-4000:]}")
        return read_outcome(tree / "mutants", group.sources)


def read_explanations(path: Path) -> dict[Mutant, str]:
    """Each survivor with its reason. Raises KeyError for an entry that lacks a field."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("survivor", [])
    return {
        Mutant(entry["function"], entry["was"], entry["now"]): entry["why"] for entry in entries
    }


def _settings(group: Group) -> str:
    lists = {
        "source_paths": ("device_sdk", "aggregator"),
        "only_mutate": group.sources,
        "also_copy": ("benchmarks", "examples"),
        "pytest_add_cli_args": ("--hypothesis-profile=ci", "-p", "no:cacheprovider"),
        "pytest_add_cli_args_test_selection": group.tests,
    }
    # What takes 12 seconds more than three times what the tests take is an endless loop.
    head = ["[tool.mutmut]", "timeout_multiplier = 3.0", "timeout_constant = 4.0"]
    return "\n".join([*head, *(f"{key} = {list(each)}" for key, each in lists.items())])


def source_of(mutant: Mutant) -> str:
    """The file, below the root, of ``device_sdk.wire.seal.session.ReplayWindow.accept``."""
    parts = mutant.function.split(".")
    for length in range(len(parts), 0, -1):
        path = Path(*parts[:length]).with_suffix(".py")
        if (ROOT / path).is_file():
            return path.as_posix()
    return ""


def _row(name: str, outcome: Outcome, explained: int, seconds: float) -> tuple[object, ...]:
    alive = len(set(outcome.alive)) - explained
    return (
        name,
        outcome.total,
        outcome.killed,
        len(outcome.timed_out),
        outcome.words,
        explained,
        alive,
        round(seconds),
    )


def _entry(mutant: Mutant) -> str:
    lines = [f"{key} = {_quoted(getattr(mutant, key))}" for key in ("function", "was", "now")]
    return "\n".join(["[[survivor]]", *lines, "why = ''"])


def _quoted(text: str) -> str:
    return f"'''{text}'''" if "'" in text or "\n" in text else f"'{text}'"


if __name__ == "__main__":
    sys.exit(main())
