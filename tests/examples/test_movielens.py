"""Reading MovieLens, splitting it, and what happens where it is missing."""

from __future__ import annotations

import hashlib
import io
import zipfile
from contextlib import AbstractContextManager, closing
from pathlib import Path

import numpy as np
import pytest

from examples.datasets import movielens_download
from examples.datasets.movielens import (
    DatasetError,
    data_root,
    leave_one_out,
    load_ml_100k,
    ml_100k_or_synthetic,
)
from examples.datasets.movielens_download import FILES, Readable, download_ml_100k

U_DATA = "7\t1\t5\t100\n7\t3\t4\t300\n9\t2\t1\t50\n7\t2\t3\t200\n9\t3\t2\t40\n"
U_ITEM = "1|Toy Story (1995)|x\n2|Mis\xe9rables, Les (1995)|x\n3|Heat (1995)|x\n4|Unseen|x\n"


def small(root: Path) -> Path:
    folder = root / "ml-100k"
    folder.mkdir(parents=True)
    (folder / "u.data").write_text(U_DATA, encoding="latin-1")
    (folder / "u.item").write_text(U_ITEM, encoding="latin-1")
    return root


def real(name: str) -> Path:
    root = data_root()
    if not (root / name).is_dir():
        pytest.skip(f"no {root / name}: set TESSERA_DATA to the folder of data sets")
    return root


def test_the_small_file_as_written(tmp_path: Path) -> None:
    ratings = load_ml_100k(small(tmp_path))
    assert ratings.user_ids == ("7", "9")
    assert ratings.titles == (
        "Toy Story (1995)",
        "Mis\xe9rables, Les (1995)",
        "Heat (1995)",
        "Unseen",
    )
    assert ratings.user.tolist() == [0, 0, 1, 0, 1]
    assert ratings.item.tolist() == [0, 2, 1, 1, 2]
    split = leave_one_out(ratings)
    assert split.test_item.tolist() == [2, 1]
    assert split.train.items_of(0).tolist() == [0, 1]
    assert split.train.items_of(1).tolist() == [2]
    assert split.train.item_ids == ratings.item_ids


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("u.data", "1\t2\n", "lines of 4 integers"),
        ("u.data", "a\tb\tc\td\n", "lines of 4 integers"),
        ("u.data", "1\t1\t1\t1\n1\t1\n", "2 in 1, 4 in 1 of them; it is not in GroupLens'"),
        ("u.data", "", "holds no rows"),
        ("u.data", "1\t99\t1\t1\n", "item 99 was rated but has no title"),
        ("u.item", "Toy Story\n", "no columns found"),
        ("u.item", "Toy Story|1995\n", "line 1: expected a number and a title"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, file: str, text: str, message: str) -> None:
    (small(tmp_path) / "ml-100k" / file).write_text(text)
    with pytest.raises(DatasetError, match=message):
        load_ml_100k(tmp_path)


def test_the_real_100k() -> None:
    root = real("ml-100k")
    ratings = load_ml_100k(root)
    assert (len(ratings.user), len(ratings.user_ids), len(ratings.item_ids)) == (100_000, 943, 1682)
    assert ratings.titles[0] == "Toy Story (1995)"
    split = leave_one_out(ratings)
    assert len(split.train) == 99_057
    published = root / "ml-100k" / "leave_one_out" / "ml-100k.test.rating"
    if published.is_file():
        latest = np.loadtxt(published, dtype=np.int64)
        times = dict(zip(latest[:, 0].tolist(), latest[:, 3].tolist(), strict=True))
        mine = {
            int(ratings.user_ids[user]): int(ratings.timestamp[row])
            for row, (user, item) in enumerate(zip(ratings.user, ratings.item, strict=True))
            if split.test_item[user] == item
        }
        assert mine == times


def archive() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as zipped:
        for name, text in zip(FILES, (U_DATA, U_ITEM, "terms"), strict=True):
            zipped.writestr(f"ml-100k/{name}", text.encode("latin-1"))
    return packed.getvalue()


def serving(data: bytes) -> movielens_download.Open:
    def open_address(url: str) -> AbstractContextManager[Readable]:
        assert url.startswith("https://files.grouplens.org/")
        return closing(io.BytesIO(data))

    return open_address


def test_a_download_is_checked_and_unpacked(tmp_path: Path) -> None:
    told: list[int] = []
    download_ml_100k(
        tmp_path,
        open_address=serving(archive()),
        progress=lambda done, total: told.append(done),
        sha256=hashlib.sha256(archive()).hexdigest(),
    )
    assert sorted(path.name for path in (tmp_path / "ml-100k").iterdir()) == sorted(FILES)
    assert load_ml_100k(tmp_path).user_ids == ("7", "9")
    assert told[-1] == len(archive())


def test_a_changed_or_endless_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="not the published archive"):
        download_ml_100k(tmp_path, open_address=serving(archive()))
    with pytest.raises(DatasetError, match="sends more than"):
        download_ml_100k(tmp_path, open_address=serving(bytes(movielens_download.BYTES + 1)))
    broken = b"no zip"
    with pytest.raises(DatasetError, match="cannot be written"):
        download_ml_100k(
            tmp_path, open_address=serving(broken), sha256=hashlib.sha256(broken).hexdigest()
        )
    assert list(tmp_path.iterdir()) == []


def test_the_data_come_from_the_first_place_that_has_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    here, there = tmp_path / "here", tmp_path / "there"

    def fail(folder: Path) -> None:
        raise DatasetError("no network")

    def fetch(folder: Path) -> None:
        small(folder)

    drawn, why = ml_100k_or_synthetic(here, there, download=fail, rng=rng)
    assert drawn.synthetic
    assert "SYNTHETIC" in drawn.name
    assert "no network" in why
    got, why = ml_100k_or_synthetic(here, there, download=fetch, rng=rng)
    assert not got.synthetic
    assert "downloaded" in why
    again, why = ml_100k_or_synthetic(here, there, download=fail, rng=rng)
    assert not again.synthetic
    assert str(there) in why
