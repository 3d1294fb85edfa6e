"""The domains of the paper's two experiments: one device each, four parts each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.datasets.pictures import PACS_CLASSES, PACS_DOMAINS, Images, load_mnist, load_pacs64


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


ANGLES = (0, 20, 40, 60)
Split = Literal["independent", "by-image"]

_TRAIN, _VALIDATION = 0.75, 0.10
Samples = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    """One device's samples, ``x`` float32 [n, channels, size, size] and ``y`` int64 [n].

    ``private`` and ``public`` train, ``validation`` picks the round, ``test`` is looked at once.
    """

    name: str
    classes: int
    private: Samples
    public: Samples
    validation: Samples
    test: Samples


def rotated_mnist(
    root: Path, share: float, split: Split, rng: np.random.Generator, each: int = 100
) -> list[Domain]:
    """Rotated MNIST (papers/mafml, section 4.1.1): ``each`` images a class, in four rotations.

    75 % train, of which ``share`` of all is public; 10 % validate, 15 % test.

    Args:
        split: ``independent`` splits each domain anew (an image may train one domain and test
            another, rotated); ``by-image`` splits the images, the same way for all domains.

    Raises ValueError for a share that leaves nothing private.
    """
    images = load_mnist(root)
    chosen = np.concatenate(
        [rng.choice(np.flatnonzero(images.y == kind), each, replace=False) for kind in range(10)]
    )
    base, labels = images.x[chosen], images.y[chosen]
    order = rng.permutation(len(base))
    found = []
    for angle in ANGLES:
        turned = Images(turned_clockwise(base, angle)[:, None] if angle else base[:, None], labels)
        found.append(_domain(f"M{angle}", turned, order, share, 10, centred=False))
        if split == "independent":
            order = rng.permutation(len(base))
    return found


def pacs64(root: Path, share: float, rng: np.random.Generator, most: int = 1000) -> list[Domain]:
    """PACS at 64 x 64: at most ``most`` images a domain, drawn at random, split as above.

    The paper uses the publisher's split, whose test part holds the training images too.
    """
    found = []
    for name in PACS_DOMAINS:
        images = load_pacs64(root, name)
        order = rng.permutation(len(images.y))[:most]
        found.append(_domain(name, images, order, share, len(PACS_CLASSES), centred=True))
    return found


def everything(domains: Sequence[Domain], part: Literal["validation", "test"]) -> Samples:
    """One part of all domains, one after another."""
    parts = [getattr(domain, part) for domain in domains]
    return {name: np.concatenate([one[name] for one in parts]) for name in ("x", "y")}


def _domain(
    name: str,
    images: Images,
    order: NDArray[np.int64],
    share: float,
    classes: int,
    *,
    centred: bool,
) -> Domain:
    count = len(order)
    public, train = round(share * count), round(_TRAIN * count)
    if not 0 <= public < train:
        raise ValueError(f"a share of {share} leaves no private samples; expected below {_TRAIN}")
    ends = (public, train, train + round(_VALIDATION * count))
    shared, private, validation, test = np.split(order, ends)

    def samples(rows: NDArray[np.int64]) -> Samples:
        x = images.x[rows].astype(np.float32) / np.float32(255)
        if centred:
            x = (x - np.float32(0.5)) * np.float32(2)
        return {"x": x, "y": images.y[rows].astype(np.int64)}

    return Domain(
        name, classes, samples(private), samples(shared), samples(validation), samples(test)
    )
