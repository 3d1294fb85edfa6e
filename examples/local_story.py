"""From a torch model to recommendations on this machine alone, in about a minute.

Run it with `make demo ARGS=--local`, or `python -m examples.local_story --help`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Official onnxruntime wheels write to the user's cache folder unless this is set before the import.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from device_sdk.artifact.errors import ArtifactError
from device_sdk.capability import Request, TimedOption, WorkSizes, bench_stepped
from device_sdk.capability.report import BenchResult
from device_sdk.errors import DeviceError
from device_sdk.factorisation import ITEMS, USERS, LocalFactorisation, LocalSettings
from device_sdk.system.command_line import (
    natural,
    positive_float,
    positive_int,
    print_any_text,
)
from examples.datasets.movielens import (
    Ratings,
    Split,
    data_root,
    leave_one_out,
    ml_100k_or_synthetic,
)
from examples.download_bar import download_with_bar
from examples.ranking import hit_rate, popularity_hit_rate

_BATCH = 512
_SLOWDOWN = 8.0
_SHOWN = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 on success, 1 where a step failed, 2 for a wrong command line."""
    print_any_text()
    arguments = _parser().parse_args(argv)
    console = Console()
    try:
        _run(arguments, console)
    except (ArtifactError, DeviceError, OSError) as error:
        console.print(f"local story: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("\nstopped")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="examples.local_story",
        description="Exports a factorisation model from torch, measures how large a model this "
        "machine trains in time, trains it here on MovieLens 100K and recommends films by title.",
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder that holds ml-100k (default: TESSERA_DATA, else ../shared/data)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="what is made goes here (%(default)s)"
    )
    parser.add_argument(
        "--deadline",
        type=positive_float,
        default=1.5,
        metavar="SECONDS",
        help="what one epoch may take on this machine (%(default)s)",
    )
    parser.add_argument("--epochs", type=positive_int, default=40, help="(%(default)s)")
    parser.add_argument("--users", type=positive_int, default=2, help="users to show (%(default)s)")
    parser.add_argument("--seed", type=natural, default=0, help="(%(default)s)")
    return parser


def _run(arguments: argparse.Namespace, console: Console) -> None:
    rng = np.random.default_rng(arguments.seed)
    artifact = _export(arguments.out / "artifact", console)
    ratings = _data(arguments, console, rng)
    split = leave_one_out(ratings)
    k = _bench(artifact, split, arguments.deadline, console)
    model = _train(artifact, split, k, arguments.epochs, console, rng)
    _evaluate(model, split, console)
    for user in rng.choice(
        len(ratings.user_ids), min(arguments.users, len(ratings.user_ids)), False
    ):
        _show_user(model, split, ratings, int(user), console)
    checkpoint = arguments.out / "trained.checkpoint"
    model.trainer.save(checkpoint)
    console.print(f"\nThe trained vectors are in {checkpoint}, the artifact in {artifact}.")


def _export(folder: Path, console: Console) -> Path:
    console.rule("1  From torch to a graph that trains", align="left")
    with console.status("importing torch, exporting and comparing with torch ..."):
        from export.models.mf import mf_recipe  # torch takes seconds to import

        exported = mf_recipe().export(folder)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    console.print(
        "Matrix factorisation with the BPR loss, its gradient and its optimizer are one ONNX graph "
        f"now: {size / 1024:.0f} KiB in {folder}, id {exported.manifest.id[:12]}.\n"
        "The same numbers as torch's, checked; the device needs no torch.\n",
        highlight=False,
    )
    return folder


def _data(arguments: argparse.Namespace, console: Console, rng: np.random.Generator) -> Ratings:
    root = data_root() if arguments.data is None else arguments.data

    ratings, origin = ml_100k_or_synthetic(
        root,
        arguments.out / "data",
        download=lambda folder: download_with_bar(folder, console),
        rng=rng,
    )
    console.rule("2  Data that stay here", align="left")
    if ratings.synthetic:
        console.print(
            Panel(
                f"{origin}\n\nEverything below is trained on SYNTHETIC DATA, drawn at random. It "
                "shows that the parts work together, and says nothing about recommending films.",
                title="SYNTHETIC DATA",
                style="bold yellow",
            )
        )
    console.print(
        f"{ratings.name}: {len(ratings.user):,} interactions, {len(ratings.user_ids):,} users, "
        f"{len(ratings.item_ids):,} items, {origin if not ratings.synthetic else 'drawn'}.\n"
        "Each user's latest interaction is held out for the test.\n",
        highlight=False,
        markup=False,
    )
    return ratings


