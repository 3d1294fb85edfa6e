"""`tessera-export click`: a click model with the distillation loss."""

from __future__ import annotations

import argparse
from typing import Any

from export.cli.options import (
    add_optimizer,
    add_output,
    add_seed,
    chosen_optimizer,
    print_written,
    settings_explained,
)
from export.models.click import CLICK_MODELS, MOVIELENS, export_click
from export.models.fields import Fields

_DESCRIPTION = """\
Export a click model over MovieLens's fields (user, movie, gender, age, occupation, genres, year),
with the distillation loss; without teachers that is plain cross-entropy. For fields of your own
call export.models.click.export_click."""

_EXAMPLES = """\
examples:
  tessera-export click cnn -o artifacts/cnn --attention --optimizer segmented
                                                 the method of attentive federated distillation
  tessera-export click din -o artifacts/din --users 6040 --movies 3706
"""


def add_to(commands: Any) -> None:
    """Add the subcommand."""
    sizes = dict(MOVIELENS.categorical)
    parser = commands.add_parser(
        "click",
        help="export a click model over MovieLens's fields",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("network", choices=CLICK_MODELS)
    add_output(parser)
    parser.add_argument("--attention", action="store_true", help="encode fields by attention first")
    parser.add_argument(
        "--users", type=int, default=sizes["user"], help=f"default: {sizes['user']}"
    )
    parser.add_argument(
        "--movies", type=int, default=sizes["movie"], help=f"default: {sizes['movie']}"
    )
    parser.add_argument("--dim", type=int, default=8, help="of the embeddings (default: 8)")
    add_seed(parser)
    add_optimizer(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    sizes = {**dict(MOVIELENS.categorical), "user": arguments.users, "movie": arguments.movies}
    with settings_explained():
        exported = export_click(
            arguments.output,
            arguments.network,
            fields=Fields(
                tuple(sizes.items()), MOVIELENS.multi_valued, MOVIELENS.numeric, MOVIELENS.history
            ),
            dim=arguments.dim,
            attention=arguments.attention,
            seed=arguments.seed,
            optimizer=chosen_optimizer(arguments),
            verify=not arguments.no_verify,
        )
    print_written(exported)
    return 0
