"""The results as tables: a line a defence, a column an attack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tabulate import tabulate

from aggregator.simulate.intervals import spread
from benchmarks.robust.attacks import MAGNITUDES, PROMOTING, SHARES, SINGLE, Attack

UNPROTECTED = "none"
DEFAULT = "default"

OutcomeT = TypeVar("OutcomeT")
Found = Mapping[tuple[str, str, float], Mapping[int, OutcomeT]]
"""By option, attack ("" for a clean run) and share; then by seed."""
Measure = Callable[[OutcomeT], Mapping[str, float]]
"""A measure of an outcome, by the share of devices that are hostile."""


def change_table(
    found: Found[OutcomeT],
    options: Sequence[str],
    attacks: Sequence[Attack],
    measure: Measure[OutcomeT],
    title: str,
) -> str:
    """The measure's mean, and in brackets its change in per cent against the clean run without
    protection, on the same users and seeds."""
    base = found.get((UNPROTECTED, "", 0.0), {})

    def cell(by_seed: Mapping[int, OutcomeT], share: float) -> str:
        if not by_seed:
            return ""
        mean = spread([measure(one)[str(share)] for one in by_seed.values()]).mean
        changes = [
            100 * (measure(one)[str(share)] / measure(base[seed])[str(share)] - 1)
            for seed, one in by_seed.items()
            if seed in base
        ]
        return f"{mean:.4f} ({spread(changes).mean:+.1f} %)" if changes else f"{mean:.4f}"

    lines = []
    for option in options:
        clean = found.get((option, "", 0.0), {})
        cells = [cell(clean, 0.0)]
        for share in SHARES:
            cells += [cell(found.get((option, one, share), {}), share) for one in attacks]
        lines.append((option, len(clean), *cells))
    headers = (title, "seeds", "clean", *_attack_headers(attacks))
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def promotion_table(
    found: Found[OutcomeT],
    options: Sequence[str],
    attacks: Sequence[Attack],
    measure: Measure[OutcomeT],
    title: str,
) -> str:
    """The measure's mean in per cent under those attacks that promote an item."""
    promoting = [attack for attack in attacks if attack in PROMOTING]
    lines = []
    for option in options:
        cells = []
        attacked = [(share, attack) for share in SHARES for attack in promoting]
        for share, attack in ((0.0, ""), *attacked):
            by_seed = found.get((option, attack, share), {})
            values = [100 * measure(one)[str(share)] for one in by_seed.values()]
            cells.append(f"{spread(values).mean:.1f} %" if values else "")
        lines.append((option, *cells))
    headers = (title, "clean", *_attack_headers(promoting))
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def single_table(
    found: Found[OutcomeT], share: float, measure: Measure[OutcomeT], title: str
) -> str:
    """The measure's mean where one device sends any value in every round, and its change in per
    cent against no attack and no limits, on the same users and seeds. ``found``: by option, attack
    and magnitude; clean runs that did not measure the others of a single device are left out."""
    found = {
        case: {seed: one for seed, one in by_seed.items() if str(share) in measure(one)}
        for case, by_seed in found.items()
    }
    base = found.get((UNPROTECTED, "", 0.0), {})

    def cell(by_seed: Mapping[int, OutcomeT]) -> str:
        values = [measure(one)[str(share)] for one in by_seed.values()]
        changes = [
            100 * (measure(one)[str(share)] / measure(base[seed])[str(share)] - 1)
            for seed, one in by_seed.items()
            if seed in base
        ]
        if not changes:
            return ""
        return f"{spread(values).mean:.4f} ({spread(changes).mean:+.1f} %)"

    lines = []
    for option in (UNPROTECTED, DEFAULT):
        clean = found.get((option, "", 0.0), {})
        lines.append((f"{option}, no attack", len(clean), cell(clean), "", ""))
    for attack in SINGLE:
        attacked = [found.get((DEFAULT, attack, each), {}) for each in MAGNITUDES]
        if any(attacked):
            seeds = max(len(each) for each in attacked)
            lines.append((f"{DEFAULT}, {attack}", seeds, *map(cell, attacked)))
    headers = (title, "seeds", *(f"times {each:g}" for each in MAGNITUDES))
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def _attack_headers(attacks: Sequence[Attack]) -> list[str]:
    return [f"{attack}, {share:.0%}" for share in SHARES for attack in attacks]