def _bench(artifact: Path, split: Split, deadline_seconds: float, console: Console) -> int:
    """The latent dimension that this machine affords."""
    console.rule("3  How large a model trains in time?", align="left")
    table = Table("device", "k", "median epoch", "p90 epoch", "runs")
    here = _measure(artifact, split, deadline_seconds, 1.0, console)
    slow = _measure(artifact, split, deadline_seconds, _SLOWDOWN, console)
    for label, result in (("this one", here), (f"{_SLOWDOWN:g} times slower, emulated", slow)):
        choice = result.choice
        assert choice is not None
        seen = next(row for row in result.rows if row.option == choice.option)
        table.add_row(
            label,
            f"{choice.option}" if choice.fits else f"{choice.option} (misses)",
            _milliseconds(seen.p50_seconds),
            _milliseconds(seen.p90_seconds),
            str(seen.runs),
        )
    machine, choice = here.machine, here.choice
    console.print(
        f"{machine.cpu_model}, {machine.cores:g} cores, {machine.threads} thread(s), "
        f"{machine.provider}; an epoch may take {deadline_seconds:g} s",
        highlight=False,
        markup=False,
    )
    console.print(table)
    assert choice is not None and choice.option is not None
    console.print(choice.reason + "\n", highlight=False, markup=False)
    return int(choice.option)


def _measure(
    artifact: Path, split: Split, deadline_seconds: float, slowdown: float, console: Console
) -> BenchResult:
    train = split.train
    with console.status("measuring ...") as status:

        def progress(seen: TimedOption) -> None:
            slower = "" if slowdown == 1.0 else f" ({slowdown:g} times slower, emulated)"
            status.update(f"measuring{slower}: {seen.name}, {len(seen.seconds)} runs")

        return bench_stepped(
            artifact,
            Request(deadline_seconds, slowdown=slowdown),
            WorkSizes(len(train.item_ids), len(train), len(train.user_ids), _BATCH),
            64,
            progress=progress,
        )


def _train(
    artifact: Path,
    split: Split,
    k: int,
    epochs: int,
    console: Console,
    rng: np.random.Generator,
) -> LocalFactorisation:
    console.rule(f"4  Training with k = {k}", align="left")
    model = LocalFactorisation(
        artifact, split.train, LocalSettings(k, batch=_BATCH), rng=rng, providers="auto"
    )
    losses: list[float] = []
    with Progress(
        SpinnerColumn(),
        TextColumn("epoch"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("", total=epochs, loss="-")
        for loss in model.epochs(epochs):
            losses.append(loss)
            bar.update(task, advance=1, loss=f"{loss:.4f}")
    console.print(f"loss {losses[0]:.4f} after the first epoch, {losses[-1]:.4f} after the last")
    return model


def _evaluate(model: LocalFactorisation, split: Split, console: Console) -> None:
    parameters = model.trainer.parameters
    ours = hit_rate(split, parameters[USERS], parameters[ITEMS], 10)
    popular = popularity_hit_rate(split, 10)
    console.print(
        f"The held-out item is among the first 10 of all unseen ones for {ours:.1%} of the users "
        f"(a list of the most popular: {popular:.1%}).\n",
        highlight=False,
    )


def _show_user(
    model: LocalFactorisation, split: Split, ratings: Ratings, user: int, console: Console
) -> None:
    seen = split.train.items_of(user)
    table = Table(
        "some of what was watched",
        "recommended",
        title=f"user {ratings.user_ids[user]} ({len(seen)} seen)",
        title_justify="left",
    )
    best = model.recommend(user, _SHOWN)
    for place in range(max(len(best), min(_SHOWN, len(seen)))):
        watched = ratings.titles[int(seen[place])] if place < min(_SHOWN, len(seen)) else ""
        title = ""
        if place < len(best):
            item = best[place][0]
            hit = "  <- watched next" if item == int(split.test_item[user]) else ""
            title = ratings.titles[item] + hit
        table.add_row(watched, title)
    console.print(table)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
