"""`tessera-export operators`: what can be exported."""

from __future__ import annotations

import argparse
from typing import Any

import export.lowering
import export.wing  # noqa: F401  (as this does)
from export.lowering import registry

DESCRIPTION = """\
List the aten operators that can be exported: those that have a lowering, and those that the
exporter breaks into some that have. What torch breaks into these (most of its layers and losses)
can be exported, too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""


def listed() -> list[Any]:
    """The operators that a model may call; the exporter's own (of recurrent layers) are not."""
    operators = registry.operators() | set(registry.decompositions())
    return sorted((each for each in operators if each.namespace != "tessera"), key=str)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    operators = listed()
    print(f"{len(operators)} operators:")
    print("\n".join(f"  {operator}" for operator in operators))
    return 0
