"""Images turned about their centre."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def turned_clockwise(images: NDArray[np.uint8], degrees: float) -> NDArray[np.uint8]:
    """``images`` [n, height, width] turned clockwise, as seen with row 0 on top.

    Bilinear, zero outside of the picture; quarter turns of square images are exact.
    """
    height, width = images.shape[1:]
    angle = math.radians(degrees)
    cosine, sine = math.cos(angle), math.sin(angle)
    down, right = np.mgrid[0:height, 0:width].astype(np.float64)
    down -= (height - 1) / 2
    right -= (width - 1) / 2
    # Where each pixel of the result comes from: turned back, anticlockwise.
    from_right = cosine * right + sine * down + (width - 1) / 2
    from_down = -sine * right + cosine * down + (height - 1) / 2
    # A hair off a whole number would blend in a neighbour, or the zeros outside.
    from_right, from_down = np.round(from_right, 9), np.round(from_down, 9)
    top, left = np.floor(from_down).astype(int), np.floor(from_right).astype(int)
    below, beside = from_down - top, from_right - left
    padded = np.pad(images, ((0, 0), (1, 2), (1, 2))).astype(np.float64)
    found = np.zeros(images.shape, dtype=np.float64)
    for rows, columns, weight in (
        (top, left, (1 - below) * (1 - beside)),
        (top, left + 1, (1 - below) * beside),
        (top + 1, left, below * (1 - beside)),
        (top + 1, left + 1, below * beside),
    ):
        inside = (rows >= -1) & (rows <= height) & (columns >= -1) & (columns <= width)
        rows, columns = np.where(inside, rows + 1, 0), np.where(inside, columns + 1, 0)
        found += padded[:, rows, columns] * np.where(inside, weight, 0.0)
    return np.rint(found).astype(np.uint8)
