"""What `make mutants` makes of mutmut's files, and whether its explanations are of today's code."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.mutants.__main__ import EXPLAINED, ROOT, read_explanations, source_of
from tests.mutants.groups import GROUPS
from tests.mutants.survivors import Mutant, changes_only_words, read_outcome

MUTATED = """
class Box:
    def xǁBoxǁopen__mutmut_orig(self, key):
        if key < 3:
            raise WireError("bad-key", f"{key} is low")
        return self.inside[key]

    def xǁBoxǁopen__mutmut_1(self, key):
        if key <= 3:
            raise WireError("bad-key", f"{key} is low")
        return self.inside[key]

    def xǁBoxǁopen__mutmut_2(self, key):
        if key < 3:
            raise WireError("bad-key", None)
        return self.inside[key]

    def xǁBoxǁopen__mutmut_3(self, key):
        if key < 3:
            raise WireError("BAD-KEY", f"{key} is low")
        return self.inside[key]

def x_half__mutmut_orig(number):
    return number / 2

def x_half__mutmut_1(number):
    return number * 2

def x_half__mutmut_2(number):
    return number / 3

def x_half__mutmut_3(number=1):
    return number / 2
"""


def test_survivors_are_told_by_what_they_change(tmp_path: Path) -> None:
    (tmp_path / "box.py").write_text(MUTATED, encoding="utf-8")
    codes = {
        "box.xǁBoxǁopen__mutmut_1": 0,
        "box.xǁBoxǁopen__mutmut_2": 0,
        "box.xǁBoxǁopen__mutmut_3": 33,
        "box.x_half__mutmut_1": 1,
        "box.x_half__mutmut_2": -24,
        "box.x_half__mutmut_3": 0,
    }
    (tmp_path / "box.py.meta").write_text(json.dumps({"exit_code_by_key": codes}))
    outcome = read_outcome(tmp_path, ("box.py",))
    assert (outcome.killed, outcome.words, outcome.total) == (1, 1, 6)
    slow = Mutant("box.half", "return number / 2", "return number / 3")
    assert outcome.timed_out == (slow,)
    assert outcome.alive == (
        Mutant("box.Box.open", "if key < 3:", "if key <= 3:"),
        Mutant(
            "box.Box.open",
            "raise WireError('bad-key', f'{key} is low')",
            "raise WireError('BAD-KEY', f'{key} is low')",
        ),
        Mutant("box.half", "def half(number):", "def half(number=1):"),
    )


def test_a_run_that_was_cut_short_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "box.py").write_text(MUTATED, encoding="utf-8")
    codes = {"box.x_half__mutmut_1": None}
    (tmp_path / "box.py.meta").write_text(json.dumps({"exit_code_by_key": codes}))
    with pytest.raises(ValueError, match="cut short"):
        read_outcome(tmp_path, ("box.py",))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("raise ValueError('other words')", True),
        ("raise TypeError('words')", False),
        ("raise ValueError()", False),
        ("raise ValueError('words') from error", False),
        ("return ValueError('words')", False),
    ],
)
def test_only_the_words_of_an_error_are_words(other: str, words: bool) -> None:
    original, mutated = (
        ast.parse(f"def f(error):\n    {body}").body[0]
        for body in ("raise ValueError('words')", other)
    )
    assert changes_only_words(original, mutated) == words


def test_the_fixed_text_of_a_repr_is_words_and_what_it_fills_in_is_not() -> None:
    original, words, other = (
        ast.parse(f"def __repr__(self):\n    return {text}").body[0]
        for text in (
            "f'Key({self.name}, ...)'",
            "f'XXKey({self.name}, ...)XX'",
            "f'Key({self.key}, ...)'",
        )
    )
    assert changes_only_words(original, words)
    assert not changes_only_words(original, other)


@pytest.mark.parametrize("name", GROUPS)
def test_the_files_of_every_group_are_there(name: str) -> None:
    for path in (*GROUPS[name].sources, *GROUPS[name].tests):
        assert (ROOT / path).is_file(), path


def test_every_explanation_is_of_code_that_is_there() -> None:
    """Otherwise it would only be noticed by the next long run."""
    for mutant, why in read_explanations(EXPLAINED).items():
        source = source_of(mutant)
        assert any(source in group.sources for group in GROUPS.values()), mutant
        lines = ast.unparse(ast.parse((ROOT / source).read_text(encoding="utf-8"))).splitlines()
        assert set(mutant.was.splitlines()) <= {line.strip() for line in lines}, mutant
        assert len(why) > 20, mutant
