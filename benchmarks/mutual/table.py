"""The results as tables: means over devices with the paper's beside them, and device by device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from aggregator.simulate.intervals import spread
from benchmarks.mutual.experiment import Outcome
from benchmarks.mutual.presets import Paper, Row

Outcomes = Mapping[str, Mapping[int, Outcome]]
_MEASURES = ("acc", "bwt", "fwt")
_HEADERS = (
    *("", "seeds", "ACC (paper)", "BWT (paper)", "FWT (paper)"),
    *("bytes up", "bytes down", "conflicts", "rounds", "CPU s"),
)


def mean_table(rows: Sequence[Row], outcomes: Outcomes) -> str:
    """Mean and standard deviation over seeds of the devices' mean ACC, BWT and FWT, in percent.

    Args:
        outcomes: by row's name, by seed.
    """
    lines = []
    for row in rows:
        found = list(outcomes.get(row.name, {}).values())
        if not found:
            continue
        lines.append(
            (
                row.name,
                len(found),
                *(
                    _cell([one.mean(what, row.leave_out) for one in found], row.paper, what)
                    for what in _MEASURES
                ),
                _bytes([one.bytes_up for one in found]),
                _bytes([one.bytes_down for one in found]),
                _share([one.conflict_share for one in found]),
                f"{_mean([float(one.rounds) for one in found]):.0f}",
                f"{_mean([one.seconds for one in found]):.0f}",
            )
        )
    return tabulate(lines, headers=_HEADERS, tablefmt="github", disable_numparse=True)


def by_domain_table(rows: Sequence[Row], outcomes: Outcomes, domains: Sequence[str]) -> str:
    """ACC / BWT / FWT of each device, means over seeds."""
    lines = []
    for row in rows:
        found = list(outcomes.get(row.name, {}).values())
        if not found:
            continue
        cells = []
        for device in range(len(domains)):
            means = [
                _mean([float(getattr(one.devices[device], what)) for one in found])
                for what in _MEASURES
            ]
            cells.append(" / ".join(f"{value:.1f}" for value in means))
        lines.append((row.name, *cells))
    return tabulate(lines, headers=("ACC / BWT / FWT", *domains), tablefmt="github")


def validation_table(rows: Sequence[Row], outcomes: Outcomes) -> str:
    """The devices' mean best validation accuracy: all that settings may be chosen by."""
    lines = []
    for row in rows:
        found = list(outcomes.get(row.name, {}).values())
        if found:
            values = [one.mean("validation", row.leave_out) for one in found]
            picked = [score.round for one in found for score in one.devices]
            seconds = _mean([one.seconds for one in found])
            lines.append(
                (
                    row.name,
                    len(found),
                    _cell(values, None, ""),
                    f"{_mean(picked):.0f}",
                    f"{seconds:.0f}",
                )
            )
    headers = ("", "seeds", "validation", "round picked", "CPU s")
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def _cell(values: Sequence[float], paper: Paper | None, what: str) -> str:
    found = spread(values)
    text = f"{found.mean:.1f}"
    if not math.isnan(found.deviation):
        text += f" ± {found.deviation:.1f}"
    return text if paper is None else f"{text} ({getattr(paper, what):.1f})"


def _bytes(values: Sequence[float]) -> str:
    mean = _mean(values)
    return f"{mean / 1000:,.0f} kB" if mean else "-"


def _share(values: Sequence[float]) -> str:
    mean = _mean(values)
    return f"{100 * mean:.0f} %" if mean >= 0 else "-"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
