"""`tessera-export operators`: what can be exported."""

from __future__ import annotations

import argparse
from typing import Any

import export.lowering
import export.wing  # noqa: F401  (as this does)
from export.lowering import registry

DESCRIPTION = """\
List the aten operators that have a lowering. What torch breaks into these (most of its layers and
losses) can be exported, too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""


def listed() -> list[Any]:
    """The operators that a model may call; the exporter's own (of recurrent layers) are not."""
    operators = [each for each in registry.operators() if each.namespace != "tessera"]
    return sorted(operators, key=str)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    operators = listed()
    print(f"{len(operators)} operators with a lowering:")
    print("\n".join(f"  {operator}" for operator in operators))
    return 0
