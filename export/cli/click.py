"""`tessera-export click`: a click model with the distillation loss."""

from __future__ import annotations

import argparse
from dataclasses import replace

from export.build import Recipe
from export.cli.options import add_output, add_training, write
from export.models.click import CLICK_MODELS, MOVIELENS, ClickDesign, click_recipe

DESCRIPTION = """\
Export a click model over MovieLens's fields (user, movie, gender, age, occupation, genres, year),
with the distillation loss; without teachers that is plain cross-entropy. For fields of your own
call export.models.click.click_recipe."""

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
    add_training(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    sizes = {**dict(MOVIELENS.categorical), "user": arguments.users, "movie": arguments.movies}

    def recipe() -> Recipe:
        fields = replace(MOVIELENS, categorical=tuple(sizes.items()))
        design = ClickDesign(arguments.network, fields, arguments.dim, arguments.attention)
        return click_recipe(design, seed=arguments.seed)

    return write(arguments, recipe)
