"""Sizes while a step is recorded: what is assumed of them, and must hold in every step."""

from __future__ import annotations

import dis
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanFunction
from torch import Tensor, fx

from export.errors import ExportError
from export.insides import (
    GuardOnDataDependentSymNode,
    Min,
    Mod,
    PythonMod,
    ShapeEnv,
    maybe_get_fake_mode,
    uninteresting_files,
)
from export.origins import Origins
from export.symbols import renamed

MOST_WAYS = 16
"""In how many ways a step may be recorded."""
MOST_ROUNDS = (15, 7, 3)
"""Rounds of loops that data count: as many of these as there are ways for."""


@dataclass(frozen=True)
class Question:
    """A condition on data that the author's code branches on, and the answer recorded."""

    condition: sympy.Basic
    answer: bool
    line: str


@dataclass
class Selections:
    """Whether selections are taken not to be empty; what the author's code asks of data.

    ``asked``: whether a selection is empty; ``counted``: whether a loop has another round.
    """

    never_empty: bool = False
    asked: bool = False
    counted: bool = False


class Sizes(ShapeEnv):
    """Sizes of axes, and those that data decide: how many true places a mask has.

    torch's own questions about such a number (a reduction asks whether it is empty, a product
    whether an axis is 1) are answered as those about a named axis: as of any length.

    Where code raises by a bound on a size, the size is taken to be within it; where torch asks
    whether a number that data decide is 0, it is taken not to be, and so where the author's code
    does and ``selections`` are never empty. ``needed`` notes what has to be at least 0 for that: a
    step in which it is not has to be refused.

    Where the author's code branches on data otherwise, ``answers`` are given, in order, and then
    yes; ``questions`` has them all. Two recordings of one step have the same symbols up to the
    question that they answer differently, and none in common from there on.

    torch takes every named axis to be of 2 and more. What the model's own code asks of it is noted,
    for at 1 the answer may be another.
    """

    def __init__(
        self,
        origins: Origins,
        answers: Sequence[bool] = (),
        selections: Selections | None = None,
    ) -> None:
        super().__init__()
        self.questions: list[Question] = []
        self._given = answers
        self._selections = selections or Selections()
        self.needed: dict[sympy.Expr, None] = {}
        self._origins = origins
        self._answers: dict[tuple[CodeType, int], bool | None] = {}
        self._asked: dict[sympy.Basic, str] = {}
        self._fixed_at: dict[sympy.Symbol, str] = {}
        self._truths: set[sympy.Symbol] = set()
        self.held: dict[int, Tensor] = {}
        """The values of the recording's inputs that a step leaves as they are, by their places."""
        self.most_rounds = 0
        """So many rounds of a loop that data count are recorded; a step of more is refused."""
        self.cut = ""
        """The line of a loop that has no further round for that reason."""
        self._in_rounds = False
        self.instead = ""
        """What to use where the last question could not be answered."""

    def create_unbacked_symbool(self) -> torch.SymBool:
        """A truth value that data decide: whether a symbol, 0 or 1, is 1."""
        made = super().create_unbacked_symbool()
        self._truths |= made.node.expr.free_symbols
        return made

    def again(self, node: fx.Node, result: Any) -> None:
        """What data decide has new symbols in a second recording: those of this result."""
        given = renamed(node.meta.get("val"), result)
        if given:
            self.needed = {size.xreplace(given): None for size in self.needed}
            self.questions = [
                replace(each, condition=each.condition.xreplace(given)) for each in self.questions
            ]

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        """As torch's, save where the code raises, and for all selections but an empty one."""
        if self._in_rounds and isinstance(orig_expr, _BOUNDS) and self._is_open(orig_expr):
            within = self._within_round(orig_expr)
            if within is not None:
                return within
        answer = self._answer(orig_expr, *args, **kwargs)
        named = orig_expr.free_symbols
        if named and named <= self.backed_var_to_val.keys() and self._users_ask():
            holds = orig_expr if answer == sympy.true else sympy.Not(orig_expr)
            if answer not in (sympy.true, sympy.false):
                holds = sympy.Eq(orig_expr, answer)
            self._asked.setdefault(holds, self._origins.here().line)
            if isinstance(holds, sympy.Ne) and len(named) > 1:
                # Recorded as unequal; a step where two sizes happen to be equal is refused.
                apart = holds.lhs - holds.rhs
                self.needed[sympy.Max(apart, -apart) - 1] = None
        return answer

    def _within_round(self, bound: sympy.Rel) -> sympy.Basic | None:
        """The answer, of a free size, in a round that there is: a place in a batch as long as that.

        A step in which it is another one is refused in this way alone.
        """
        sizes = {symbol: self.backed_var_to_val.get(symbol) for symbol in bound.free_symbols}
        if None in sizes.values():
            return None
        answer = bound.xreplace(sizes)
        self.needed.update(dict.fromkeys(_needed(bound if answer else sympy.Not(bound))))
        return answer

    def _users_ask(self) -> bool:
        """Whether a question is the user's own, or about where a slice begins and ends.

        Not that of an operator that is called.
        """
        frame, code = sys._getframe(), _asking().f_code
        by_python = False  # as SymBool.__bool__ is
        while frame.f_back is not None and frame.f_code is not code:
            by_python = by_python or frame.f_code.co_filename == torch.__file__
            frame = frame.f_back
        return code.co_name == _OF_SLICES or (by_python and self._origins.is_users(code))

    def _answer(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        if _is_condition(orig_expr) and self._is_open(orig_expr):
            allowed = self._answer_without_raise(orig_expr)
            if allowed is not None:
                return allowed
        try:
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            self.instead = _instead(_asking())
            whole = _is_of_whole_numbers(orig_expr)
            answer = self._answer_without_raise(orig_expr) if whole else None
            if answer is None and _asking().f_code.co_filename.startswith((_TORCH, _OURS)):
                answer = self._whatever_the_size(orig_expr) if whole else None
            elif answer is None:
                branches = self.instead is _OF_BRANCHES and _is_of_truth(orig_expr)
                answer = self._if_not_empty(orig_expr, branches) if whole else None
                if answer is None and branches:
                    answer = self._of_this_way(orig_expr)
            if answer not in (sympy.true, sympy.false):
                raise
            return answer

    def _of_this_way(self, condition: sympy.Basic) -> sympy.Basic:
        """The answer that this recording goes by; others of the step have the other."""
        for asked in self.questions:
            if condition in (asked.condition, sympy.Not(asked.condition)):
                return sympy.sympify(asked.answer == (condition == asked.condition))
        number = len(self.questions)
        if number >= MOST_WAYS - 1:
            raise too_many_ways()
        answer = self._given[number] if number < len(self._given) else True
        self.questions.append(Question(condition, answer, self._origins.here().line))
        if not answer:  # from here on this recording's symbols are none of any other's
            self.unbacked_symint_counter += _SYMBOLS_OF_A_WAY << number
            self.unbacked_symfloat_counter += _SYMBOLS_OF_A_WAY << number
        return sympy.sympify(answer)

    def has_round(self, done: int, left: torch.SymInt | int) -> bool:
        """Whether a loop of a number of rounds that data decide goes on, with so many left."""
        if isinstance(left, int):
            return left > 0
        expr = left.node.expr
        self._selections.counted = True
        if done == self.most_rounds:
            self.needed[-expr] = None
            self.cut = self._origins.here().line
            return False
        more = bool(self._of_this_way(sympy.StrictGreaterThan(expr, 0)))
        self._in_rounds = self._in_rounds or more
        return more

    def _whatever_the_size(self, question: sympy.Basic) -> sympy.Basic | None:
        """The one answer to a question of torch's own; a number that was read is at least 0."""
        read = sorted(
            question.free_symbols - self.size_like - self.backed_var_to_val.keys(), key=str
        )
        ends = product((sympy.S.Zero, sympy.S.One), repeat=len(read))
        few = [dict(zip(read, each, strict=True)) for each in ends]
        answers = {_at(question.xreplace(known), probe) for known in (*few, {}) for probe in PROBES}
        if len(answers) > 1:
            return None
        self.needed.update(dict.fromkeys(read))
        return answers.pop()

    def _if_not_empty(self, question: sympy.Basic, branches: bool) -> sympy.Basic | None:
        decided = question.free_symbols & self.size_like
        if not question.free_symbols <= decided | self.backed_var_to_val.keys():
            return None
        ones = {size: 1 + sympy.Dummy(integer=True, nonnegative=True) for size in decided}
        answer = sympy.simplify(question.xreplace(ones))
        if answer not in (sympy.true, sympy.false):
            return None
        self._selections.asked = True
        if branches and not self._selections.never_empty:
            return None
        self.needed.update(dict.fromkeys(size - 1 for size in sorted(decided, key=str)))
        return answer

    def _is_open(self, bound: sympy.Rel) -> bool:
        return bool(bound.free_symbols) and self._maybe_evaluate_static(bound) is None

    def _answer_without_raise(self, question: sympy.Basic) -> sympy.Basic | None:
        """The answer for which the code that asks does not raise; None where it never does, or
        where the author's code may catch it and go on."""
        frame = _asking()
        if any(map(_tries, self._origins.users(frame))):
            return None
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

    def _get_sloc(self, framework_loc: str | None = None) -> Any:
        """Where something is assumed: in torch, and in the user's code."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (
            frame.f_code.co_filename in uninteresting_files()
            or Path(frame.f_code.co_filename).parent == Path(__file__).parent
        ):
            frame = frame.f_back
        place: Any = framework_loc
        if place is None and frame is not None:
            code = frame.f_code
            place = traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name)
        line = self._origins.here().line or None
        return replace(super()._get_sloc(""), framework_loc=place, maybe_user_loc=line)

    def _set_replacement(self, a: sympy.Symbol, tgt: sympy.Expr, msg: str) -> None:
        self._fixed_at.setdefault(a, self._origins.here().line)
        super()._set_replacement(a, tgt, msg)

    def least_sizes(self, symbols: Mapping[sympy.Symbol, str]) -> dict[str, int]:
        """The least sizes of axes that need one above 1; ``symbols``: the axes' names.

        Raises ExportError where tracing or lowering assumed something else of an axis's size.
        """
        self._refuse_fixed(symbols)
        least: dict[str, int] = {}
        for condition, line, sizes in self._assumed():
            if sizes is None or not symbols.keys() >= sizes.keys():
                named = str(condition)
                for symbol in sorted(condition.free_symbols, key=str):
                    named = named.replace(str(symbol), symbols.get(symbol, str(symbol)))
                raise ExportError(
                    f"the traced step holds only where {named}",
                    line=line,
                    instead="code that does not branch on the size of a dynamic axis",
                )
            for symbol, size in sizes.items():
                least[symbols[symbol]] = max(size, least.get(symbols[symbol], 1))
        return {axis: size for axis, size in least.items() if size > 1}

    def _assumed(self) -> Iterator[tuple[sympy.Basic, str, dict[sympy.Symbol, int] | None]]:
        """What does not hold at every size, who assumed it, and the least sizes that make it hold.

        None where no size may be refused for it.
        """
        for guard in self.guards:
            if not (_says_not_one(guard.expr) or _is_of_strides(guard) or _holds(guard.expr)):
                sizes = _least(guard.expr) if _has_least(guard) else None
                yield guard.expr, guard.sloc.maybe_user_loc or "", sizes
        for condition, line in self._asked.items():
            if _says_not_one(condition) or _holds(condition):
                sizes = _least(condition)
                # Which of two sizes is the larger one is not asked here.
                if sizes is not None or len(condition.free_symbols) == 1:
                    yield condition, line, sizes

    def _refuse_fixed(self, symbols: Mapping[sympy.Symbol, str]) -> None:
        for symbol, value in self.replacements.items():
            line = self._fixed_at.get(symbol, "")
            if symbol in symbols and value not in symbols:
                raise ExportError(
                    f"axis {symbols[symbol]!r} is named as dynamic, but the model or loss fixes "
                    "its size",
                    line=line,
                    instead="sizes taken from tensors (x.shape[0]) instead of numbers, gather for "
                    "take_along_dim, or no such axis",
                )
            if symbol in symbols and value in symbols and symbols[symbol] != symbols[value]:
                raise ExportError(
                    f"axes {symbols[symbol]!r} and {symbols[value]!r} are forced to be equal",
                    line=line,
                    instead="one name for both",
                )


# More than any recording makes.
_SYMBOLS_OF_A_WAY = 1_000_000


class TooManyWays(ExportError):
    """A step branches on data in more ways than can be recorded."""


def too_many_ways() -> ExportError:
    """What is raised where a step would be recorded in more ways than ``MOST_WAYS``."""
    return TooManyWays(
        f"the step branches on data in more than {MOST_WAYS} ways in all, or in a loop whose "
        "rounds data count",
        instead=_OF_BRANCHES,
    )


def questions_of(tensor: Tensor) -> Sequence[Question]:
    """What was asked so far in the recording that a tensor is part of; () outside of any."""
    mode: Any = maybe_get_fake_mode(tensor)
    sizes = getattr(mode, "shape_env", None)
    return sizes.questions if isinstance(sizes, Sizes) else ()


def _is_condition(question: sympy.Basic) -> bool:
    """Whether it asks for a bound on a size, or for a multiple (``assert 512 % n == 0``)."""
    of_multiples = isinstance(question, (sympy.Eq, sympy.Ne)) and question.has(Mod, PythonMod)
    return of_multiples or isinstance(question, _BOUNDS)


def _is_of_truth(question: sympy.Basic) -> bool:
    """Whether it is a condition, and not which number something is."""
    return isinstance(question, (Relational, BooleanFunction))


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
_BETWEEN = (
    f"{_TORCH}/fx/experimental",
    f"{_TORCH}/__init__.py",
    __file__,
    f"{_OURS}/rewrites/numbers.py",
    f"{_OURS}/rewrites/patch.py",
)
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
    line = before[-1].positions and before[-1].positions.lineno
    names = {each.argval for each in before if each.positions and each.positions.lineno == line}
    of_truth = "JUMP" in what or what in ("UNARY_NOT", "TO_BOOL", "CONTAINS_OP")
    of_truth = of_truth or before[-1].argrepr.startswith("bool(")  # a comparison since Python 3.13
    if of_truth or ("CALL" in what and not _BY_TRUTH.isdisjoint(names)):
        return _OF_BRANCHES
    if "SUBSCR" in what:
        return "torch.stack(items)[number] of a tensor, where a list has Python's numbers only"
    if "CALL" in what and "range" in names:
        return (
            "as many rounds as there are at most, each with torch.where(i < n, new, old) of a "
            "tensor n"
        )
    return _OF_SIZES


# What asks the truth of what it is given.
_BY_TRUTH = {"bool", "any", "all", "max", "min", "sorted"}
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
    return _with(question, {symbol: probe + 13 * i for i, symbol in enumerate(free)})


def _with(question: sympy.Basic, sizes: Mapping[sympy.Symbol, int]) -> sympy.Basic:
    try:
        return question.xreplace({symbol: sympy.Integer(n) for symbol, n in sizes.items()})
    except ZeroDivisionError:  # whether it is a multiple of a size that is 0
        return sympy.false


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


def _tries(frame: FrameType) -> bool:
    """Whether what a frame runs stands between ``try`` and what handles its exceptions."""
    code: Any = dis.Bytecode(frame.f_code)  # typeshed knows no exception_entries
    at = frame.f_lasti
    named = [(each.offset, each.opname) for each in code if each.opname != "CACHE"]
    while True:
        handler = next((e.target for e in code.exception_entries if e.start <= at < e.end), None)
        if handler is None:
            return False
        first, second = [name for offset, name in named if offset >= handler][:2]
        # What only ends a ``with``, another handler or a comprehension raises it again.
        if first == "PUSH_EXC_INFO" and second != "WITH_EXCEPT_START":
            return True
        at = handler


def _raises(code: Sequence[dis.Instruction]) -> bool:
    """Whether code from here on raises, by one way and before it does anything else."""
    for each in code:
        if each.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in each.opname or each.opname.startswith(("RETURN", "STORE", "FOR_ITER", "SEND")):
            return False
    return False


def _says_not_one(guard: sympy.Basic) -> bool:
    """Whether an assumption only says that a size is neither 0 nor 1.

    Whether a size broadcasts, or is empty, is left to the run-time's checks.
    """
    least = {sympy.Ne: 1, sympy.StrictGreaterThan: 1, sympy.GreaterThan: 2}
    if isinstance(guard, sympy.Rel) and guard.lhs.is_Integer:
        guard = guard.reversed
    if type(guard) not in least or not guard.rhs.is_Integer:
        return False
    # Of a stride, 60 (n - 1) > 60 says it of n - 1.
    times = sympy.gcd(guard.lhs.as_content_primitive()[0], guard.rhs) or 1
    return bool(0 <= guard.rhs / times <= least[type(guard)])


# torch's own questions about strides: the order in memory, which no graph has.
_ASKING_OF_STRIDES = {
    "_prims_common": {
        "check_contiguous_sizes_strides",
        "is_channels_last_contiguous_2d",
        "is_channels_last_contiguous_3d",
        "should_swap",
        "ge",
        "__lt__",
    },
    "fake_impls": {"convert"},
    "_meta_registrations": {"meta_copy_"},
}


def _place(guard: Any) -> traceback.FrameSummary | None:
    """The place in torch that an assumption was made at."""
    place = guard.sloc.framework_loc
    return place if isinstance(place, traceback.FrameSummary) else None


def _is_of_strides(guard: Any) -> bool:
    place = _place(guard)
    if place is None:
        return False
    if isinstance(guard.expr, sympy.Ne) and place.name == "__torch_function__":
        # Asked inside an operator, which has no use for two sizes that differ.
        return bool(guard.expr.lhs.free_symbols and guard.expr.rhs.free_symbols)
    return any(
        place.name in names
        for module, names in _ASKING_OF_STRIDES.items()
        if module in place.filename
    )


_OF_SLICES = "_compute_slice_index"


def _has_least(guard: Any) -> bool:
    """Whether sizes may be refused for it, from the least one on that it holds for.

    Where torch raises (a pooling whose result would be empty), and where a slice has to be as long
    as was asked for, or is written to.
    """
    place = _place(guard)
    return guard.expr.has(Min) or (
        place is not None
        and Path(place.filename).is_relative_to(_TORCH)
        and ("check" in place.name or "_check" in (place.line or "") or place.name == _OF_SLICES)
    )


# The largest least size that an axis may have, and a size beyond all of them.
_MOST, _BEYOND = 64, 4099


def _holds(condition: sympy.Basic) -> bool:
    """Whether a condition is true at all of ``PROBES``."""
    return all(_at(condition, probe) != sympy.false for probe in PROBES)


def _least(condition: sympy.Basic) -> dict[sympy.Symbol, int] | None:
    """The sizes from which on a condition holds, whatever the others; None where there are none."""
    free = sorted(condition.free_symbols, key=str)

    def fails(sizes: Mapping[sympy.Symbol, int]) -> bool:
        return bool(_with(condition, {**beyond, **least, **sizes}) == sympy.false)

    beyond = {symbol: _BEYOND + 13 * index for index, symbol in enumerate(free)}
    least: dict[sympy.Symbol, int] = {}
    for symbol in free:
        wrong = [size for size in range(1, _MOST + 1) if fails({symbol: size})]
        least[symbol] = max(wrong, default=0) + 1
    tried = [{**beyond, symbol: size} for symbol, size in least.items()]
    tried += [{symbol: max(probe, least[symbol]) for symbol in free} for probe in PROBES]
    return None if any(map(fails, [*tried, least])) else least
