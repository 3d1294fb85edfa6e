"""Sizes that data decide, as of a selection by a mask, where torch itself asks about them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parent)
# What lies between a question and who asks it.
_ASKED_THROUGH = (f"{_TORCH}/fx/experimental", f"{_TORCH}/__init__.py")
_PROBES = (2, 3, 4, 5, 7, 8, 16, 31, 32, 64, 100, 127, 128, 1000, 4096)


class Counts(ShapeEnv):
    """Answers torch's own questions about a count, as those about a named axis: of any length.

    A reduction asks whether it is empty, a product whether an axis is 1. A question of the model's
    own (``if picked.numel() > 0``) stays unanswered, since its two answers are two steps.
    """

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        try:
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            counts = self.size_like | set(self.backed_var_to_val)
            if not orig_expr.free_symbols <= counts or not _torch_asks():
                raise
            answers = {_at(orig_expr, probe) for probe in _PROBES}
            if answers == {sympy.true} or answers == {sympy.false}:
                return answers.pop()
            raise


def _at(question: sympy.Basic, probe: int) -> sympy.Basic:
    free = sorted(question.free_symbols, key=str)
    return question.xreplace({n: sympy.Integer(probe + 13 * i) for i, n in enumerate(free)})


def _torch_asks() -> bool:
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith((*_ASKED_THROUGH, __file__)):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith((_TORCH, _OURS))
