"""MNIST and the likes in the publisher's idx files, checked by their content."""

from __future__ import annotations

import gzip
import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

_CONTENT: Final = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""SHA-256 of the unzipped files: some copies were zipped anew."""
_LARGEST = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """``x`` uint8 [n, ...] and their classes ``y`` uint8 [n]."""

    x: NDArray[np.uint8]
    y: NDArray[np.uint8]


def load_mnist(root: Path, part: str = "train") -> Images:
    """The ``train`` (60,000) or ``t10k`` (10,000) images, [n, 28, 28], from ``root/mnist``.

    Raises FileNotFoundError, and ValueError for another part or for a file whose content is not the
    publisher's.
    """
    if part not in ("train", "t10k"):
        raise ValueError(f"part is {part!r}; expected 'train' or 't10k'")
    images = _content(root / "mnist", f"{part}-images-idx3-ubyte")
    labels = _content(root / "mnist", f"{part}-labels-idx1-ubyte")
    _, count, rows, columns = struct.unpack_from(">IIII", images)
    return Images(
        np.frombuffer(images, np.uint8, offset=16).reshape(count, rows, columns),
        np.frombuffer(labels, np.uint8, offset=8),
    )


def _content(folder: Path, name: str) -> bytes:
    path = folder / f"{name}.gz"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: put MNIST's four .gz files there, or point TESSERA_DATA elsewhere"
        )
    with gzip.open(path, "rb") as file:
        content = file.read(_LARGEST)
    if hashlib.sha256(content).hexdigest() != _CONTENT[name]:
        raise ValueError(f"{path} does not hold what MNIST's publisher put there")
    return content
