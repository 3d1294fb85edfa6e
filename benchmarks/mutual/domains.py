"""The domains of the paper's two experiments: one device each, four parts each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.datasets.mnist import Images, load_mnist
from benchmarks.datasets.pacs import PACS_CLASSES, PACS_DOMAINS, load_pacs64
from benchmarks.datasets.rotation import turned_clockwise

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
