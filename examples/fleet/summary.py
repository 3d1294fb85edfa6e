"""What the demo prints at its end, or when it was stopped: as much as is known."""

from __future__ import annotations

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from aggregator.look.page import factor, milliseconds, span
from examples.fleet.evaluate import FleetQuality
from examples.fleet.plan import CLASSES, TIMED_PER_CLASS
from examples.fleet.progress import k_range
from examples.fleet.results import FleetResults

_SHOWN_ROUNDS = 10


def print_synthetic_warning(console: Console, origin: str) -> None:
    """Loud: nobody should take these figures for something about films."""
    console.print(
        Panel(
            f"{origin}\n\nEverything below is learnt from SYNTHETIC DATA, drawn at random. It "
            "shows that the parts work together, and says nothing about recommending films.",
            title="SYNTHETIC DATA",
            style="bold yellow",
        )
    )


def print_summary(console: Console, results: FleetResults) -> None:
    """Quality by round and class, bytes, k and step times, three users' recommendations."""
    _print_rounds(console, results)
    _print_classes(console, results)
    _print_users(console, results)
    run = results.run
    console.print(
        f"{results.closed_rounds} of {run.rounds} rounds, {results.updates_counted:,} updates "
        f"counted, in {span(results.seconds)}; messages that the aggregator refused: "
        f"{results.refusals}.",
        highlight=False,
    )
    for trouble in results.troubles[:5]:
        console.print(f"{trouble.device}: {trouble.text}", style="yellow", markup=False)
    if run.synthetic:
        console.print("All of this is about SYNTHETIC DATA.", style="bold yellow")


def _print_rounds(console: Console, results: FleetResults) -> None:
    rounds = results.curve_rounds()
    if not rounds:
        console.print("No round was evaluated by (nearly) all devices.")
        return
    step = max(1, len(rounds) // _SHOWN_ROUNDS)
    table = Table(
        "round", "HR@10", "NDCG@10", "HR@10 of 99", "NDCG@10 of 99",
        title="Held-out items of the devices' own users, among all that a user has not",
        title_justify="left",
    )  # fmt: skip
    for round_id in sorted({*rounds[::step], rounds[-1]}):
        whole = results.quality.at(round_id)
        if whole is not None:
            final = round_id > results.run.rounds
            table.add_row("final" if final else str(round_id), *_figures(whole))
    for name, found in results.run.baselines.items():
        table.add_row(name, *_figures(found))
    console.print(table)
    console.print(
        "The last rows are of recommenders that see everybody's data in one place. With "
        f"{results.run.users:,} users HR@10 is known to {results.points:.1f} points or so, a "
        "class's figures to twice that.\n",
        highlight=False,
    )


def _figures(found: FleetQuality) -> list[str]:
    measures = (found.full_hit_ratio, found.full_ndcg, found.hit_ratio, found.ndcg)
    return [f"{each:.3f}" for each in measures]


def _print_classes(console: Console, results: FleetResults) -> None:
    run = results.run
    table = Table(
        "class", "slowed down", "picked k", "trains k", "p90 when timed", "mean in rounds",
        "bytes an update", "NDCG @10",
        title=f"Capacity classes, given {milliseconds(run.train_seconds)} for a round",
        title_justify="left",
    )  # fmt: skip
    last = results.last_round()
    for each in CLASSES:
        mean = results.bytes_per_update(each.name)
        quality = None if last is None else results.quality.at(last, each.name)
        table.add_row(
            each.name,
            factor(results.slowdown(each.name)),
            k_range(results.ks(each.name)),
            str(results.class_k(each.name) or "-"),
            milliseconds(results.p90_seconds(each.name)),
            milliseconds(results.train_seconds(each.name)),
            "-" if mean is None else f"{mean:,.0f}",
            "-" if quality is None else f"{quality.full_ndcg:.3f}",
        )
    console.print(table)
    console.print(
        f"Slowness is emulated by sleeping. Up to {TIMED_PER_CLASS} devices of a class timed "
        "themselves, alone; the class trains the median of the ks that they picked. A dense "
        f"float32 update has {results.dense_bytes:,} bytes.\n",
        highlight=False,
    )


def _print_users(console: Console, results: FleetResults) -> None:
    for shown in results.shown.values():
        table = Table(
            "lately watched",
            "recommended",
            title=f"{shown.user}, on {shown.device} (k = {shown.k})",
            title_justify="left",
        )
        for place in range(max(len(shown.watched), len(shown.recommended))):
            title = shown.recommended[place] if place < len(shown.recommended) else ""
            hit = "  <- watched next" if title and title == shown.watched_next else ""
            table.add_row(
                shown.watched[place] if place < len(shown.watched) else "", f"{title}{hit}"
            )
        console.print(table)
