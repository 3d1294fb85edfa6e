"""V-MNIST: eighteen devices, six variants of handwriting, three devices each.

After papers/fedamn, section 4.1 (and Larochelle et al. 2007, whose variant sets are not available
here): digits, rotated digits, digits on noise, digits on pictures, rotated digits on pictures, and
Fashion-MNIST. The pictures behind digits are Fashion-MNIST's own images, two of them added up,
mirrored and shifted at random, at half the brightness: not the photographs of the original.
"""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Variant = Literal["digits", "rotated", "noise", "pictures", "rotated-pictures", "fashion"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
DEVICES_A_VARIANT = 3

Images = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class VmnistPart:
    """Images ``x`` float32 [n, 1, 28, 28] in 0 to 1, classes ``y`` int64 [n]."""

    x: Images
    y: Labels


@dataclass(frozen=True, slots=True, eq=False)
class VmnistDevice:
    """One device; no image is on two devices or in two parts."""

    name: str
    variant: Variant
    train: VmnistPart
    validation: VmnistPart
    test: VmnistPart


def load_vmnist(
    root: Path,
    rng: np.random.Generator,
    *,
    train: int = 400,
    validation: int = 200,
    test: int = 400,
) -> list[VmnistDevice]:
    """The devices, variant by variant: ``digits.1`` to ``fashion.3``.

    ``root`` is the folder that holds ``mnist`` and ``fashion-mnist``; training and validation
    images come from the sets' training parts, test images from their test parts. ``rng`` draws
    images, angles (0 to 360 degrees), noise (uniform) and pictures. Raises FileNotFoundError where
    a set is missing, ValueError where so many images are not there.
    """
    digits = {part: read_pictures(root / "mnist", part) for part in ("train", "t10k")}
    fashion = {part: read_pictures(root / "fashion-mnist", part) for part in ("train", "t10k")}
    sizes = {"train": train + validation, "t10k": test}
    orders = {
        (name, part): iter(np.split(_drawn(rng, len(source[part][1]), size, devices), devices))
        for name, source, devices in (("digits", digits, 15), ("fashion", fashion, 3))
        for part, size in sizes.items()
    }
    found = []
    for variant in VARIANTS:
        name, source = ("fashion", fashion) if variant == "fashion" else ("digits", digits)
        for number in range(1, DEVICES_A_VARIANT + 1):
            parts = {}
            for part in sizes:
                rows = next(orders[name, part])
                images, labels = source[part]
                shown = changed(images[rows], variant, fashion[part][0], rng)
                parts[part] = VmnistPart(shown[:, None], labels[rows])
            whole = parts["train"]
            found.append(
                VmnistDevice(
                    f"{variant}.{number}",
                    variant,
                    VmnistPart(whole.x[:train], whole.y[:train]),
                    VmnistPart(whole.x[train:], whole.y[train:]),
                    parts["t10k"],
                )
            )
    return found


def _drawn(rng: np.random.Generator, there: int, each: int, devices: int) -> NDArray[np.int64]:
    if each * devices > there:
        raise ValueError(f"{devices} devices with {each} images each, but there are {there}")
    return rng.permutation(there)[: each * devices].astype(np.int64)


def changed(images: Images, variant: Variant, pictures: Images, rng: np.random.Generator) -> Images:
    """Images [n, 28, 28] as a variant shows them, with ``pictures`` [m, 28, 28] behind some."""
    if variant in ("rotated", "rotated-pictures"):
        angles = rng.uniform(0, 360, len(images))
        turned = [
            ndimage.rotate(image, angle, reshape=False, order=1)
            for image, angle in zip(images, angles, strict=True)
        ]
        images = np.stack(turned).astype(np.float32)
    if variant == "noise":
        images = np.maximum(images, rng.random(images.shape, dtype=np.float32))
    if variant in ("pictures", "rotated-pictures"):
        images = np.maximum(images, _backgrounds(pictures, len(images), rng))
    return np.clip(images, 0.0, 1.0)


def _backgrounds(pictures: Images, count: int, rng: np.random.Generator) -> Images:
    total = np.zeros((count, *pictures.shape[1:]), dtype=np.float32)
    for _ in range(2):
        chosen = pictures[rng.integers(len(pictures), size=count)]
        mirrored = rng.random(count) < 0.5
        chosen = np.where(mirrored[:, None, None], chosen[:, :, ::-1], chosen)
        shifts = rng.integers(28, size=(count, 2))
        total += np.stack(
            [
                np.roll(image, (int(down), int(right)), axis=(0, 1))
                for image, (down, right) in zip(chosen, shifts, strict=True)
            ]
        )
    return np.asarray(total * 0.5, dtype=np.float32)


def read_pictures(folder: Path, part: str) -> tuple[Images, Labels]:
    """The ``train`` or ``t10k`` pictures of a set in idx files: float32 [n, 28, 28] in 0 to 1, and
    their classes."""
    images = _idx(folder / f"{part}-images-idx3-ubyte.gz", 3)
    labels = _idx(folder / f"{part}-labels-idx1-ubyte.gz", 1)
    return images.astype(np.float32) / 255, labels.astype(np.int64)


def _idx(path: Path, rank: int) -> NDArray[np.uint8]:
    with gzip.open(path, "rb") as file:
        data = file.read()
    magic, *shape = struct.unpack_from(f">{rank + 1}I", data)
    if magic != 0x0800 + rank:
        raise ValueError(f"{path} is no idx file of rank {rank}")
    return np.frombuffer(data, dtype=np.uint8, offset=4 * (rank + 1)).reshape(shape)
