"""The report: what each class of devices affords, how good its model gets, and beside what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from statistics import fmean

from aggregator.demo.baselines import Reached
from aggregator.demo.plan import CLASSES, rungs
from aggregator.demo.run import DigitsResults
from aggregator.look.charts import Bar, Line, bar_chart, line_chart
from aggregator.look.page import FLEET, factor, milliseconds, page, section, span, table, tiles_of
from device_sdk.artifact.load import read_manifest

TOGETHER = "together"


def shown(rung: str) -> str:
    """A rung's name as people write it: "1of4" is "1/4"."""
    return rung.replace("of", "/")


def class_rows(results: DigitsResults) -> tuple[list[str], list[list[str]]]:
    """What each class affords: a table's head and rows."""
    head = ["class", "rung chosen", "its round", "full model's", "down, up a round"]
    held, pace, rows = results.held, results.pace, []
    for name in CLASSES:
        own = results.of_class(name)
        chosen = results.rungs_of(name).most_common()
        slower = pace.slowdowns[name]
        rows.append(
            [
                name,
                ", ".join(f"{shown(rung)} ({count} of {len(own)})" for rung, count in chosen),
                milliseconds(_mean(each.p90_seconds for each in own)),
                milliseconds(slower * [*pace.seconds.values()][-1]),
                f"{read_manifest(rungs()[held[name]]).moved_numbers / 512:.0f}, "
                f"{kib(fmean(each.sent_bytes for each in own) / results.rounds)}",
            ]
        )
    return head, rows


