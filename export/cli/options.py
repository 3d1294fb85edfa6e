"""Options and output that the exporting subcommands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from device_sdk.system.command_line import add_out
from export.build import Exported, Recipe
from export.errors import ExportError
from export.optimizers import Adam, AdamW, Clipped, Lion, Optimizer, RMSprop, Segmented, Sgd

# What the commands that export a ready-made model share: their options and their errors.


def add_output(parser: argparse.ArgumentParser) -> None:
    """The options ``-o``/``--out`` and ``--no-verify``."""
    add_out(parser, metavar="DIR", help="folder to write", required=True)
    parser.add_argument("--no-verify", action="store_true", help="skip the comparison with torch")


def write(arguments: argparse.Namespace, recipe: Callable[[], Recipe]) -> int:
    """Export the recipe with the optimizer that the command line names, and print.

    The ValueError of a model or an optimizer that refuses its settings becomes an ExportError,
    which a command prints.
    """
    try:
        exported = recipe().export(
            arguments.out,
            optimizer=chosen_optimizer(arguments),
            with_metrics=arguments.metrics,
            verify=not arguments.no_verify,
        )
    except ValueError as error:
        raise ExportError(str(error)) from error
    print_written(exported)
    return 0


# The --optimizer and --lr options of commands that export a training model.

_OPTIMIZERS: dict[str, tuple[float, Callable[[float], Optimizer]]] = {
    "adam": (1e-3, Adam),
    "adamw": (1e-3, AdamW),
    "lion": (1e-4, Lion),
    "rmsprop": (1e-3, RMSprop),
    "segmented": (5e-3, Segmented),
    "sgd": (0.05, lambda lr: Sgd(lr, momentum=0.9)),
}
"""By name: the default rate, and the optimizer of a rate."""


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add both options, ``--seed`` and ``--metrics``."""
    parser.add_argument(
        "--metrics",
        action="store_true",
        help="declare what devices may be asked to evaluate",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights (default: 0)")
    defaults = ", ".join(f"{name} {rate:g}" for name, (rate, _) in _OPTIMIZERS.items())
    parser.add_argument(
        "--optimizer",
        choices=_OPTIMIZERS,
        default="adam",
        help="adam (default), adamw, lion, rmsprop, sgd with momentum 0.9, or segmented: adaptive "
        "steps that turn into SGD by themselves; others, and groups, from Python",
    )
    parser.add_argument(
        "--lr",
        type=float,
        metavar="RATE",
        help=f"learning rate, which stays an input of the artifact (defaults: {defaults})",
    )
    parser.add_argument(
        "--clip-norm",
        type=float,
        metavar="NORM",
        help="scale the gradients of all parameters down to this norm (default: not)",
    )


def chosen_optimizer(arguments: argparse.Namespace) -> Optimizer:
    """The optimizer that the command line names; ValueError for a bad rate or norm."""
    rate, make = _OPTIMIZERS[arguments.optimizer]
    optimizer = make(rate if arguments.lr is None else arguments.lr)
    norm: float | None = arguments.clip_norm
    return optimizer if norm is None else Clipped(optimizer, norm=norm)


# What a command prints about the artifact that it wrote.


def print_written(exported: Exported, how: str = "") -> None:
    """Folder, id and ``how``, and the worst of the comparisons with torch."""
    print(f"wrote {exported.directory} (artifact {exported.id[:16]}){how}")
    if exported.report is not None:
        worst = exported.report.worst
        print(
            f"verified beside torch: worst of {len(exported.report.comparisons)} comparisons is "
            f"{worst.tensor}, off by {worst.error:.1e} (allowed {worst.allowed:.1e}; float32 torch "
            f"itself: {worst.torch_error:.1e})"
        )
