from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from benchmarks.datasets.vmnist import VARIANTS, VmnistDevice, load_vmnist


def write_set(folder: Path, train: int, test: int, seed: int) -> None:
    """Images that carry their number in the first pixels of the middle rows."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for part, count in (("train", train), ("t10k", test)):
        images = np.zeros((count, 28, 28), np.uint8)
        images[:, 8:20, 8:20] = rng.integers(1, 256, (count, 12, 12))
        labels = rng.integers(0, 10, count).astype(np.uint8)
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz", "wb") as file:
            file.write(struct.pack(">4I", 0x803, count, 28, 28) + images.tobytes())
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(struct.pack(">2I", 0x801, count) + labels.tobytes())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vmnist")
    write_set(folder / "mnist", 15 * 15, 15 * 8, 1)
    write_set(folder / "fashion-mnist", 3 * 15, 3 * 8, 2)
    return folder


def devices(root: Path, seed: int = 0) -> list[VmnistDevice]:
    return load_vmnist(root, np.random.default_rng(seed), train=10, validation=5, test=8)


def test_three_devices_of_each_variant(root: Path) -> None:
    found = devices(root)
    assert [device.name for device in found[:4]] == [
        "digits.1",
        "digits.2",
        "digits.3",
        "rotated.1",
    ]
    assert [device.variant for device in found] == [v for v in VARIANTS for _ in range(3)]
    for device in found:
        for part, count in ((device.train, 10), (device.validation, 5), (device.test, 8)):
            assert part.x.shape == (count, 1, 28, 28)
            assert part.x.dtype == np.float32
            assert 0 <= part.x.min() <= part.x.max() <= 1
            assert part.y.dtype == np.int64


def test_no_image_is_used_twice(root: Path) -> None:
    plain = [device for device in devices(root) if device.variant == "digits"]
    parts = [part.x for one in plain for part in (one.train, one.validation, one.test)]
    images = np.concatenate(parts).reshape(-1, 28 * 28)
    assert len(np.unique(images, axis=0)) == len(images)


def test_variants_change_what_they_say(root: Path) -> None:
    found = {device.name: device.train.x[:, 0] for device in devices(root)}
    assert (found["digits.1"][:, :8] == 0).all()
    assert (found["noise.1"][:, :8] > 0).mean() > 0.9
    assert (found["pictures.1"][:, :8] > 0).any()
    assert (found["rotated.1"][:, 6:8] > 0).any()


def test_the_seed_decides_everything(root: Path) -> None:
    one, same, other = devices(root), devices(root), devices(root, 1)
    for a, b in zip(one, same, strict=True):
        np.testing.assert_array_equal(a.train.x, b.train.x)
    assert any(not np.array_equal(a.train.x, b.train.x) for a, b in zip(one, other, strict=True))
