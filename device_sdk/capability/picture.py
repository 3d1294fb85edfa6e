"""Results of `bench` drawn over each other; matplotlib is for those who want that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from device_sdk.capability.report import BenchResult


def draw(results: Sequence[BenchResult], names: Sequence[str], path: Path) -> None:
    """Each option's p50 to p90 in milliseconds, a line a device, the chosen one filled. Raises
    ImportError where matplotlib is missing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axis = figure.subplots()
    options = list(dict.fromkeys(row.option for each in results for row in each.rows))
    # Of k the place is the number itself; rungs and artifacts have names, in order of size.
    is_k = all(each.kind == "k" for each in results)
    places = {each: int(each) if is_k else place for place, each in enumerate(options)}
    for number, (result, name) in enumerate(zip(results, names, strict=True)):
        timed = [row for row in result.rows if row.p90_seconds is not None]
        x = [places[row.option] for row in timed]
        p50 = [1e3 * (row.p50_seconds or 0.0) for row in timed]
        p90 = [1e3 * (row.p90_seconds or 0.0) for row in timed]
        colour = f"C{number}"
        axis.plot(x, p90, colour, marker="o", markerfacecolor="white", label=name)
        axis.fill_between(x, p50, p90, color=colour, alpha=0.2, linewidth=0)
        taken = None if result.choice is None else result.choice.option
        for row, place, height in zip(timed, x, p90, strict=True):
            if row.option == taken:
                axis.plot([place], [height], colour, marker="o", markersize=9)
    if not is_k:
        axis.set_xticks([*places.values()], [*places])
    works = dict.fromkeys(each.work for each in results)
    axis.set(xlabel=results[0].kind, ylabel="ms (line: p90, band: from p50)")
    axis.set_title("; ".join(works), fontsize=9)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=120)
