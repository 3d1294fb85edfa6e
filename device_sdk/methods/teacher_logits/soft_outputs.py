"""Soft outputs (rows of probabilities over classes) as compact arrays, the same on both ends.

The arrays are of dtypes that travel as they are (``tensors.py``), so that a device knows to the
bit what the aggregator reads, whatever codec its float32 arrays travel under.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST_CLASSES", "Precision", "SoftForm", "decode_soft_outputs", "encode_soft_outputs"]

Precision = Literal["float32", "float16", "int8"]
MOST_CLASSES = 4096
_DTYPES = {"float32": np.float32, "float16": np.float16, "int8": np.uint8}
_STEPS = 255
# Of a sum of up to 4,096 probabilities, each rounded to float16.
_SUM_SLACK = 0.01


@dataclass(frozen=True, slots=True)
class SoftForm:
    """How soft outputs travel.

    Attributes:
        precision: of a probability; ``int8`` is a number of 255ths, and those of a row are rounded
            so that they still add up.
        top: only the ``top`` most probable classes of a row are sent, what is left of the
            probability is spread evenly over the others; 0 for all classes.

    Raises ValueError, naming the setting, for a value outside its range.
    """

    precision: Precision = "float16"
    top: int = 0

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(
                f"precision is {self.precision!r}; expected one of {', '.join(get_args(Precision))}"
            )
        whole = isinstance(self.top, int) and not isinstance(self.top, bool)
        if not whole or not 0 <= self.top <= MOST_CLASSES:
            raise ValueError(
                f"top is {self.top!r}; expected 0 (all classes) to {MOST_CLASSES:,} classes"
            )

    def width(self, classes: int) -> int:
        """How many probabilities a row carries."""
        return self.top if 0 < self.top < classes else classes

    def names(self, classes: int) -> tuple[str, ...]:
        """Names of the arrays that carry the rows."""
        return ("values",) if self.width(classes) == classes else ("values", "classes")


def encode_soft_outputs(
    probabilities: NDArray[np.float32], form: SoftForm
) -> dict[str, NDArray[Any]]:
    """Rows of probabilities [rows, classes] as ``values`` [rows, width] in the form's precision.

    Where classes are left out, ``classes`` uint16 [rows, width] says which were kept, increasing.
    Raises ValueError where a row is no distribution.
    """
    _require_distributions(probabilities)
    classes = probabilities.shape[1]
    width = form.width(classes)
    kept, arrays = probabilities, dict[str, NDArray[Any]]()
    if width < classes:
        # Stable, so that of equal probabilities the first classes are sent, everywhere.
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, :width]
        chosen = np.sort(best, axis=1)
        kept = np.take_along_axis(probabilities, chosen, axis=1)
        arrays["classes"] = chosen.astype(np.uint16)
    if form.precision == "int8":
        # Even where all classes are sent one more share takes what rounding would create or lose.
        arrays["values"] = _in_steps(kept)
    else:
        arrays["values"] = kept.astype(_DTYPES[form.precision])
    return arrays


def decode_soft_outputs(
    arrays: Mapping[str, NDArray[Any]], rows: int, classes: int, form: SoftForm
) -> NDArray[np.float32]:
    """What :func:`encode_soft_outputs` was given, rounded: float32 [rows, classes], rows sum to 1.

    Reads no arrays but those of ``form.names``. Total: raises ValueError, whatever the arrays hold.
    """
    width = form.width(classes)
    values = _array(arrays, "values", _DTYPES[form.precision], (rows, width))
    if form.precision == "int8":
        found = values.astype(np.float32) / np.float32(_STEPS)
    else:
        found = values.astype(np.float32)
        # NaN fails the comparisons.
        if found.size and not (float(found.min()) >= 0 and float(found.max()) <= 1):
            raise ValueError("a probability is below 0, above 1 or no number")
    sums = found.sum(axis=1, dtype=np.float64)
    if width == classes:
        if not (np.abs(sums - 1) <= _SUM_SLACK).all():
            raise ValueError("the probabilities of a row do not add up to 1")
        return _normalised(found.astype(np.float64))
    if not (sums <= 1 + _SUM_SLACK).all():
        raise ValueError("the probabilities of a row add up to more than 1")
    chosen = _array(arrays, "classes", np.uint16, (rows, width)).astype(np.int64)
    if chosen.size and (int(chosen.max()) >= classes or (np.diff(chosen, axis=1) <= 0).any()):
        raise ValueError(f"a row's classes must increase from 0 to {classes - 1}")
    rest = np.maximum(0, 1 - sums) / (classes - width)
    whole = np.repeat(rest[:, None], classes, axis=1)
    np.put_along_axis(whole, chosen, found.astype(np.float64), axis=1)
    return _normalised(whole)


def _normalised(rows: NDArray[np.float64]) -> NDArray[np.float32]:
    shares: NDArray[np.float32] = (rows / rows.sum(axis=1, keepdims=True)).astype(np.float32)
    return shares


def _in_steps(kept: NDArray[np.float32]) -> NDArray[np.uint8]:
    """255ths by largest remainder: each row, with what is left out, adds up to 255."""
    rest = np.maximum(0, 1 - kept.sum(axis=1, dtype=np.float64, keepdims=True))
    shares = np.concatenate([kept.astype(np.float64), rest], axis=1)
    shares *= _STEPS / shares.sum(axis=1, keepdims=True)
    whole = np.floor(shares)
    missing = _STEPS - whole.sum(axis=1).astype(np.int64)
    order = np.argsort(whole - shares, axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    whole += place < missing[:, None]
    steps: NDArray[np.uint8] = whole[:, :-1].astype(np.uint8)
    return steps


def _require_distributions(probabilities: NDArray[np.float32]) -> None:
    if probabilities.dtype != np.float32 or probabilities.ndim != 2:
        raise ValueError(
            f"soft outputs are {probabilities.dtype} {probabilities.shape}; expected float32 "
            "[rows, classes]"
        )
    if not 2 <= probabilities.shape[1] <= MOST_CLASSES:
        raise ValueError(f"{probabilities.shape[1]} classes; expected 2 to {MOST_CLASSES:,}")
    sums = probabilities.sum(axis=1, dtype=np.float64)
    # NaN fails the comparisons.
    if not (np.abs(sums - 1) <= 1e-3).all() or not (probabilities >= 0).all():
        raise ValueError("a row of soft outputs is no distribution: it must be >= 0 and sum to 1")


def _array(
    arrays: Mapping[str, NDArray[Any]], name: str, dtype: type, shape: tuple[int, int]
) -> NDArray[Any]:
    array = arrays.get(name)
    if array is None or array.dtype != dtype or array.shape != shape:
        found = "missing" if array is None else f"{array.dtype} {array.shape}"
        raise ValueError(f"{name!r} is {found}; expected {np.dtype(dtype)} {shape}")
    return array
