"""How far a tensor is off, and how far it may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from export.layout import LayoutSlot

TOLERANCE = 1e-5
YARDSTICK = 10.0

Where = tuple[int, int, Mapping[str, int]]
"""Step, threads, and sizes of the named axes."""


@dataclass(frozen=True)
class Comparison:
    """One tensor at one step: relative L2 errors against float64 torch."""

    tensor: str
    step: int
    threads: int
    sizes: Mapping[str, int]
    error: float
    torch_error: float

    @property
    def allowed(self) -> float:
        return max(TOLERANCE, YARDSTICK * self.torch_error)

    @property
    def excess(self) -> float:
        """Error over what is allowed; above 1 is a failure."""
        return self.error / self.allowed if np.isfinite(self.error) else float("inf")


@dataclass(frozen=True)
class Report:
    """What verification measured.

    ``unmoved`` names the parameters whose gradient was zero in every batch (never used, behind a
    dead ReLU, a row that no index of the example batch picks): nothing is known of theirs.
    """

    comparisons: tuple[Comparison, ...]
    unmoved: tuple[str, ...] = ()

    @property
    def worst(self) -> Comparison:
        return max(self.comparisons, key=lambda c: c.excess)


def compare_members(
    slot: LayoutSlot,
    prefix: str,
    got: np.ndarray,
    single: np.ndarray,
    exact: np.ndarray,
    where: Where,
    floor: float = 0.0,
) -> list[Comparison]:
    if not slot.packed:
        return [compare(prefix + slot.members[0].name, got, single, exact, where, floor)]
    found = []
    for member in slot.members:
        part = slice(member.offset, member.offset + member.elements)
        found.append(
            compare(prefix + member.name, got[part], single[part], exact[part], where, floor)
        )
    return found


def compare(
    name: str,
    got: np.ndarray,
    single: np.ndarray,
    exact: np.ndarray,
    where: Where,
    floor: float = 0.0,
) -> Comparison:
    step, threads, sizes = where
    if got.shape != exact.shape:
        return Comparison(f"{name} (shape)", step, threads, sizes, float("inf"), 0.0)
    reference = exact.astype(np.float64)
    scale = max(float(np.linalg.norm(reference)), floor, 1e-30)

    def distance(value: np.ndarray) -> float:
        both = np.isfinite(value.astype(np.float64)) | np.isfinite(reference)
        with np.errstate(invalid="ignore"):
            gap = np.where(both, value.astype(np.float64) - reference, 0.0)
        return float(np.linalg.norm(gap)) / scale

    return Comparison(name, step, threads, dict(sizes), distance(got), distance(single))
