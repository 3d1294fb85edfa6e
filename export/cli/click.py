"""`tessera-export click`: a click model with the distillation loss."""

from __future__ import annotations

import argparse

from export.cli.options import (
    add_optimizer,
    add_output,
    add_seed,
    chosen_optimizer,
    print_written,
    settings_explained,
)
from export.models.click import CLICK_MODELS, MOVIELENS, export_click
from export.models.fields import SampleFields

DESCRIPTION = """\
Export a click model over MovieLens's fields (user, movie, gender, age, occupation, genres, year),
with the distillation loss; without teachers that is plain cross-entropy. For fields of your own
call export.models.click.export_click."""

EXAMPLES = """\
examples:
  tessera-export click cnn -o artifacts/cnn --attention --optimizer segmented
                                                 the method of attentive federated distillation
  tessera-export click din -o artifacts/din --users 6040 --movies 3706
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    sizes = dict(MOVIELENS.categorical)
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


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    sizes = {**dict(MOVIELENS.categorical), "user": arguments.users, "movie": arguments.movies}
    with settings_explained():
        exported = export_click(
            arguments.out,
            arguments.network,
            fields=SampleFields(
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
