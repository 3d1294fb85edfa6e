"""Reading interactions, and triples drawn from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.interactions import (
    Interactions,
    InteractionsError,
    read_interactions,
    read_pairs,
)

EXPECTED = {("u1", "a"), ("u1", "b"), ("u2", "a")}


def pairs(found: Interactions) -> set[tuple[str, str]]:
    rows = zip(found.user.tolist(), found.item.tolist(), strict=True)
    return {(found.user_ids[user], found.item_ids[item]) for user, item in rows}


@pytest.mark.parametrize(
    "text",
    [
        "u1,a\nu1,b\nu2,a\n",
        "user,item\nu1,a\nu1,b\nu2,a",
        "u1\ta\t5\t1\nu1\tb\t4\t2\nu2\ta\t1\t3\n",
        "u1::a::5\nu1::b::4\nu2::a::1\n",
        "u1;a\r\nu1;b\r\n\r\nu2;a\r\n",
        '"userId","movieId"\n"u1","a"\n"u1","b"\n"u2","a"\n',
        "rating,Item ID,User ID\n5,a,u1\n4,b,u1\n1,a,u2\n",
        "\ufeffuser,item\nu1,a\nu1,a\nu1,b\nu2,a\n",
    ],
)
def test_the_usual_formats_are_read_alike(tmp_path: Path, text: str) -> None:
    path = tmp_path / "views"
    path.write_bytes(text.encode())
    assert pairs(read_interactions(path)) == EXPECTED


def test_names_that_are_not_utf8_are_latin1(tmp_path: Path) -> None:
    path = tmp_path / "views"
    path.write_bytes("zoé,café\n".encode("latin-1"))
    assert pairs(read_interactions(path)) == {("zoé", "café")}


def test_pairs_come_in_the_files_order_each_once(tmp_path: Path) -> None:
    path = tmp_path / "views"
    path.write_text("u1,a\nu1,b\nu2,c\nu2,b\nu2,a\nu2,b\n")
    assert read_pairs(path) == [
        ("u1", "a"), ("u1", "b"), ("u2", "c"), ("u2", "b"), ("u2", "a"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no interactions"),
        (b"user,item\n", "holds no interactions"),
        (b"alone\n", "no columns found"),
        (b"u1,a\nu2\n", "line 2: expected a user and an item"),
        (b"u1,a\n,b\n", "line 2"),
        (b"u1,a\x00\n", "no text file"),
    ],
)
def test_files_without_interactions_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "views"
    path.write_bytes(data)
    with pytest.raises(InteractionsError, match=message):
        read_interactions(path)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(data)
    try:
        found = read_interactions(path)
    except InteractionsError:
        return
    assert len(found) > 0
    assert all(user and item for user, item in pairs(found))


def test_inconsistent_interactions_are_refused() -> None:
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    with pytest.raises(InteractionsError, match="two vectors of one length"):
        Interactions(one, two, ("u",), ("a",))
    with pytest.raises(InteractionsError, match="item row lies outside"):
        Interactions(one, one + 1, ("u",), ("a",))
    with pytest.raises(InteractionsError, match="one user twice"):
        Interactions(one, one, ("u", "u"), ("a",))


def test_users_are_found_by_name() -> None:
    found = Interactions.from_pairs([("anna", "x"), ("bob", "y"), ("bob", "x")])
    assert found.user_row("bob") == 1
    assert found.items_of(1).tolist() == [0, 1]
    assert found.items_of(0).tolist() == [0]
    with pytest.raises(InteractionsError, match="'eve' is not among the 2 users"):
        found.user_row("eve")
