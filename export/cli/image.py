"""`tessera-export image`: a small image network, for plain or mutual learning."""

from __future__ import annotations

import argparse

from export.build import Recipe
from export.cli.options import add_output, add_training, write
from export.models.images import IMAGE_MODELS, ImageShape, image_recipe
from export.models.mutual import mutual_recipe

DESCRIPTION = """\
Export a small image network: lenet, or a resnet, vgg or alexnet in small. With --mutual its train
step is that of mutual learning, where devices with different networks teach each other through what
they predict."""

EXAMPLES = """\
examples:
  tessera-export image lenet -o artifacts/lenet               28 x 28 grey images, 10 classes
  tessera-export image resnet -o artifacts/resnet --channels 3 --size 64 --classes 7
  tessera-export image vgg -o artifacts/vgg --mutual          devices teach each other
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("network", choices=IMAGE_MODELS)
    add_output(parser)
    parser.add_argument("--channels", type=int, default=1, help="1 for grey (default), 3 for RGB")
    parser.add_argument("--size", type=int, default=28, help="pixels a side (default: 28)")
    parser.add_argument("--classes", type=int, default=10, help="default: 10")
    parser.add_argument("--mutual", action="store_true", help="the mutual-learning train step")
    add_training(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""

    def recipe() -> Recipe:
        shape = ImageShape(arguments.channels, arguments.size, arguments.classes)
        make = mutual_recipe if arguments.mutual else image_recipe
        return make(arguments.network, shape, seed=arguments.seed)

    return write(arguments, recipe)
