"""What a method gives to be stored is full, or it is not stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aggregator.errors import MethodFault
from aggregator.guard import GuardedBinding, GuardedMethod
from aggregator.methods.method import Binding, Method
from device_sdk.wire.arrays.exchange import Broadcast, Update

OWN = {"model", "momentum", "numbers"}
DEVICE = "ab" * 16


class Lenient(Method, stages=False):
    """A stranger's: ``restore`` takes whatever there is, and no model is told."""

    bounds = None

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {"model": np.zeros(3), "momentum": np.zeros(3)}
        self.gives: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state

    def tell(self) -> Broadcast:
        self.kept["momentum"][:] = self._round_id  # in place, which must not reach what is stored
        model = self.kept["model"].astype(np.float32)
        return Broadcast(self._round_id, self._version, {"model": model})

    def require(self, update: Update) -> None: ...

    def add(self, update: Update) -> None: ...

    def step(self) -> dict[str, float]:
        self.kept["model"] = self.kept["model"] + self.kept["momentum"]
        return {}

    def state(self) -> dict[str, Any]:
        found = {name: array.copy() for name, array in self.kept.items()}
        return self.gives({**found, "numbers": np.array([self._round_id, self._version])})

    def restore(self, state: Any) -> None:
        self.kept.update({n: a for n, a in state.items() if n != "numbers"})
        if "numbers" in state:
            self._round_id, self._version = map(int, state["numbers"])


class LenientBinding(Binding[None]):
    def build(self, *given: object) -> Method:
        return Lenient()


def made_anew() -> GuardedMethod:
    return GuardedBinding(LenientBinding("lenient", None)).build(0, np.random.default_rng(0))


def version_one() -> GuardedMethod:
    method = made_anew()
    method.state()
    close(method, 1)
    return method


def close(method: GuardedMethod, number: int) -> None:
    method.open_round(number)
    method.absorb(Update(number, {}))
    method.close_round()


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {n: a for n, a in state.items() if n != name}


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {**state, name: change(state[name])}


@pytest.mark.parametrize(
    ("gives", "why"),
    [
        (lambda state: {}, "it returned no"),
        *((without(name), f"it returned no '{name}'") for name in sorted(OWN)),
        (changed("momentum", lambda a: a.astype(np.float32)), "'momentum' as float32 of 1 axes"),
        (changed("momentum", lambda a: a[None]), "'momentum' as float64 of 2 axes"),
        (changed("momentum", lambda a: a * np.inf), "'momentum' with numbers that are not finite"),
        (changed("model", lambda a: a * 0), "another broadcast comes"),
        (changed("model", lambda a: a[:2]), "another broadcast comes"),
        (changed("numbers", lambda a: a * 0), "another version is in"),
        (changed("numbers", lambda a: a[:1]), "raised ValueError"),
    ],
)
def test_what_lacks_anything_is_refused_however_lenient_the_method_s_own_restore(
    gives: Callable[[dict[str, Any]], dict[str, Any]], why: str
) -> None:
    method = version_one()
    method.unguarded.gives = gives  # type: ignore[attr-defined]
    with pytest.raises(MethodFault, match=why):
        method.next_version(2)


def test_a_full_state_comes_back_as_it_was_though_one_that_goes_on_changes_its_own() -> None:
    state, opened = version_one().next_version(2)
    assert state.keys() == OWN and opened.round_id == 2 and opened.version == 1
    np.testing.assert_array_equal(state["momentum"], np.ones(3))
    np.testing.assert_array_equal(state["model"], np.ones(3))


def test_what_is_of_one_device_may_go_and_what_came_later_stays() -> None:
    method = version_one()
    method.unguarded.kept |= {f"vector.{DEVICE}": np.ones(2), "later": np.ones(2)}  # type: ignore[attr-defined]
    method.next_version(2)
    del method.unguarded.kept[f"vector.{DEVICE}"]  # type: ignore[attr-defined]
    method.absorb(Update(2, {}))
    method.close_round()
    state, _ = method.next_version(3)
    del method.unguarded.kept["later"]  # type: ignore[attr-defined]
    with pytest.raises(MethodFault, match="it returned no 'later'"):
        method.state()
    # Nor in another life, unless other settings have no use for it.
    for other in (False, True):
        again = made_anew()
        again.restore(state)
        del again.unguarded.kept["later"]  # type: ignore[attr-defined]
        if other:
            again.settings_changed()
            assert again.state().keys() == OWN
        else:
            with pytest.raises(MethodFault, match="it returned no 'later'"):
                again.state()
