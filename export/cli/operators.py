"""`tessera-export operators`: what can be exported."""

from __future__ import annotations

import argparse

import export.lowering  # noqa: F401  (fills the registry)
from export.lowering import registry
from export.lowering.decompositions import decompositions

DESCRIPTION = """\
List the aten operators with a lowering of their own, and those that are broken into simpler ones.
A simpler one may still lack a lowering."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    lowered = sorted(str(operator) for operator in registry.operators())
    broken = sorted(str(operator) for operator in decompositions())
    print(f"{len(lowered)} operators with a lowering:")
    print("\n".join(f"  {name}" for name in lowered))
    print(f"\n{len(broken)} operators broken into simpler ones:")
    print("\n".join(f"  {name}" for name in broken))
    return 0
