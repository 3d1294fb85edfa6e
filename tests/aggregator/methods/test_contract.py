"""What holds of every method, whatever its formula is: rounds, states, and what check lets in."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.method import Method, Refused
from aggregator.methods.scatter import ScatterMethod, ScatterSettings, initial_items
from aggregator.methods.server_optimizer import OptimizerSettings
from aggregator.store.versions import pack_state, unpack_state
from device_sdk.methods.state import RestoreError
from device_sdk.wire.arrays.exchange import Update
from tests.fakes.method_cases import CASES, ITEMS, OTHERS, START, WIDTH, Case, spoilt_updates
from tests.fakes.scatter_updates import ONE_WIDTH


def with_options(name: str, **chosen: Any) -> Case:
    """A method of ``CASES`` or ``OTHERS`` under other settings."""
    case = {**CASES, **OTHERS}[name]
    if name == "fedavg":
        weights = {"w": START.reshape(4, 6)}
        return replace(case, make=lambda: FedAvgMethod(weights, {}, FedAvgSettings(**chosen)))
    first = initial_items(ITEMS, WIDTH, 0.1, np.random.default_rng(0))
    loss: Any = {"loss": "bpr"} if "triples" in name else {"least_squares": ONE_WIDTH}
    return replace(case, make=lambda: ScatterMethod(first, ScatterSettings(**loss, **chosen)))


GUARDED = {"item_multiple": 1.25, "outlier_multiple": 3.0, "row_multiple": 1.5}
ADAM = OptimizerSettings(name="adam", learning_rate=0.1, decay=0.9)
ALL = {
    **CASES,
    **OTHERS,
    "scatter, guarded": with_options("scatter", **GUARDED),
    "scatter, median": with_options("scatter", robust="median", outlier_multiple=3.0),
    "scatter by triples, guarded": with_options("scatter by triples", **GUARDED),
    "scatter by triples, trimmed": with_options("scatter by triples", robust="trimmed"),
    "fedavg, adam": with_options("fedavg", optimizer=ADAM, outlier_multiple=1.5),
    "fedavg, median": with_options("fedavg", robust="median", clip_multiple=2.0),
}
every_method = pytest.mark.parametrize("case", ALL.values(), ids=ALL)


def updates(case: Case, number: int) -> list[Update]:
    return [case.honest(number, d, np.random.default_rng([number, d])) for d in range(8)]


def in_round(case: Case, number: int, absorbed: int = 3) -> Method:
    """In the midst of a round, with the first so many of its updates."""
    method = case.make()
    for each in range(1, number + 1):
        method.open_round(each)
        for update in updates(case, each)[: absorbed if each == number else None]:
            method.check(update)
            method.absorb(update)
        if each < number:
            method.close_round()
    return method


def bits(method: Method) -> bytes:
    return pack_state(method.state())


state_in_round = functools.cache(lambda case, number: bits(in_round(case, number)))


@pytest.mark.parametrize("number", [1, 2, 3])
@every_method
def test_a_state_in_the_midst_of_a_round_goes_on_bit_for_bit(case: Case, number: int) -> None:
    one, other = in_round(case, number), case.make()
    other.restore(unpack_state(pack_state(one.state())))
    for each in (one, other):
        for update in updates(case, number)[3:]:
            each.absorb(update)
    assert bits(one) == bits(other)
    assert one.close_round() == other.close_round()
    told, again = (each.open_round(number + 1) for each in (one, other))
    assert pack_state(told.tensors) == pack_state(again.tensors)
    assert told.attachments.keys() == again.attachments.keys()
    assert bits(one) == bits(other)


@every_method
def test_a_round_that_is_given_up_leaves_no_trace(case: Case) -> None:
    one, other = in_round(case, 3), in_round(case, 2, 8)
    other.close_round()
    for each in (one, other):
        each.open_round(4)
    assert bits(one) == bits(other)
    summary = one.close_round()
    assert (summary.version, summary.participants) == (2, 0), "nor does one without updates"
    told, again = one.open_round(5), other.open_round(5)
    assert pack_state(told.tensors) == pack_state(again.tensors)
    for stale in (5, 4):
        with pytest.raises(ValueError, match="does not follow"):
            one.open_round(stale)
        with pytest.raises(Refused) as refused:
            one.check(updates(case, stale - 1)[0])
        assert refused.value.reason == "bad-round"


@pytest.mark.parametrize("number", [1, 2])
@every_method
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(case: Case, number: int) -> None:
    one, other = in_round(case, number), in_round(case, 2, 5)
    good, before = one.state(), bits(other)
    bad = [{}, {**good, "more": np.zeros(1)}]
    for name, array in good.items():
        if name.startswith("bounding.told."):
            continue  # whatever the round told
        bad += [{n: a for n, a in good.items() if n != name}]
        bad += [{**good, name: array[None]}, {**good, name: array.astype(np.complex64)}]
        if array.dtype.kind == "f" and array.size and ".values." not in name:  # of updates
            bad += [{**good, name: np.full_like(array, np.nan)}]
        if array.dtype == np.int64 and array.ndim == 0 and "exponent" not in name:
            bad += [{**good, name: np.full_like(array, -1)}]
    for state in bad:
        with pytest.raises(RestoreError):
            other.restore(state)
    assert bits(other) == before
    kept = bits(one)
    for array in good.values():
        array.fill(0)
    assert bits(one) == kept, "what was given is a copy"


@every_method
@settings(max_examples=20, deadline=None)
@given(data=st.data(), number=st.integers(1, 2))
def test_check_changes_nothing_and_what_it_lets_in_can_be_absorbed(
    case: Case, data: st.DataObject, number: int
) -> None:
    method = case.make()
    method.restore(unpack_state(state_in_round(case, number)))
    good = updates(case, number)[3]
    candidate = data.draw(spoilt_updates(good))
    before = bits(method)
    try:
        method.check(candidate)
    except Refused:
        assert bits(method) == before
        return
    assert bits(method) == before
    with np.errstate(all="ignore"):
        method.absorb(candidate)
    assert method.close_round().participants == 4
    for array in method.state().values():
        assert array.dtype.kind != "f" or np.isfinite(array).all()
