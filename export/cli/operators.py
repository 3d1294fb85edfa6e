"""`tessera-export operators`: what can be exported."""

from __future__ import annotations

import argparse
from typing import Any

import export.lowering  # noqa: F401  (fills the registry)
from export.lowering import registry


def add_to(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "operators",
        help="list the torch operators that can be exported",
        description="List the aten operators with a lowering of their own, and those that are "
        "broken into simpler ones. A simpler one may still lack a lowering.",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    lowered = registry.operators()
    broken = sorted(str(operator) for operator in registry.decompositions())
    print(f"{len(lowered)} operators with a lowering:")
    print("\n".join(f"  {name}" for name in lowered))
    print(f"\n{len(broken)} operators broken into simpler ones:")
    print("\n".join(f"  {name}" for name in broken))
    return 0
