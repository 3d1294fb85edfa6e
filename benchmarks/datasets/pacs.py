"""PACS at 64 x 64 pixels: one .npz a domain, checked by its content."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.datasets.mnist import Images

PACS_DOMAINS: Final = ("photo", "art_painting", "cartoon", "sketch")
PACS_CLASSES: Final = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")

_CONTENT: Final = {
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
    if hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest() != _CONTENT[domain]:
        raise ValueError(f"{path} does not hold the images that it should")
    return Images(x, y)
