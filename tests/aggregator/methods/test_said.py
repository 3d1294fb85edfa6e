"""What methods say of their rounds has a meaning, which is on the page for operators."""

from __future__ import annotations

import ast
from pathlib import Path

from aggregator.methods.mutual import METRICS as OF_STEPS
from aggregator.methods.said import ROUND_METRICS
from tests.aggregator.methods.test_contract import ALL, updates
from tests.vectors.generate_round_metrics import PAGE, page

METHODS = Path(__file__).resolve().parents[3] / "aggregator" / "methods"


def test_the_page_lists_what_rounds_say_now() -> None:
    """Else: PYTHONPATH=. python tests/vectors/generate_round_metrics.py."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text


def _written() -> set[str]:
    """Keys that functions which return figures by name, as ``step`` does, write."""
    found = set()
    for path in METHODS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                says = "[str, float]" in ast.unparse(node.returns)
                found |= set(_keys(node)) if says else set()
    return found


def _keys(function: ast.FunctionDef) -> list[str]:
    nodes = [*ast.walk(function)]
    keys = [key for each in nodes if isinstance(each, ast.Dict) for key in each.keys]
    keys += [
        each.slice
        for each in nodes
        if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store)
    ]
    return [each.value for each in keys if isinstance(each, ast.Constant)]


def test_each_name_that_a_method_says_is_in_the_table_and_no_other() -> None:
    said = set()
    for case in ALL.values():
        method = case.make()
        for number in (1, 2):
            method.open_round(number)
            for update in updates(case, number):
                method.absorb(update)
            said |= set(method.close_round().metrics)
    assert said >= {"loss", "gradient_norm", "bounded_rows", "outliers", "server_loss"}
    assert said | _written() | set(OF_STEPS) == set(ROUND_METRICS)
