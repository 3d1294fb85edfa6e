"""Sizes while a step is recorded: what is assumed of them, and must hold in every step."""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv


class Sizes(ShapeEnv):
    """Sizes of axes, and those that data decide: how many true places a mask has.

    torch's own questions about such a number (a reduction asks whether it is empty, a product
    whether an axis is 1) are answered as those about a named axis: as of any length.

    Where code raises by a bound on a size, the size is taken to be within it; where a model asks
    whether a number that data decide is 0, it is taken not to be. ``needed`` notes what has to be
    at least 0 for that: a step in which it is not has to be refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed: dict[sympy.Expr, None] = {}
        self._answers: dict[tuple[CodeType, int], bool | None] = {}

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        """As torch's, save where the code raises, and for all selections but an empty one."""
        if isinstance(orig_expr, _BOUNDS) and self._is_open(orig_expr):
            allowed = self._answer_without_raise(orig_expr)
            if allowed is not None:
                return allowed
        try:
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            if not orig_expr.free_symbols <= self.size_like | self.backed_var_to_val.keys():
                raise
            asked = _asking()
            answer = self._answer_without_raise(orig_expr)
            if answer is None and asked.f_code.co_filename.startswith((_TORCH, _OURS)):
                answers = {_at(orig_expr, probe) for probe in PROBES}
                answer = answers.pop() if len(answers) == 1 else None
            elif answer is None:
                answer = self._if_not_empty(orig_expr)
            if answer not in (sympy.true, sympy.false):
                raise
            return answer

    def _if_not_empty(self, question: sympy.Basic) -> sympy.Basic | None:
        decided = question.free_symbols & self.size_like
        ones = {size: 1 + sympy.Dummy(integer=True, nonnegative=True) for size in decided}
        answer = sympy.simplify(question.xreplace(ones))
        if answer not in (sympy.true, sympy.false):
            return None
        self.needed.update(dict.fromkeys(size - 1 for size in sorted(decided, key=str)))
        return answer

    def _is_open(self, bound: sympy.Rel) -> bool:
        return bool(bound.free_symbols) and self._maybe_evaluate_static(bound) is None

    def _answer_without_raise(self, question: sympy.Basic) -> sympy.Basic | None:
        """The answer for which the code that asks does not raise; None where it never does."""
        frame = _asking()
        place = frame.f_code, frame.f_lasti
        if place not in self._answers:
            self._answers[place] = _answer_without_raise(*place)
        answer = self._answers[place]
        needed = None if answer is None else _needed(question if answer else sympy.Not(question))
        if needed is None:
            return None
        self.needed.update(dict.fromkeys(needed))
        return sympy.true if answer else sympy.false


def _needed(condition: sympy.Basic) -> list[sympy.Expr] | None:
    """What is at least 0 where the condition holds, and only there; None for other conditions."""
    if isinstance(condition, sympy.Eq):
        return [condition.lhs - condition.rhs, condition.rhs - condition.lhs]
    if isinstance(condition, _BOUNDS):
        strict = isinstance(condition, (sympy.StrictLessThan, sympy.StrictGreaterThan))
        return [condition.gts - condition.lts - int(strict)]
    return None


_BOUNDS = (sympy.LessThan, sympy.StrictLessThan, sympy.GreaterThan, sympy.StrictGreaterThan)

_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parent)
# What lies between a question and who asks it.
_BETWEEN = (f"{_TORCH}/fx/experimental", f"{_TORCH}/__init__.py", __file__)
# At these a question has to have one answer; 0 and 1 are left to the run-time's checks.
PROBES = (2, 3, 4, 5, 7, 8, 16, 31, 32, 64, 100, 127, 128, 1000, 4096)


def _asking() -> FrameType:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def _at(question: sympy.Basic, probe: int) -> sympy.Basic:
    free = sorted(question.free_symbols, key=str)
    return question.xreplace({n: sympy.Integer(probe + 13 * i) for i, n in enumerate(free)})


def _answer_without_raise(code: CodeType, offset: int) -> bool | None:
    """Of ``assert n <= 9`` or ``if n > 9: raise ...``, asked at this place: True, False."""
    after = [each for each in dis.get_instructions(code) if each.offset >= offset]
    jump = next((i for i, each in enumerate(after) if "JUMP" in each.opname), None)
    if jump is None or any(each.opname not in _ASKING for each in after[:jump]):
        return None
    jumps_if = "IF_TRUE" in after[jump].opname
    there = [each for each in after if each.offset >= after[jump].argval]
    raises = {jumps_if: _raises(there), not jumps_if: _raises(after[jump + 1 :])}
    return None if raises[True] == raises[False] else raises[False]


_ASKING = ("COMPARE_OP", "TO_BOOL", "CACHE")


def _raises(code: Sequence[dis.Instruction]) -> bool:
    """Whether code from here on raises, by one way and before it does anything else."""
    for each in code:
        if each.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in each.opname or each.opname.startswith(("RETURN", "STORE", "FOR_ITER", "SEND")):
            return False
    return False
