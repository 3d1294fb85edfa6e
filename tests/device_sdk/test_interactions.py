"""Interactions as rows of users and items."""

from __future__ import annotations

import numpy as np
import pytest

from device_sdk.interactions import Interactions, InteractionsError


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
