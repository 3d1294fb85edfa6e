"""Does a provider train as the CPU does? Two steps of each, compared by state tensor.

What counts is the change of each tensor: its L2 error, relative to the CPU's own change. Where that
is beyond the provider's tolerance, the CPU itself, started a few rounding errors away, says what
rounding is worth here: behind batch norm a bias' gradient is rounding only, and Adam makes steps of
full size of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from device_sdk.artifact.safetensors import Array
from device_sdk.errors import NonFiniteStep

State = Mapping[str, Array]

STEPS: Final = 2
ROUNDING: Final = 3e-7
_DRAWS: Final = 3
# What a provider may differ by, in what the CPU differs by from itself.
_YARDSTICK: Final = 4.0
# Changes below this share of a tensor's norm are rounding, whatever they are of.
_FLOOR: Final = 1e-4


@dataclass(frozen=True)
class Agreement:
    """`text` says how far apart the two are, of which state tensor."""

    holds: bool
    text: str


def compare(
    start: State,
    ours: State,
    theirs: State,
    tolerance: float,
    walk: Callable[[State], State],
) -> Agreement:
    """Whether a provider's steps are the CPU's.

    `start`: the state before the steps; `ours`, `theirs`: behind them, the provider's and the
    CPU's. `walk` is the CPU's steps from another start.
    """
    errors = _errors(start, ours, theirs)
    allowed = dict.fromkeys(errors, tolerance)
    if any(not error <= tolerance for error in errors.values()):
        rng = np.random.default_rng(0)
        for _ in range(_DRAWS):
            with contextlib.suppress(NonFiniteStep):
                shaken = walk(_shaken(start, rng))
                for name, error in _errors(start, shaken, theirs).items():
                    allowed[name] = max(allowed[name], _YARDSTICK * error)
    worst = max(errors, key=lambda name: errors[name] / allowed[name])
    return Agreement(
        errors[worst] <= allowed[worst],
        f"two steps' change of {worst!r} is off by {errors[worst]:.1e} of the CPU's "
        f"(allowed: {allowed[worst]:.1e})",
    )


def _shaken(state: State, rng: np.random.Generator) -> dict[str, Array]:
    """The state, each float moved by a rounding error or two."""
    return {
        name: array * (1 + ROUNDING * rng.standard_normal(array.shape)).astype(array.dtype)
        if np.issubdtype(array.dtype, np.floating)
        else array
        for name, array in state.items()
    }


def _errors(start: State, ours: State, theirs: State) -> dict[str, float]:
    return {name: relative_error(ours[name], theirs[name], start[name]) for name in theirs}


def relative_error(ours: Array, theirs: Array, start: Array | None = None) -> float:
    """L2 error of `ours`, relative to how far `theirs` lies from `start` (zero). Infinite where
    one is not finite, or an integer is another."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not np.issubdtype(theirs.dtype, np.floating):
        return 0.0 if np.array_equal(ours, theirs) else float("inf")
    wanted = theirs.astype(np.float64)
    moved = wanted if start is None else wanted - start
    scale = max(float(np.linalg.norm(moved)), _FLOOR * float(np.linalg.norm(wanted)), 1e-30)
    error = float(np.linalg.norm(ours - wanted)) / scale
    return error if np.isfinite(error) else float("inf")
