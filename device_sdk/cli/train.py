"""`tessera-device train`: matrix factorisation on this device's own interactions."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from device_sdk.capability import Request, WorkSizes, bench_stepped
from device_sdk.cli.arguments import CommandError, ProgressLine, add_providers, read_file
from device_sdk.errors import NonFiniteStep
from device_sdk.factorisation import LocalFactorisation, LocalSettings, packaged_artifact
from device_sdk.interactions import Interactions, InteractionsError
from device_sdk.system.command_line import (
    add_out,
    natural,
    not_negative_float,
    positive_float,
    positive_int,
)
from device_sdk.system.files import replaceable
from device_sdk.system.printable import printable, text_table
from device_sdk.tables.options import add_reading

_DEFAULT_K = 16
_LINES = 10

DESCRIPTION = """\
Learns user and item vectors from a file of interactions, on this machine alone, and recommends what
a user has not seen yet. The file is a table with an interaction a row, your own or as MovieLens,
Amazon, Last.fm and their like are published; what was understood of it is printed."""

EXAMPLES = """\
examples:
  tessera-device train --interactions views.csv --recommend 10 --user anna
  tessera-device train --interactions views.csv --k 32 --epochs 50 --out views.checkpoint
  tessera-device train --interactions views.csv --deadline 0.2
                          the largest k whose epochs take at most 0.2 s on this machine

Ctrl-C stops early; with --out, what was learnt up to then is saved.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--interactions",
        type=Path,
        required=True,
        metavar="FILE",
        help="a table of interactions, one a row: user, item, ...",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--k", type=positive_int, help=f"latent dimension (default: {_DEFAULT_K})")
    size.add_argument(
        "--deadline",
        type=positive_float,
        metavar="SECONDS",
        help="measure this machine and take the largest k whose epoch fits",
    )
    parser.add_argument("--epochs", type=positive_int, default=30, help="default: 30")
    parser.add_argument("--lr", type=positive_float, default=0.05, help="default: 0.05")
    parser.add_argument(
        "--l2",
        type=not_negative_float,
        default=0.01,
        help="weight of the L2 penalty (default: 0.01)",
    )
    parser.add_argument(
        "--batch", type=positive_int, default=512, metavar="TRIPLES", help="default: 512"
    )
    add_out(parser, metavar="CHECKPOINT", help="save the trained state here")
    parser.add_argument(
        "--recommend", type=natural, default=10, metavar="N", help="items to show (default: 10)"
    )
    parser.add_argument("--user", help="whom to recommend to (default: the file's first user)")
    parser.add_argument("--seed", type=natural, default=0, help="default: 0")
    parser.add_argument(
        "--artifact",
        type=Path,
        metavar="DIR",
        help="factorisation artifact (default: the built-in)",
    )
    parser.add_argument("--threads", type=positive_int, default=1, help="default: 1")
    add_providers(parser)
    add_reading(parser, "--interactions")


def run(arguments: argparse.Namespace) -> int:
    """Read, train, save, recommend."""
    interactions = read_file(arguments, "--interactions")
    user = 0 if arguments.user is None else _user_row(interactions, arguments.user)
    if arguments.out is not None:
        _require_writable(arguments.out)
    artifact = packaged_artifact() if arguments.artifact is None else arguments.artifact
    model = LocalFactorisation(
        artifact,
        interactions,
        LocalSettings(
            _latent_dimension(arguments, artifact, interactions),
            lr=arguments.lr,
            l2=arguments.l2,
            batch=arguments.batch,
        ),
        rng=np.random.default_rng(arguments.seed),
        providers=arguments.providers,
        threads=arguments.threads,
    )
    finished = _train(model, arguments.epochs, arguments.lr)
    if arguments.out is not None:
        try:
            model.trainer.save(arguments.out)
        except OSError as error:
            raise CommandError(f"{arguments.out} cannot be written: {error}") from None
        print(f"saved to {arguments.out} (rows in the order of first appearance in the file)")
    if not finished:
        return 130
    if arguments.recommend:
        _print_recommendations(model, interactions, user, arguments.recommend)
    return 0


def _require_writable(path: Path) -> None:
    """Before the training. Raises CommandError."""
    try:
        folder = replaceable(path).parent
    except OSError as error:
        raise CommandError(f"--out: {path} cannot be written: {error.strerror}") from None
    if not folder.is_dir():
        raise CommandError(f"--out: the folder {folder} does not exist")


def _user_row(interactions: Interactions, user_id: str) -> int:
    try:
        return interactions.user_row(user_id)
    except InteractionsError as error:
        raise CommandError(f"--user: {error}") from None


def _latent_dimension(
    arguments: argparse.Namespace, artifact: Path, interactions: Interactions
) -> int:
    if arguments.deadline is None:
        return _DEFAULT_K if arguments.k is None else int(arguments.k)
    line = ProgressLine(sys.stderr)
    line.show("measuring this machine ...")
    try:
        choice = bench_stepped(
            artifact,
            Request(arguments.deadline),
            WorkSizes(
                len(interactions.item_ids),
                len(interactions),
                len(interactions.user_ids),
                arguments.batch,
            ),
            64,
            threads=arguments.threads,
            providers=arguments.providers,
        ).choice
    finally:
        line.clear()
    assert choice is not None and choice.option is not None
    print(choice.reason)
    return int(choice.option)


def _train(model: LocalFactorisation, epochs: int, lr: float) -> bool:
    """Print the loss as it falls; False where the user stopped it."""
    line = ProgressLine(sys.stderr)
    start = time.perf_counter()
    done = 0
    try:
        for done, loss in enumerate(model.epochs(epochs), 1):
            line.show(f"epoch {done} of {epochs}, loss {loss:.4f}")
            # The first epoch, then one for each tenth of them.
            if done == 1 or done * _LINES // epochs > (done - 1) * _LINES // epochs:
                line.clear()
                took = time.perf_counter() - start
                print(f"epoch {done:>4} of {epochs}   loss {loss:.4f}   {took:.1f} s", flush=True)
    except NonFiniteStep as error:
        raise CommandError(f"{error} (--lr is {lr:g})") from None
    except KeyboardInterrupt:
        line.clear()
        print(f"stopped in epoch {done + 1} of {epochs}")
        return False
    finally:
        line.clear()
    return True


def _print_recommendations(
    model: LocalFactorisation, interactions: Interactions, user: int, count: int
) -> None:
    best = model.recommend(user, count)
    name = printable(interactions.user_ids[user])
    if not best:
        print(f"\nuser {name} has seen every item")
        return
    rows = [
        (str(place), printable(interactions.item_ids[item]), f"{score:.3f}")
        for place, (item, score) in enumerate(best, 1)
    ]
    table = text_table(rows, ("", "item", "score"), "rlr")
    print(f"\nfor user {name}:\n\n{table}")
