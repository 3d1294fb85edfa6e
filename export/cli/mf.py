"""`tessera-export mf`: the factorisation artifact."""

from __future__ import annotations

import argparse
from typing import Any

from export.cli.options import add_output, print_written
from export.models.mf import export_mf


def add_to(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "mf",
        help="export matrix factorisation with the BPR loss",
        description="Export matrix factorisation with the BPR loss and SGD. The numbers of users, "
        "items and triples and the latent dimension k all stay free at run time.",
    )
    add_output(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    print_written(export_mf(arguments.output, verify=not arguments.no_verify))
    return 0