def _mean(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return fmean(known) if known else None


def schemes(results: DigitsResults) -> dict[str, Reached]:
    """The fleet first, then what it is compared with."""
    return {TOGETHER: results.fleet, **results.baselines}


def scheme_rows(results: DigitsResults) -> tuple[list[str], list[list[str]]]:
    """The fleet and its baselines by class."""
    head = ["accuracy", "mean", *CLASSES, "sent by all"]
    per_class = results.devices / len(CLASSES)
    rows = [
        [
            name,
            f"{found.mean:.3f}",
            *(f"{found.accuracy[each]:.3f}" for each in CLASSES),
            f"{per_class * sum(found.up_bytes.values()) / 2**20:.1f} MiB",
        ]
        for name, found in schemes(results).items()
    ]
    return head, rows


def findings(results: DigitsResults) -> list[str]:
    """What the figures say, in sentences: computed, so that they say it whatever it is."""
    together = results.fleet
    found = []
    for name, other in results.baselines.items():
        better = [c for c in CLASSES if together.accuracy[c] > other.accuracy[c] + 1e-9]
        points = 100 * (together.mean - other.mean)
        word = "above" if points >= 0 else "below"
        found.append(
            f"Together the devices are {abs(points):.1f} points {word} {name}, on average; "
            f"{_listed(better) if better else 'no class'} "
            f"{'is' if len(better) == 1 or not better else 'are'} better off."
        )
    return found


def _listed(names: list[str]) -> str:
    plural = [f"{name}s" for name in names]
    if len(plural) == len(CLASSES):
        return "all four classes"
    return plural[0] if len(plural) == 1 else f"{', '.join(plural[:-1])} and {plural[-1]}"


def kib(count: float) -> str:
    """As in "12 KiB"."""
    return f"{count / 1024:.0f} KiB"


def report_html(results: DigitsResults) -> str:
    """The whole page."""
    together, others = results.fleet, results.baselines
    tiles = [(f"{together.mean:.1%}", "of unseen digits named right, together")]
    tiles += [(f"{found.mean:.1%}", name) for name, found in others.items()]
    tiles += [(f"{results.updates:,}", f"updates counted; {span(results.seconds)} in all")]
    about = (
        f"Real handwritten digits (scikit-learn's, 8 x 8 pixels), 30 on each of "
        f"{results.devices} devices, most of them two or three digits only. Each device times the "
        "four rungs of one network and trains the largest that it affords. Broker: "
        f"{results.broker}. {results.rounds} rounds."
    )
    said = "".join(f"<li>{escape(each)}</li>" for each in findings(results))
    body = [
        f'<p class="soft">{escape(about)}</p>',
        tiles_of(tiles),
        f"<section><ul>{said}</ul></section>",
        _afforded(results),
        _by_round(results),
        _compared(results),
        _method(results),
    ]
    return page(f"Tessera: {results.devices} unequal devices learn one model", body)


def _afforded(results: DigitsResults) -> str:
    pace = results.pace
    places = {rung: place for place, rung in enumerate(pace.seconds, 1)}
    lines = [
        Line(
            f"{name}, {factor(pace.slowdowns[name])}",
            name,
            [(places[r], 1e3 * pace.slowdowns[name] * each) for r, each in pace.seconds.items()],
        )
        for name in CLASSES
    ]
    limit = 1e3 * pace.limit_seconds
    sent = results.fleet.up_bytes
    bars = [
        Bar(name, name, sent[name], f"{kib(sent[name] / results.rounds)} a round")
        for name in CLASSES
    ]
    reasons = "".join(
        f"<li>{escape(f'{own[0].capacity} ({own[0].name})')}: {escape(own[0].reason)}</li>"
        for name in CLASSES
        if (own := results.of_class(name))
    )
    names = ", ".join(f"{place} is {shown(rung)}" for rung, place in places.items())
    return section(
        "What each class affords",
        table(*class_rows(results))
        + '<div class="pair"><div><h3>A round\'s training by rung, in ms</h3>'
        + line_chart(
            "a round's training by rung",
            lines,
            x_label="rung",
            y_digits=0,
            levels=[(f"limit {limit:.0f} ms", limit)],
            level_names="left",
        ).html
        + "</div><div><h3>Sealed updates, as sent</h3>"
        + bar_chart("bytes of updates", bars).html
        + "</div></div>"
        + f"<h3>In a device's own words</h3><ul>{reasons}</ul>"
        + f'<p class="soft">Rung {names}: the network with its large layers at that part of their '
        "rank. The slowness is emulated: a device sleeps after its work, in proportion, and times "
        "itself by the processor time of its own thread. Down: the rung's numbers as float16.</p>",
    )


def _by_round(results: DigitsResults) -> str:
    held = results.held
    lines = [
        Line("whole fleet", FLEET, [(r, _fleet_mean(held, at)) for r, at in results.curve.items()])
    ]
    lines += [
        Line(name, name, [(r, at[held[name]]) for r, at in results.curve.items()])
        for name in CLASSES
    ]
    levels = [(name, found.mean) for name, found in results.baselines.items()]
    return section(
        "Accuracy by round",
        line_chart("accuracy by round", lines, x_label="round", levels=levels).html
        + '<p class="soft">Of the rung that a class holds, of the version that came of the round, '
        "on 357 pictures that are on no device. Dashed: the mean that the others end at.</p>",
    )


def _fleet_mean(held: Mapping[str, str], at: Mapping[str, float]) -> float:
    return fmean(at[rung] for rung in held.values())


def _compared(results: DigitsResults) -> str:
    bars = [
        Bar(name, FLEET if name == TOGETHER else "dense", found.mean, f"{found.mean:.3f}")
        for name, found in schemes(results).items()
    ]
    return section(
        "Was it worth taking part?",
        bar_chart("mean accuracy", bars).html
        + table(*scheme_rows(results))
        + '<p class="soft">The same pictures, rounds and steps for all. <i>alone</i>: each device '
        "trains its rung by itself. <i>all at the smallest rung</i>: a fleet in which everybody "
        "trains what the sensors can. <i>only the desktops</i>: a fleet of the largest class with "
        "the full model; the others send nothing, and are given the rung that they can hold. The "
        "first is trained on this machine, the other two by the simulator. With 357 pictures an "
        "accuracy of 0.9 is known to 1.6 points or so.</p>",
    )


def _method(results: DigitsResults) -> str:
    return section(
        "How this came about",
        "<p>Every device has a folder, a key and an enrolment of its own, and connects to the "
        "broker by itself, which sees sealed messages only. No picture leaves its device. The same "
        "with a recommender on MovieLens: <code>make demo ARGS=--recommender</code>.</p>",
    )
