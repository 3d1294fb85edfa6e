"""The report: one HTML file without any reference to the outside."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from aggregator.look.charts import Bar, Line, Strip, bar_chart, line_chart, strip_chart
from aggregator.look.page import (
    FLEET,
    factor,
    milliseconds,
    page,
    section,
    span,
    table,
    tiles_of,
)
from device_sdk.system.files import write_atomically
from examples.fleet.evaluate import FleetQuality
from examples.fleet.journal import UserShown
from examples.fleet.plan import CLASSES, HEADROOM, TIMED_PER_CLASS
from examples.fleet.progress import k_range
from examples.fleet.results import FleetResults


def write_report(path: Path, results: FleetResults) -> None:
    """Write the report, whole or not at all."""
    write_atomically(path, report_html(results).encode())


def report_html(results: FleetResults) -> str:
    """The whole page."""
    run = results.run
    title = f"Tessera: {run.devices} devices learn together"
    body = [
        f'<p class="soft">{escape(_about(results))}</p>',
        *_warnings(results),
        _tiles(results),
        _quality(results),
        _bytes(results),
        _capability(results),
        _users(results),
        _method(results),
    ]
    return page(title, body)


def _about(results: FleetResults) -> str:
    run = results.run
    return (
        f"{run.data_name}: {run.users:,} users, {run.items:,} items, {run.interactions:,} training "
        f"interactions, on {run.devices} devices in {run.processes} processes. Broker: "
        f"{results.broker or 'none yet'}. {results.closed_rounds} of {run.rounds} rounds in "
        f"{span(results.seconds)}."
    )


def _warnings(results: FleetResults) -> list[str]:
    found = []
    if results.run.synthetic:
        found.append(
            "SYNTHETIC DATA, drawn at random. The parts work together; nothing here says anything "
            f"about recommending films. {results.run.data_origin}"
        )
    if results.stopped_early:
        found.append(f"The run ended early: {results.stopped_early} What was known is below.")
    return [f'<section class="warn">{escape(text)}</section>' for text in found]


def _tiles(results: FleetResults) -> str:
    last = results.last_round()
    quality = None if last is None else results.quality.at(last)
    mean_bytes = results.bytes_per_update()
    after = "" if last is None else f" after {results.round_name(last)}"
    tiles = [
        (
            "-" if quality is None else f"{quality.full_hit_ratio:.3f}",
            f"HR@10 of all items{after}",
        ),
        ("-" if quality is None else f"{quality.full_ndcg:.3f}", "NDCG@10 of all items"),
        (
            "-" if mean_bytes is None else f"{mean_bytes / 1024:.1f} KiB",
            "mean sealed update"
            + (
                "" if mean_bytes is None else f", 1/{results.dense_bytes / mean_bytes:.1f} of dense"
            ),
        ),
        (f"{results.updates_counted:,}", "updates counted, each once"),
        (span(results.seconds), f"in all; {_mean(results.round_seconds):.2f} s a round"),
    ]
    return tiles_of(tiles)


def _quality(results: FleetResults) -> str:
    rounds = results.curve_rounds()
    last = results.last_round()
    if last is None:
        return section("Quality by round", "<p>No round was evaluated.</p>")
    names: list[tuple[str, str | None]] = [("whole fleet", None)]
    names += [(each.name, each.name) for each in CLASSES]
    hits, gains, rows = [], [], []
    for name, capacity in names:
        style = capacity or FLEET
        seen = [
            (r, found) for r in rounds if (found := results.quality.at(r, capacity)) is not None
        ]
        hits.append(Line(name, style, [(r, found.full_hit_ratio) for r, found in seen]))
        gains.append(Line(name, style, [(r, found.full_ndcg) for r, found in seen]))
        found = results.quality.at(last, capacity)
        if found is not None:
            rows.append(_figures(name, found))
    baselines = results.run.baselines
    rows += [_figures(name, found) for name, found in baselines.items()]
    charts = (
        "<div><h3>HR@10</h3>"
        + line_chart(
            "HR@10 by round",
            hits,
            x_label="round",
            levels=[(name, found.full_hit_ratio) for name, found in baselines.items()],
        ).html
        + "</div><div><h3>NDCG@10</h3>"
        + line_chart(
            "NDCG@10 by round",
            gains,
            x_label="round",
            levels=[(name, found.full_ndcg) for name, found in baselines.items()],
        ).html
        + "</div>"
    )
    figures = table(
        [
            *("after " + results.round_name(last), "users", "HR@10", "NDCG@10"),
            *("HR@10 of 99", "NDCG@10 of 99"),
        ],
        rows,
    )
    return section(
        "Quality by round, and by capacity class",
        f'<div class="pair">{charts}</div>{figures}'
        '<p class="soft">Is a user\'s held-out latest item among the first ten of all items that '
        "the user has not, and of itself and 99 others "
        f"({escape(results.run.negatives)})? Devices evaluate their own users; held-out "
        "items are in no training data. A round's figures are those of the version that it began "
        "with; the table is of the version that came of the last round, not of the best one. Its "
        "last rows, and the dashed lines, are of recommenders that see everybody's data in one "
        f"place. With {results.run.users:,} users HR@10 is known to {results.points:.1f} points or "
        "so, a class's to twice that: small differences between classes say little.</p>",
    )


def _figures(name: str, found: FleetQuality) -> list[str]:
    return [
        *(name, f"{found.users}", f"{found.full_hit_ratio:.3f}", f"{found.full_ndcg:.3f}"),
        *(f"{found.hit_ratio:.3f}", f"{found.ndcg:.3f}"),
    ]


def _bytes(results: FleetResults) -> str:
    bars = [Bar("dense float32", "dense", results.dense_bytes, _kib(results.dense_bytes))]
    for name, capacity in [("whole fleet", None), *((each.name, each.name) for each in CLASSES)]:
        mean = results.bytes_per_update(capacity)
        if mean is not None:
            text = f"{_kib(mean)}, 1/{results.dense_bytes / mean:.1f} of dense"
            bars.append(Bar(name, capacity or FLEET, mean, text))
    return section(
        "Bytes per update",
        bar_chart("Mean bytes per update", bars).html
        + '<p class="soft">As sent: int8 pulls on the rows of likes, item ids, the users\' part, '
        "padding, encryption, and anything sent twice. Dense float32 is the whole item matrix "
        f"({results.run.items:,} x {results.run.columns}).</p>"
        f'<p class="soft">Why not less? A device here serves about '
        f"{results.run.users // max(1, results.run.devices)} users. An update names the items that "
        "they like, has a byte for each of them and each user, and the users' vectors turned so "
        "that they tell no more than their sums. A device of one user sends a few hundred "
        "bytes.</p>",
    )


def _capability(results: FleetResults) -> str:
    run = results.run
    limit = run.train_seconds * (1.0 - HEADROOM)
    strips = [Strip(each.name, each.name, results.ks(each.name)) for each in CLASSES]
    times = [
        Line(
            f"{each.name}, {factor(slower)}",
            each.name,
            [(k, 1e3 * slower * seconds) for k, seconds in sorted(run.round_p90_seconds.items())],
        )
        for each in CLASSES
        if (slower := results.slowdown(each.name)) is not None
    ]
    rows = [
        [
            each.name,
            factor(results.slowdown(each.name)),
            k_range(results.ks(each.name)),
            str(results.class_k(each.name) or "-"),
            milliseconds(results.p90_seconds(each.name)),
            milliseconds(results.train_seconds(each.name)),
        ]
        for each in CLASSES
    ]
    reasons = "".join(
        f"<li>{escape(f'{found.capacity} ({found.device})')}: {escape(found.reason)}</li>"
        for each in CLASSES
        if (found := next((m for m in results.measured.values() if m.capacity == each.name), None))
    )
    return section(
        "What the devices chose to afford",
        '<div class="pair"><div><h3>k that devices picked</h3>'
        + strip_chart(
            "k by class", strips, x_label=f"columns k of {run.columns}", most=run.columns
        ).html
        + "</div><div><h3>A round's training by k, in ms</h3>"
        + line_chart(
            "p90 of a round's training by k",
            times,
            x_label="columns k",
            y_digits=1,
            levels=[(f"limit {limit * 1e3:.1f} ms", limit * 1e3)],
            level_names="left",
        ).html
        + "</div></div>"
        + table(
            ["class", "slowed down", "picked k", "trains k", "p90 when timed", "mean in rounds"],
            rows,
        )
        + (f"<h3>In a device's own words</h3><ul>{reasons}</ul>" if reasons else "")
        + '<p class="soft">The slowness is emulated: after each piece of work a device sleeps in '
        "proportion. The factors were set at the start, by a look at the time that a round takes, "
        f"so that the classes afford about {', '.join(str(each.about_k) for each in CLASSES)} "
        f"columns. Up to {TIMED_PER_CLASS} devices of each class then timed their own training, "
        "one at a time, and picked the largest k within "
        f"{limit * 1e3:.1f} ms; the class trains the median. Time is that of the device's own "
        "thread on the processor, in units of a fixed piece of work that runs beside it: dozens of "
        "devices share this machine, and its speed changes with what else it does, which that of "
        "a device of one's own would not. Much of a round's time does not depend on k, so a little "
        "noise moves k a good deal.</p>",
    )


def _users(results: FleetResults) -> str:
    if not results.shown:
        return ""
    cards = "".join(_user(shown) for shown in results.shown.values())
    return section(
        "Recommended",
        f'<div class="pair">{cards}</div><p class="soft">Made on the device that holds the user, '
        "from its own vectors and the last item matrix it got. Seen films are left out.</p>",
    )


def _user(shown: UserShown) -> str:
    best = "".join(
        f'<li class="hit">{escape(title)} (watched next)</li>'
        if title == shown.watched_next
        else f"<li>{escape(title)}</li>"
        for title in shown.recommended
    )
    watched = escape("; ".join(shown.watched))
    return (
        f"<div><h3>{escape(shown.user)}, on {escape(shown.device)} (k = {shown.k})</h3>"
        f'<p class="soft">lately watched: {watched}</p><ol>{best}</ol></div>'
    )


def _method(results: FleetResults) -> str:
    troubles = "".join(
        f"<li>{escape(each.device)}: {escape(each.text)}</li>" for each in results.troubles[:10]
    )
    return section(
        "How this came about",
        "<p>Every device has a folder, a key and an enrolment of its own, and connects to the "
        "broker by itself. The broker sees sealed messages only. Interactions, user vectors and "
        "the figures above never passed through it: devices wrote the figures to files that the "
        "demo read.</p>"
        f"<p>Messages that the aggregator refused: {escape(results.refusals)}.</p>"
        + (f"<p>Troubles that devices told:</p><ul>{troubles}</ul>" if troubles else ""),
    )


def _kib(count: float) -> str:
    return f"{count / 1024:.1f} KiB"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
