"""`tessera-export mf`: the factorisation artifact."""

from __future__ import annotations

import argparse

from export.cli.options import add_output, print_written
from export.models.mf import mf_recipe

DESCRIPTION = """\
Export matrix factorisation with the BPR loss and SGD. The numbers of users, items and triples and
the latent dimension k all stay free at run time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    print_written(mf_recipe().export(arguments.out, verify=not arguments.no_verify))
    return 0
