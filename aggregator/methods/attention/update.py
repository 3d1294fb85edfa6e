"""The parts of an attention update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aggregator.methods.method import Refused
from device_sdk.artifact.flat_layout import FlatLayout
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.arrays.tensors import LARGEST_OF_EVERY_CODEC

__all__ = ["check_parts"]

_METADATA = {"samples", "width", "mixture", "loss"}
_MOST_SAMPLES = 1 << 40


def check_parts(update: Update, layouts: Sequence[FlatLayout]) -> None:
    """Raises Refused with reason ``bad-tensors``, ``bad-metadata`` or ``bad-values``.

    ``layouts``: of the task's models, the narrowest first.
    """
    if set(update.tensors) != {"vector"}:
        raise Refused("bad-tensors", "expected exactly the tensor vector")
    width = _checked_width(update, len(layouts))
    vector, size = update.tensors["vector"], layouts[width].size
    if vector.dtype != np.float32 or vector.shape != (size,):
        raise Refused(
            "bad-values", f"vector is {vector.dtype} {vector.shape}; expected float32 [{size}]"
        )
    # NaN fails the comparison too.
    if not float(np.abs(vector).max()) <= LARGEST_OF_EVERY_CODEC:
        raise Refused("bad-values", "a value is not finite or is absurdly large")


def _checked_width(update: Update, widths: int) -> int:
    """The update's width, once all its metadata are sound; raises Refused."""
    found = update.metadata
    if set(found) != _METADATA:
        raise Refused("bad-metadata", f"expected exactly {', '.join(sorted(_METADATA))}")
    for name, most in (("samples", _MOST_SAMPLES), ("width", widths - 1)):
        value = found[name]
        least = 1 if name == "samples" else 0
        if type(value) is not int or not least <= value <= most:
            raise Refused("bad-metadata", f"{name} must be an integer from {least} to {most}")
    if not isinstance(found["mixture"], bool):
        raise Refused("bad-metadata", "mixture must be true or false")
    loss = found["loss"]
    if isinstance(loss, bool) or not isinstance(loss, (int, float)) or not abs(loss) <= 1e12:
        raise Refused("bad-metadata", "loss must be a finite number")
    return int(found["width"])
