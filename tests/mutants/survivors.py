"""What a run of mutmut left alive, in words that outlive the next change of the file."""

from __future__ import annotations

import ast
import copy
import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_KILLED = {1, 3}  # pytest's exit codes for failed tests, and for an error of its own
_TIMEOUT = {24, -24, 36, 152, 255}
_MESSAGE_PLACE = {"AssertionError": 0, "WireError": 1, "ValueError": 0, "_bad_file": 1}
"""Which argument of an error is the sentence for people."""


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of one function. ``was`` and ``now`` are the lines that differ, as
    ``ast.unparse`` writes them, so that neither numbers nor line breaks matter."""

    function: str
    was: str
    now: str


@dataclass(frozen=True)
class Outcome:
    """What became of all mutants of a run. ``words``: alive, and only an error's words differ.

    ``timed_out`` counts as noticed (an endless loop is no success), but proves nothing on a machine
    that was too busy.
    """

    killed: int
    words: int
    timed_out: tuple[Mutant, ...]
    alive: tuple[Mutant, ...]

    @property
    def total(self) -> int:
        """Of all mutants."""
        return self.killed + self.words + len(self.timed_out) + len(self.alive)


def read_outcome(folder: Path, sources: tuple[str, ...]) -> Outcome:
    """Read the files that mutmut leaves in ``folder``. Raises ValueError for a run cut short."""
    killed = words = 0
    timed_out: list[Mutant] = []
    alive: list[Mutant] = []
    for source in sources:
        exit_codes = json.loads((folder / f"{source}.meta").read_text())["exit_code_by_key"]
        functions = _functions((folder / source).read_text(encoding="utf-8"))
        for key, code in exit_codes.items():
            if code is None:
                raise ValueError(f"{key} was not tried: the run was cut short")
            if code in _KILLED:
                killed += 1
                continue
            module, _, mangled = key.rpartition(".")
            name, _, _ = mangled.partition("__mutmut_")
            original, mutated = functions[f"{name}__mutmut_orig"], functions[mangled]
            plain = _plain(name)
            lines = _lines(plain.rpartition(".")[2], original, mutated)
            mutant = Mutant(f"{module}.{plain}", *lines)
            if code in _TIMEOUT:
                timed_out.append(mutant)
            elif changes_only_words(original, mutated):
                words += 1
            else:
                alive.append(mutant)
    return Outcome(killed, words, tuple(sorted(timed_out)), tuple(sorted(alive)))


def changes_only_words(original: ast.AST, mutated: ast.AST) -> bool:
    """Whether two functions differ in nothing but the sentences of their errors, or of a repr."""
    return _without_words(original) == _without_words(mutated)


def _functions(source: str) -> dict[str, ast.FunctionDef]:
    return {
        node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)
    }


def _plain(mangled: str) -> str:
    """``xǁClassǁmethod`` and ``x_function``, as mutmut writes them, without the decoration."""
    return ".".join(mangled[1:].split("ǁ")[1:]) if mangled.startswith("xǁ") else mangled[2:]


def _lines(name: str, original: ast.FunctionDef, mutated: ast.FunctionDef) -> tuple[str, str]:
    before, after = (ast.unparse(_named(each, name)).splitlines() for each in (original, mutated))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "-+"]
    return (
        "\n".join(line[2:].strip() for line in changed if line[0] == "-"),
        "\n".join(line[2:].strip() for line in changed if line[0] == "+"),
    )


def _named(function: ast.FunctionDef, name: str) -> ast.FunctionDef:
    """With the name it has in the source: its first line, with the defaults, is compared too."""
    function = copy.deepcopy(function)
    function.name = name
    function.decorator_list = []
    return function


def _without_words(function: ast.AST) -> str:
    function = copy.deepcopy(function)
    for call in _errors(function):
        place = _MESSAGE_PLACE[call.func.id]  # type: ignore[attr-defined]
        if len(call.args) > place:
            call.args[place] = ast.Constant("")
    for text in _shown(function):
        text.value = ""
    if isinstance(function, ast.FunctionDef):
        function.name = ""
        function.decorator_list = []
    return ast.dump(function)


def _shown(function: ast.AST) -> Iterator[ast.Constant]:
    """The fixed text of what ``__repr__`` returns; what it fills in is no word."""
    if not isinstance(function, ast.FunctionDef) or "__repr__" not in function.name:
        return
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node


def _errors(function: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and isinstance(node.exc.func, ast.Name)
            and node.exc.func.id in _MESSAGE_PLACE
        ):
            yield node.exc
