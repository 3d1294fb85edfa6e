"""What a device's owner has removed from its home is in none of its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from device_sdk.errors import UnknownUser
from device_sdk.home.home import Home, forget

ROWS = {"anna": "anna's film", "bert": "bert's film", "cleo": "cleo's film"}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home", create=True)
    made.interactions.add((user, item) for user, item in ROWS.items())
    made.interactions.add([("cleo", "shared"), ("anna", "shared")])
    users = np.arange(6, dtype=np.float32).reshape(3, 2)
    made.models.save_learner("films", {"users": users, "pool": np.array([1, 2])}, None)
    return made


def held(home: Home) -> bytes:
    return b"".join(path.read_bytes() for path in home.folder.iterdir() if path.is_file())


def test_a_user_goes_with_all_that_was_recorded_and_learnt(home: Home) -> None:
    assert forget(home, "bert", None) == 1
    assert home.interactions.place("bert") is None
    assert b"bert" not in held(home), "what was deleted is still in a file"
    state = home.models.learner("films")
    np.testing.assert_array_equal(state["users"], [[0, 1], [4, 5]])
    np.testing.assert_array_equal(state["pool"], [1, 2])
    # Those behind take the place, with what is theirs.
    assert [home.interactions.place(name) for name in ("anna", "cleo")] == [0, 1]
    assert sorted(home.interactions.items_of(1)) == ["cleo's film", "shared"]
    assert home.interactions.add([("dora", "film")]) == 1 and home.interactions.place("dora") == 2


def test_an_item_goes_from_one_user_or_from_all(home: Home) -> None:
    assert forget(home, "anna", "shared") == 1
    assert sorted(home.interactions.items_of(2)) == ["cleo's film", "shared"]
    assert forget(home, None, "shared") == 1
    assert forget(home, None, "never seen") == 0
    assert home.interactions.counts() == (3, 3) and b"shared" not in held(home)


def test_nobody_is_forgotten_by_a_slip(home: Home) -> None:
    with pytest.raises(UnknownUser, match="'dora'; here: anna, bert, cleo"):
        forget(home, "dora", None)
    assert home.interactions.counts() == (3, 5)
