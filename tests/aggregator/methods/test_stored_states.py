"""What earlier versions stored of a method, and what no version would have stored."""

from __future__ import annotations

import re

import numpy as np
import pytest

from aggregator.methods.method import OlderRound
from device_sdk.methods.state import RestoreError, State
from tests.aggregator.methods.stored_states import CASES, FLOATS, stored
from tests.fuzz.method_targets import METHOD_NAMES

# A device's own arrays: a method keeps them as they came, having checked them then.
_AS_IT_CAME = re.compile(r"held\.(values|said)\..*|(new\.)?public\..*|(new\.)?labels\..*\.labels")


def laid_out(state: State) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (one.dtype.str, one.shape, one.tobytes()) for name, one in state.items()}


def test_every_built_in_method_has_a_stored_state() -> None:
    assert {case.method for case in CASES.values()} == set(METHOD_NAMES)


@pytest.mark.parametrize("name", CASES)
def test_a_state_of_an_earlier_version_is_taken_back_as_it_was(name: str) -> None:
    case = CASES[name]
    one = case.build()
    for when in ("end", "middle"):
        one.restore(stored(name, when))
        assert laid_out(one.state()) == laid_out(stored(name, when))
    case.go_on(one)
    found, wanted = one.state(), stored(name, "end")
    assert set(found) == set(wanted)
    for key, array in wanted.items():
        # Sums differ in their last bits from one processor to another.
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape)
        np.testing.assert_allclose(found[key], array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_this_version_makes_the_states_of_the_earlier_one(name: str) -> None:
    found, wanted = CASES[name].middle().state(), stored(name, "middle")
    assert {key: one.shape for key, one in found.items()} == {
        key: one.shape for key, one in wanted.items()
    }
    for key, array in wanted.items():
        assert found[key].dtype == array.dtype
        np.testing.assert_allclose(found[key], array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(name: str) -> None:
    one, good = CASES[name].build(), stored(name, "middle")
    one.restore(good)
    for key, array in good.items():
        if _AS_IT_CAME.fullmatch(key):
            continue
        bad = [array.astype(np.complex64), array[None]]
        if array.dtype.kind == "f":
            bad.append(np.full_like(array, np.nan))
        for each in bad:
            if each.size or each.shape != array.shape:
                with pytest.raises(RestoreError, match=re.escape(key.rpartition(".")[2])):
                    one.restore({**good, key: each})
    for odd in ({**good, "more": np.zeros(1)}, {}):
        with pytest.raises(RestoreError, match="expected"):
            one.restore(odd)
    assert laid_out(one.state()) == laid_out(good)


@pytest.mark.parametrize("name", FLOATS)
def test_a_version_whose_sums_were_floats_is_gone_on_with(name: str) -> None:
    """Its model, moments, touches and voices; a round that was open then is absorbed anew."""
    case, old = CASES[name], stored(name, "end", "floats")
    one = case.build()
    before = laid_out(one.state())
    with pytest.raises(OlderRound, match="earlier version had open"):
        one.restore(stored(name, "middle", "floats"))
    assert laid_out(one.state()) == before
    one.restore(old)
    found = one.state()
    for key in set(found) & set(old) - {"counters", "limits.fleet.recent.values"}:
        # Of the voices the latest comes first now.
        wanted = old[key][::-1] if key.endswith("settled.values") else old[key]
        assert found[key].tobytes() == wanted.tobytes(), key
    assert found["counters"][:2].tolist() == old["counters"][:2].tolist()
    number = len(case.rounds) + 2
    one.open_round(number)
    known = "limits.fleet.settled.values" in old
    assert one.adds_up == (known and "many" not in name)
    for device in (1, 2, 3):
        update = case.update(number, device)
        one.check(update)
        one.absorb(update)
    assert one.close_round().version == len(case.rounds) + 1
    for bad in ({**old, "more": np.zeros(1)}, {**old, "counters": old["counters"][:1]}):
        with pytest.raises(RestoreError):
            case.build().restore(bad)
