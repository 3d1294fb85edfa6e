"""Pictures in classes: MNIST and the likes in the publisher's idx files, and PACS at 64 x 64;
checked by their content."""

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


PACS_DOMAINS: Final = ("photo", "art_painting", "cartoon", "sketch")
PACS_CLASSES: Final = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")

_PACS: Final = {
    "photo": "1dfe54c1c48dcff72bf577fe30712479d95fc00478e9c76e95837aed369e0add",
    "art_painting": "5737ed363355b66ed0f8ae78fd6e12bfd36293731cd2e36ed85dc40a52c188e9",
    "cartoon": "d501cb416ef994a087ff1e8052ee226284f4fbe4084049c37677a034652cec57",
    "sketch": "f681b562e7ee8cca1e16e906c7a05ff484204b1ec75dc91278e0369356d9c8d4",
}
"""SHA-256 of x's bytes followed by y's."""


def load_pacs64(root: Path, domain: str) -> Images:
    """One domain's images, uint8 [n, 3, 64, 64], from ``root/pacs64``.

    Raises FileNotFoundError, and ValueError for an unknown domain or other content.
    """
    if domain not in PACS_DOMAINS:
        raise ValueError(f"domain is {domain!r}; expected one of {', '.join(PACS_DOMAINS)}")
    path = root / "pacs64" / f"{domain}.npz"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: point TESSERA_DATA to the folder of data sets")
    with np.load(path, allow_pickle=False) as arrays:
        x, y = arrays["x"], arrays["y"]
    if hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest() != _PACS[domain]:
        raise ValueError(f"{path} does not hold the images that it should")
    return Images(x, y)
