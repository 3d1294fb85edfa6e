"""The --optimizer and --lr options of commands that export a training model."""

from __future__ import annotations

import argparse

from export.optimizers import Adam, Optimizer, Segmented, Sgd

_RATES = {"adam": 1e-3, "sgd": 0.05, "segmented": 5e-3}


def add_optimizer(parser: argparse.ArgumentParser) -> None:
    """Add both options."""
    defaults = ", ".join(f"{name} {rate:g}" for name, rate in _RATES.items())
    parser.add_argument(
        "--optimizer",
        choices=sorted(_RATES),
        default="adam",
        help="adam (default), sgd with momentum 0.9, or segmented: adaptive steps that turn into "
        "SGD by themselves",
    )
    parser.add_argument(
        "--lr",
        type=float,
        metavar="RATE",
        help=f"learning rate, which stays an input of the artifact (defaults: {defaults})",
    )


def chosen_optimizer(arguments: argparse.Namespace) -> Optimizer:
    """The optimizer that the command line names; ValueError for a bad rate."""
    lr = _RATES[arguments.optimizer] if arguments.lr is None else arguments.lr
    if arguments.optimizer == "adam":
        return Adam(lr=lr)
    if arguments.optimizer == "sgd":
        return Sgd(lr=lr, momentum=0.9)
    return Segmented(lr=lr)
