"""A few random train steps; ``make fuzz-export`` tries them for hours."""

from __future__ import annotations

import pytest
import torch

from export.lowering import registry
from tests.fuzz.train_steps.beside import shrunk, tried, tried_by_parts
from tests.fuzz.train_steps.defects import ONCE, OTHERS
from tests.fuzz.train_steps.power import ROOT, planted
from tests.fuzz.train_steps.programs import Held, Program, draw_program


def test_random_steps_are_torchs_or_refused() -> None:
    outcomes = [each for seed in range(5) for _, each in tried_by_parts(draw_program(seed))]
    assert [each for each in outcomes if each.found] == []
    assert sum(each.kind == "right" for each in outcomes) >= 3


def test_a_wrong_lowering_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = torch.ops.aten.cos.default
    monkeypatch.setitem(registry._TABLE, operator, lambda g, out, a: g.op("Sin", a))
    program = Program(
        seed=0,
        held={
            "p0": Held("parameter", "float", (2, 3), {}),
            "x0": Held("batch", "float", (4, 3), {0: "n"}),
        },
        free={"n": 4},
        lines=(("v0", "v0 = p0 * 2.0"), ("v1", "v1 = x0 @ v0.mT"), ("v2", "v2 = v1.cos()")),
        terms=(("v1", "{}.mean()"), ("v2", "{}.sum()")),
    )
    outcome = tried(program)
    assert outcome.kind == "wrong"
    least, _ = shrunk(program, outcome)
    assert least.lines == (("v2", "v2 = p0.cos()"),)


def test_the_defects_that_power_is_measured_by_can_be_planted() -> None:
    """A change of the code that one of them stands in has to change it as well."""
    for defect in (*ONCE, *OTHERS):
        compile(planted(defect, ROOT), defect.file, "exec")
