"""The seed that a graph gets at each step."""

from __future__ import annotations

_MASK = 2**64 - 1


def step_seed(seed: int, step: int) -> int:
    """A seed in [0, 2**31) for step number `step` (counted from 0) of a run with seed `seed`.

    SplitMix64's output function (Steele, Lea and Flood 2014) on seed and step, so that neighbouring
    steps and neighbouring seeds share nothing. 31 bits, because graphs hash in 32-bit integers.
    """
    value = (seed * 0x9E3779B97F4A7C15 + (step + 1) * 0xD1B54A32D192ED03) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) >> 33
