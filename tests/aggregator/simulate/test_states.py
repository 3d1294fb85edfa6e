from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from aggregator.simulate.devices import StateStore

DTYPES = st.sampled_from([np.dtype(name) for name in ("float32", "float64", "int64", "bool")])
STATES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=5),
    arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)),
    max_size=4,
)


@given(st.lists(st.tuples(st.integers(0, 3), STATES), max_size=8))
def test_what_is_got_is_what_was_put_last(puts: list[tuple[int, dict[str, Any]]]) -> None:
    store, expected = StateStore(), {}
    for device, state in puts:
        store.put(device, state)
        expected[device] = state
    for device, state in expected.items():
        found = store.get(device)
        assert (found or {}).keys() == state.keys()
        for name, array in (found or {}).items():
            assert array.dtype == state[name].dtype and array.shape == state[name].shape
            assert array.tobytes() == state[name].tobytes()
            array[...] = 0  # a copy, which may be written to


def test_a_scatter_devices_state_takes_little_more_than_its_vector() -> None:
    store = StateStore()
    for device in range(100):
        pool, deck = np.arange(10) + 3000, np.arange(48)
        store.put(device, {"users": np.ones((1, 64), np.float32), "pool": pool, "deck": deck})
    assert store.nbytes == 100 * (256 + 10 * 2 + 48 + 4 * 4 + 2)
