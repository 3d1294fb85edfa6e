"""Sizes while a step is recorded: what is assumed of them, and must hold in every step."""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.functions import Mod, PythonMod


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
        self._truths: set[sympy.Symbol] = set()
        self.instead = ""
        """What to use where the last question could not be answered."""

    def create_unbacked_symbool(self) -> torch.SymBool:
        """A truth value that data decide: whether a symbol, 0 or 1, is 1."""
        made = super().create_unbacked_symbool()
        self._truths |= made.node.expr.free_symbols
        return made

    def again(self, node: fx.Node, result: Any) -> None:
        """What data decide has new symbols in a second recording: those of this result."""
        given = {
            old: new
            for old, new in zip(numbers_in(node.meta.get("val")), numbers_in(result), strict=False)
            if isinstance(old, sympy.Symbol) and old != new
        }
        if given:
            self.needed = {size.xreplace(given): None for size in self.needed}

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        """As torch's, save where the code raises, and for all selections but an empty one."""
        if _is_condition(orig_expr) and self._is_open(orig_expr):
            allowed = self._answer_without_raise(orig_expr)
            if allowed is not None:
                return allowed
        try:
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            self.instead = _instead(_asking())
            if not _is_of_whole_numbers(orig_expr):
                raise
            answer = self._answer_without_raise(orig_expr)
            if answer is None and _asking().f_code.co_filename.startswith((_TORCH, _OURS)):
                answer = self._whatever_the_size(orig_expr)
            elif answer is None:
                answer = self._if_not_empty(orig_expr)
            if answer not in (sympy.true, sympy.false):
                raise
            return answer

    def _whatever_the_size(self, question: sympy.Basic) -> sympy.Basic | None:
        """The one answer to a question of torch's own; a number that was read is at least 0."""
        read = sorted(
            question.free_symbols - self.size_like - self.backed_var_to_val.keys(), key=str
        )
        few = [dict(zip(read, each, strict=True)) for each in product((0, 1), repeat=len(read))]
        answers = {_at(question.xreplace(known), probe) for known in (*few, {}) for probe in PROBES}
        if len(answers) > 1:
            return None
        self.needed.update(dict.fromkeys(read))
        return answers.pop()

    def _if_not_empty(self, question: sympy.Basic) -> sympy.Basic | None:
        decided = question.free_symbols & self.size_like
        if not question.free_symbols <= decided | self.backed_var_to_val.keys():
            return None
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
        if answer is None:
            return None
        if question.free_symbols <= self._truths:
            (symbol,) = question.free_symbols
            is_one = bool(question.xreplace({symbol: sympy.S.One}))
            needed = [symbol - 1 if is_one == answer else -symbol]
        else:
            needed = _needed(question if answer else sympy.Not(question))
        if not needed:
            return None
        self.needed.update(dict.fromkeys(needed))
        return sympy.true if answer else sympy.false


def numbers_in(value: Any) -> list[sympy.Expr]:
    """The sizes of tensors, or the numbers that it is, as expressions; of a truth its symbol."""
    found: list[sympy.Expr] = []
    for leaf in tree_leaves(value):
        for part in leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,):
            if isinstance(part, torch.SymBool):
                found += part.node.expr.free_symbols
            elif isinstance(part, (torch.SymInt, torch.SymFloat)):
                found.append(part.node.expr)
    return found


def _is_condition(question: sympy.Basic) -> bool:
    """Whether it asks for a bound on a size, or for a multiple (``assert 512 % n == 0``)."""
    of_multiples = isinstance(question, (sympy.Eq, sympy.Ne)) and question.has(Mod, PythonMod)
    return of_multiples or isinstance(question, _BOUNDS)


def _is_of_whole_numbers(question: sympy.Basic) -> bool:
    return all(symbol.is_integer for symbol in question.free_symbols)


def _needed(condition: sympy.Basic) -> list[sympy.Expr]:
    """What is at least 0 where the condition holds, and only there; [] for other conditions."""
    if isinstance(condition, sympy.Eq):
        return [condition.lhs - condition.rhs, condition.rhs - condition.lhs]
    if isinstance(condition, _BOUNDS):
        strict = isinstance(condition, (sympy.StrictLessThan, sympy.StrictGreaterThan))
        return [condition.gts - condition.lts - int(strict)]
    return []


_BOUNDS = (sympy.LessThan, sympy.StrictLessThan, sympy.GreaterThan, sympy.StrictGreaterThan)

_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parent)
# What lies between a question and who asks it.
_BETWEEN = (f"{_TORCH}/fx/experimental", f"{_TORCH}/__init__.py", __file__)
# At these a question has to have one answer; 0 and 1 are left to the run-time's checks.
PROBES = (2, 3, 4, 5, 7, 8, 16, 31, 32, 64, 100, 127, 128, 1000, 4096)


def _asking() -> FrameType:
    frame = sys._getframe()
    while frame.f_back is not None and _is_between(frame.f_code):
        frame = frame.f_back
    return frame


def _is_between(code: CodeType) -> bool:
    own = code.co_filename.startswith((_TORCH, _OURS))
    return code.co_filename.startswith(_BETWEEN) or (own and code.co_name == "__torch_function__")


def _instead(asking: FrameType) -> str:
    """What does without the answer, by what the code that asks does with it."""
    code = asking.f_code
    if code.co_filename.startswith((_TORCH, _OURS)):
        return _OF_SIZES
    before = [each for each in dis.get_instructions(code) if each.offset <= asking.f_lasti]
    what = before[-1].opname
    if "JUMP" in what or what in ("UNARY_NOT", "TO_BOOL", "CONTAINS_OP"):
        return _OF_BRANCHES
    if "SUBSCR" in what:
        return "torch.stack(items)[number] of a tensor, where a list has Python's numbers only"
    line = before[-1].positions and before[-1].positions.lineno
    names = {each.argval for each in before if each.positions and each.positions.lineno == line}
    if "CALL" in what and "range" in names:
        return (
            "as many rounds as there are at most, each with torch.where(i < n, new, old) of a "
            "tensor n"
        )
    return _OF_SIZES


_OF_BRANCHES = (
    "torch.where(condition, one, other) or a product with a mask, which compute both ways; what "
    "only logs or counts belongs outside the step (a condition one way of which raises may stay)"
)
_OF_SIZES = (
    "a mask over the longest there may be, or torch.gather; or the number given from outside, as a "
    "size of a batch input"
)


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
