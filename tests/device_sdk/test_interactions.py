"""Interactions as rows of users and items."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from device_sdk.interactions import Interactions, InteractionsError, read_interactions


def test_inconsistent_interactions_are_refused() -> None:
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    with pytest.raises(InteractionsError, match="two vectors of one length"):
        Interactions(one, two, ("u",), ("a",))
    with pytest.raises(InteractionsError, match="item row lies outside"):
        Interactions(one, one + 1, ("u",), ("a",))
    with pytest.raises(InteractionsError, match="one user twice"):
        Interactions(one, one, ("u", "u"), ("a",))


def test_users_are_found_by_name_and_have_their_items_in_order() -> None:
    found = Interactions.from_pairs([("anna", "x"), ("bob", "y"), ("bob", "x"), ("bob", "z")])
    assert found.user_row("bob") == 1
    assert found.items_of(1).tolist() == [1, 0, 2]
    assert found.items_of(0).tolist() == [0]
    with pytest.raises(InteractionsError, match="'eve' is not among the 2 users"):
        found.user_row("eve")


def test_of_a_pair_that_is_given_twice_the_last_time_counts() -> None:
    pairs = [("anna", "x"), ("bob", "x"), ("anna", "y"), ("anna", "x")]
    found = Interactions.from_pairs(pairs)
    assert list(found.pairs()) == [("anna", "y"), ("anna", "x"), ("bob", "x")]


@pytest.mark.parametrize("stamp", ["7", "2024-01-02", ""])
def test_the_order_of_a_files_rows_decides_nothing_where_there_are_times(
    tmp_path: Path, stamp: str
) -> None:
    rows = [f"user-{user},item-{item},{stamp}" for user in range(400) for item in range(4)]
    first = "1999-01-01" if "-" in stamp else "3"
    rows += [f"user-{user},first,{first}" for user in range(400)]
    rng = np.random.default_rng(1)
    found = []
    for name in ("as-it-is", "shuffled"):
        path = tmp_path / name
        path.write_text("\n".join(("user,item,time", *rows)))
        table = read_interactions(path)
        found.append(
            {
                user: [table.item_ids[item] for item in table.items_of(row)]
                for row, user in enumerate(table.user_ids)
            }
        )
        rng.shuffle(rows)
    assert found[0] == found[1]
    assert ("numbers, no dates" in table.understood[1]) == ("-" not in stamp)
    # A draw is for no item: a quarter of 400 each, within four standard deviations.
    tied = [items[-1] if stamp else items[0] for items in found[0].values()]
    assert all(65 < tied.count(f"item-{item}") < 135 for item in range(4))
    assert any(
        "400 users have several items at their latest time" in e for e in table.understood
    ) == bool(stamp)
