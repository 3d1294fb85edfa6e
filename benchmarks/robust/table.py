"""The results as a table: a line a defence, a column an attack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tabulate import tabulate

from benchmarks.robust.hostile import ATTACKS, PROMOTING, Attack
from benchmarks.robust.outcome import Outcome
from benchmarks.robust.trial import SHARES, UNPROTECTED
from benchmarks.scatter.statistics import spread

__all__ = ["Found", "accuracy_table", "exposure_table"]

Found = Mapping[tuple[str, str, float], Mapping[int, Outcome]]
"""By option, attack ("" for a clean run) and share; then by seed."""


def accuracy_table(found: Found, options: Sequence[str]) -> str:
    """HR@10 of honest users, and in brackets its change in per cent against the clean run without
    protection, on the same users and seeds."""
    lines = []
    for option in options:
        clean = found.get((option, "", 0.0), {})
        cells = [_accuracy(found, clean, 0.0)]
        for share in SHARES:
            for attack in ATTACKS:
                cells.append(_accuracy(found, found.get((option, attack, share), {}), share))
        lines.append((option, len(clean), *cells))
    headers = ("HR@10 of honest users", "seeds", "clean", *_attack_headers(ATTACKS))
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def exposure_table(found: Found, options: Sequence[str]) -> str:
    """Per cent of honest users that have the promoted item among their ten best."""
    lines = []
    for option in options:
        cells = []
        attacked = [(share, attack) for share in SHARES for attack in PROMOTING]
        for share, attack in ((0.0, ""), *attacked):
            by_seed = found.get((option, attack, share), {})
            values = [100 * one.exposure[str(share)] for one in by_seed.values()]
            cells.append(f"{spread(values).mean:.1f} %" if values else "")
        lines.append((option, *cells))
    headers = ("promoted item in the top 10", "clean", *_attack_headers(PROMOTING))
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def _accuracy(found: Found, by_seed: Mapping[int, Outcome], share: float) -> str:
    if not by_seed:
        return ""
    mean = spread([one.hit_ratio[str(share)] for one in by_seed.values()]).mean
    base = found.get((UNPROTECTED, "", 0.0), {})
    changes = [
        100 * (one.hit_ratio[str(share)] / base[seed].hit_ratio[str(share)] - 1)
        for seed, one in by_seed.items()
        if seed in base
    ]
    if not changes:
        return f"{mean:.4f}"
    return f"{mean:.4f} ({spread(changes).mean:+.1f} %)"


def _attack_headers(attacks: Sequence[Attack]) -> list[str]:
    return [f"{attack}, {share:.0%}" for share in SHARES for attack in attacks]
