from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.datasets.click import ClickSettings, load_clicks
from benchmarks.datasets.movielens import AGES, GENRES, read_100k
from benchmarks.harness import data_folder
from tests.benchmarks.made_up_movielens import made_up_movielens

SMALL = ClickSettings(
    users=40, least_by_user=10, most_by_movie_refused=2, most_ratings=20, history=4, devices=3
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_movielens(tmp_path_factory.mktemp("data"))


def test_every_sample_lies_on_one_device_in_one_part(root: Path) -> None:
    clicks = load_clicks(root, SMALL)
    seen: set[tuple[int, int]] = set()
    owner: dict[int, int] = {}
    for place, device in enumerate(clicks.devices):
        for part in (device.train, device.validation, device.test):
            assert len({len(array) for array in part.values()}) == 1
            for user, movie in part["categories"][:, :2].tolist():
                assert (user, movie) not in seen
                seen.add((user, movie))
                assert owner.setdefault(user, place) == place
    sizes = dict(clicks.sizes)
    assert sizes["user"] == len(owner) == 40
    assert all(movie < sizes["movie"] for _, movie in seen)
    by_user = np.bincount([user for user, _ in seen])
    assert by_user.max() <= 20 and by_user.min() >= 10


def test_parts_are_seven_to_one_to_two_within_each_user(root: Path) -> None:
    clicks = load_clicks(root, replace(SMALL, devices=1))
    device = clicks.devices[0]
    counts = [
        np.bincount(part["categories"][:, 0], minlength=40)
        for part in (device.train, device.validation, device.test)
    ]
    whole = sum(counts)
    np.testing.assert_array_equal(counts[2], np.maximum(1, np.round(0.2 * whole)))
    np.testing.assert_array_equal(counts[1], np.round(0.1 * whole))


def test_attributes_follow_their_user_and_movie(root: Path) -> None:
    clicks = load_clicks(root, SMALL)
    train = clicks.devices[0].train
    assert train["categories"].dtype == np.int64 and train["categories"].shape[1] == 5
    assert (train["genres"].sum(axis=1) == 2).all()
    by_movie: dict[int, float] = {}
    for row, year in zip(train["categories"], train["numbers"][:, 0], strict=True):
        assert by_movie.setdefault(int(row[1]), float(year)) == year
    assert len(set(by_movie.values())) == len(by_movie)  # each movie has a year of its own here


def test_histories_tell_neither_the_movie_nor_whether_it_was_liked(root: Path) -> None:
    clicks = load_clicks(root, SMALL)
    for device in clicks.devices:
        train = device.train
        liked = {
            (int(user), int(movie))
            for (user, movie), label in zip(train["categories"][:, :2], train["label"], strict=True)
            if label
        }
        lengths: dict[int, int] = {}
        for part in (train, device.validation, device.test):
            for row, history in zip(part["categories"], part["history"], strict=True):
                user, movie = int(row[0]), int(row[1])
                past = [int(one) for one in history if one >= 0]
                assert movie not in past
                assert len(set(past)) == len(past)
                assert all((user, one) in liked for one in past)
                assert lengths.setdefault(user, len(past)) == len(past)


def test_the_seed_decides_everything(root: Path) -> None:
    first, again = load_clicks(root, SMALL), load_clicks(root, SMALL)
    other = load_clicks(root, replace(SMALL, seed=1))
    for one, two in zip(first.devices, again.devices, strict=True):
        for name, array in one.train.items():
            np.testing.assert_array_equal(array, two.train[name])
    assert first.devices[0].train["label"].tolist() != other.devices[0].train["label"].tolist()


def test_what_is_missing_is_said_with_the_fix(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(FileNotFoundError, match="unpack MovieLens 1M"):
        load_clicks(tmp_path, SMALL)
    with pytest.raises(ValueError, match="55 users have at least 10 ratings"):
        load_clicks(root, replace(SMALL, users=56))
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))
    assert data_folder(None, "ml-1m") == tmp_path
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path / "none"))
    with pytest.raises(SystemExit):
        data_folder(None, "ml-1m")
    assert "set TESSERA_DATA (or --root) to the folder that holds ml-1m" in capsys.readouterr().err


def test_movielens_gives_the_numbers_that_are_reported() -> None:
    given = os.environ.get("TESSERA_DATA", "")
    if not (Path(given or ".") / "ml-1m" / "ratings_no_timestamp.dat").is_file():
        pytest.skip("TESSERA_DATA names no folder with ml-1m")
    clicks = load_clicks(Path(given), ClickSettings(history=1))
    assert dict(clicks.sizes)["user"] == 2000 and dict(clicks.sizes)["movie"] <= 3115
    samples = [len(device.train["label"]) for device in clicks.devices]
    assert len(samples) == 4 and max(samples) > 1.2 * min(samples)


def test_movielens_100k_is_read_into_the_same_tables(tmp_path: Path) -> None:
    folder = tmp_path / "ml-100k"
    folder.mkdir()
    (folder / "u.data").write_text("2\t1\t5\t881250949\n1\t2\t3\t891717742\n")
    (folder / "u.user").write_text("1|24|M|writer|85711\n2|7|F|artist|94043\n3|56|F|artist|1\n")
    flags = ["0"] * 19
    toy, unknown = flags.copy(), flags.copy()
    toy[3] = toy[5] = unknown[0] = "1"
    lines = [
        "1|Caf\xe9 Story (1995)|01-Jan-2000||http://x|" + "|".join(toy),
        "2|unknown||||" + "|".join(unknown),
    ]
    (folder / "u.item").write_text("\n".join(lines) + "\n", encoding="latin-1")
    with pytest.raises(FileNotFoundError, match=r"u\.occupation is missing: unpack MovieLens 100K"):
        read_100k(tmp_path)
    (folder / "u.occupation").write_text("artist\nwriter\n")
    found = read_100k(tmp_path)
    assert found.ratings.tolist() == [[2, 1, 5], [1, 2, 3]]
    assert found.people[1:].tolist() == [[0, AGES.index(18), 1], [1, 0, 0], [1, 6, 0]]
    assert [GENRES[place] for place in np.flatnonzero(found.genres[1])] == ["Animation", "Comedy"]
    assert not found.genres[2].any()
    assert found.years.tolist() == [0, 1, 0]
