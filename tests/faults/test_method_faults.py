"""A method's code fails, at any call and in any way: its task is held, and no other."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator import guard
from aggregator.errors import MethodFault
from aggregator.guard import PATIENCE, GuardedBinding
from aggregator.methods.method import Method, RoundSummary
from aggregator.rounds.machine import held
from aggregator.serve.assembly import World, assemble
from aggregator.serve.outgoing import Outgoing
from aggregator.serve.service import Service
from aggregator.serve.tasks import TaskParts
from aggregator.store import Store
from aggregator.store.versions import pack_state
from aggregator.task.file import read_task
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.methods.state import RestoreError
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.receipts import UpdateIdentity, write_update
from tests.attacks.simulated_broker import SimulatedBroker, StandInLink
from tests.fakes.homes import command, make_home
from tests.fakes.outputs import output_of
from tests.fakes.scatter_updates import one_user
from tests.fakes.sealed_rounds import Device
from tests.fakes.tasks import add_task, task_text
from tests.faults.known import ITEMS, KnownBinding, known_body

DEVICES = 3
ROUND = f"quorum = {DEVICES - 1}\ndeadline_seconds = 60\npause_seconds = 0"
Fault = Callable[[], Any]
"""What a call does instead: raises, or returns what it may not."""


def _raises(error: Callable[[], BaseException]) -> Fault:
    def fail() -> Any:
        raise error()

    return fail


FAULTS: dict[str, Fault] = {
    "ValueError": _raises(lambda: ValueError("a slip")),
    "MemoryError": _raises(MemoryError),
    "RecursionError": _raises(lambda: RecursionError("too deep")),
    "OSError": _raises(lambda: OSError(28, "No space left on device")),
    "OperationalError": _raises(lambda: sqlite3.OperationalError("database is locked")),
    "StopIteration": _raises(StopIteration),
    "GeneratorExit": _raises(GeneratorExit),
    "KeyboardInterrupt": _raises(KeyboardInterrupt),
    "SystemExit": _raises(lambda: SystemExit(3)),
    "TypeError": lambda: object(),
}
EACH_ROUND = ("decode_each", "check_each", "absorb_each", "close_round", "open_round", "state")
AT_TIMES = ("adds_up", "full", "model_arrays", "width_of", "build", "restore", "items_of", "forget")
BY_THE_OPERATOR = ("adopt", "grow")
RETURN_NOTHING = ("absorb_each", "restore", "forget", "adopt", "grow")


class Spoilt(KnownBinding):
    """The method of another package: the call ``spoilt`` fails while there is a ``fault``."""

    __slots__ = ()
    spoilt = ""
    fault: Fault | None = None

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == Spoilt.spoilt and Spoilt.fault is not None:
            return lambda *given: Spoilt.fault()  # type: ignore[misc]
        return found

    def build(self, *given: Any) -> Method:
        made = super().build(*given)
        made.__class__ = _spoilt(type(made))
        return made


def _spoilt(kind: type) -> type:
    def get(self: Any, name: str) -> Any:
        if name == Spoilt.spoilt and Spoilt.fault is not None:
            if isinstance(getattr(kind, name, None), property):
                return Spoilt.fault()
            return lambda *given: Spoilt.fault()  # type: ignore[misc]
        return object.__getattribute__(self, name)

    return type(kind.__name__, (kind,), {"__getattribute__": get})


def _air_body() -> bytes:
    tensors = one_user(8, range(2), np.full(2, 0.01))
    return encode_scatter_update(Update(1, tensors), 8, "float32")


class Served:
    """Two tasks of a fleet, of which the first has the method that is spoilt; devices that send
    again until there is a verdict."""

    def __init__(self, folder: Path) -> None:
        self.home = make_home(folder, "mqtt://127.0.0.1:1", ROUND)
        lines = [f"item-{row}\tTitle {row}\n" for row in range(ITEMS)]
        (self.home.folder / "items.tsv").write_text("".join(lines))
        self.devices = [Device(place).id for place in range(DEVICES)]
        with closing(self.home.open_store().database) as database, database.transaction():
            for place in range(DEVICES):
                Store(database).devices.add(Device(place).row())
        add_task(self.home, "air", task_text(self.home, "air", ROUND))
        self.now = 1_000.0
        self.start()

    def start(self) -> None:
        """The process starts."""
        store = self.home.open_store()
        task = replace(read_task(self.home.task_file), binding=Spoilt())
        began = store.facts.generation
        world = World(
            lambda: self.now,
            lambda: began + self.now,
            np.random.default_rng(1),
            sleep=lambda seconds: None,
        )
        parts = assemble(self.home, store, task, world)
        link: Any = StandInLink(SimulatedBroker(), ())
        self.parts = replace(parts, link=link, outgoing=Outgoing(link, store.retained))
        self.service = Service(self.parts)

    def restart(self) -> None:
        """It was killed, and starts again."""
        self.parts.store.database.close()
        self.start()

    @property
    def store(self) -> Store:
        return self.parts.store

    def version(self, place: int) -> int:
        """Of a task, as the store has it."""
        found = self.store.task(place + 1).checkpoints.get("version")
        return 0 if found is None else found.version

    def turn(self) -> None:
        """Every device sends what is awaited of it, and the service does what is due."""
        for parts in self.parts.tasks.served:
            for place, device in enumerate(self.devices):
                self._send(parts, place, device)
        self.now += 1.0
        self.service.turn()

    def _send(self, parts: TaskParts, place: int, device: bytes) -> None:
        row = parts.rounds.current
        if row is None or parts.store.log.verdict(row.generation, row.round, device) is not None:
            return
        name = parts.task.name
        body = _air_body() if name == "air" else known_body(place, row.generation, row.round)
        identity = UpdateIdentity(device, name, row.generation, row.round)
        try:
            self.parts.inbox.offer(device, write_update(identity, body))
        except WireError as error:
            assert error.reason == "not-served"

    def run_until(self, true: Callable[[], bool], turns: int = 30) -> None:
        for _ in range(turns):
            if true():
                return
            self.turn()
        assert true()

    def makes_versions(self, place: int, more: int = 2) -> None:
        """A task goes on."""
        wanted = self.version(place) + more
        self.run_until(lambda: self.version(place) >= wanted)

    def close(self) -> None:
        self.store.database.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    Spoilt.spoilt, Spoilt.fault = "", None
    made = Served(tmp_path)
    yield made
    Spoilt.spoilt, Spoilt.fault = "", None
    made.close()


def _provoke(served: Served, call: str) -> None:
    """What makes the framework come to a call that no round needs."""
    if call == "adopt":
        assert command(served.home, "rollback", "--task", "default", "--to", "1") == 0
    elif call == "grow":
        task = served.parts.first.task
        assert task.catalogue is not None
        with task.catalogue.open("a") as file:
            file.write("one-more\tOne more\n")
    elif call == "forget":
        device = served.devices[-1].hex()
        assert command(served.home, "revoke", device) == 0
        served.devices.pop()


def _require_each_counted_once(served: Served) -> None:
    """What was committed is in one version each, and nothing was taken twice or given up."""
    log, items = served.store.first.log, served.parts.first.aggregation.state()["items"][:ITEMS]
    assert not log.quarantined()
    made = [row for row in served.store.first.rounds.latest(ITEMS) if row.next_version is not None]
    for row in made:
        assert row.participants == log.counted(row.generation, row.round)
        # The device's own column has a 1 for each time that it was counted.
        counts = items[row.round % ITEMS, 1 : 1 + DEVICES]
        assert set(counts.tolist()) <= {0.0, 1.0} and counts.sum() == row.participants
    assert items[:, 1 : 1 + DEVICES].sum() == sum(row.participants or 0 for row in made)


CALLS = [*EACH_ROUND, *AT_TIMES, *BY_THE_OPERATOR]


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        *zip(CALLS, cycle(each for each in FAULTS if each != "TypeError")),
        *zip(CALLS, cycle(["TypeError"])),
    ],
)
def test_whatever_call_fails_holds_its_task_alone_and_it_goes_on_once_mended(
    call: str, kind: str, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "TypeError" and call in RETURN_NOTHING:
        return
    _holds_alone_and_goes_on(served, call, kind, caplog)


def _holds_alone_and_goes_on(
    served: Served, call: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    served.makes_versions(0)
    served.makes_versions(1)
    Spoilt.spoilt, Spoilt.fault = call, FAULTS[kind]
    _provoke(served, call)
    for life in range(2):
        if life:
            served.restart()
        served.makes_versions(1)
        why = held(served.store.first)
        if why is None:
            # Only a process that starts comes to such a call, or asks for such a value once.
            assert life == 0 and call in AT_TIMES
            continue
        assert f"the method's {call} raised {kind}" in why or "could not" in why
        assert held(served.store.task(2)) is None
        traces = [each.exc_info for each in caplog.records if each.exc_info]
        assert traces, "the log has the traceback"
    assert held(served.store.first) is not None
    before = served.version(0)
    Spoilt.fault = None
    served.restart()
    served.makes_versions(0)
    served.makes_versions(1)
    assert held(served.store.first) is None and served.version(0) >= before + 2
    if call != "adopt":
        _require_each_counted_once(served)


def test_status_says_what_happened_where_and_what_to_do(
    served: Served, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    Spoilt.spoilt, Spoilt.fault = "check_each", FAULTS["ValueError"]
    served.makes_versions(1)
    out = output_of(capsys, served.home, "status")
    for words in ("is held: the method's check_each raised ValueError: a slip", "restart serve"):
        assert words in out
    assert "test_method_faults.py, line" in out
    # Mended, and let go by hand, it goes on without a restart.
    Spoilt.fault = None
    assert command(served.home, "release") == 0
    served.makes_versions(0)


def test_what_cannot_be_made_at_the_start_is_held_with_the_same_words(served: Served) -> None:
    served.makes_versions(0)
    Spoilt.spoilt, Spoilt.fault = "build", FAULTS["ValueError"]
    served.restart()
    assert "the method's build raised ValueError" in str(held(served.store.first))
    # Nobody is told what is not so: the devices send again.
    row = served.parts.first.rounds.current
    assert row is not None
    served.turn()
    assert not served.store.first.log.waiting()


def test_a_state_that_it_made_itself_and_does_not_take_back_holds_the_task_alone(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.makes_versions(0)
    Spoilt.spoilt, Spoilt.fault = "restore", _raises(lambda: RestoreError("of another shape"))
    for _ in range(2):
        served.restart()
        served.makes_versions(1)
        assert "the stored state does not fit" in str(held(served.store.first))
    Spoilt.fault = None
    served.restart()
    served.makes_versions(0)
    _require_each_counted_once(served)


Spoil = Callable[[dict[str, Any]], dict[str, Any]]
LESS_THAN_A_STATE: dict[str, Spoil] = {
    "nothing": lambda state: {},
    "without the model": lambda state: {n: a for n, a in state.items() if n != "items"},
    "without what may begin anew": lambda state: {
        n: a for n, a in state.items() if n != "bounding.length"
    },
    "another shape": lambda state: {**state, "items": state["items"][1:]},
    "another dtype": lambda state: {**state, "items": state["items"].astype(np.float64)},
    "not finite": lambda state: {**state, "items": state["items"] * np.float32("nan")},
    "another version": lambda state: {**state, "counters": state["counters"] * 0},
    "another model": lambda state: {**state, "items": state["items"] * 0},
}


@pytest.mark.parametrize("what", LESS_THAN_A_STATE)
def test_a_state_that_is_not_full_is_never_committed_and_the_version_before_stays(
    what: str, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.makes_versions(0)
    before = served.store.first.checkpoints.get("version")
    assert before is not None

    def less() -> Any:
        made = served.parts.first.aggregation._method.unguarded
        return LESS_THAN_A_STATE[what](object.__getattribute__(made, "state")())

    Spoilt.spoilt, Spoilt.fault = "state", less
    for life in range(2):
        if life:
            served.restart()
        served.makes_versions(1)
        assert "the method's state raised" in str(held(served.store.first))
        stored = served.store.first.checkpoints.get("version")
        assert stored is not None and pack_state(stored.state) == pack_state(before.state)
    Spoilt.fault = None
    served.restart()
    served.makes_versions(0)
    assert held(served.store.first) is None
    _require_each_counted_once(served)


def _life(served: Served) -> int:
    """A process of its own that serves until either task has made two more versions; its exit
    code."""
    served.store.database.close()
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        served.start()
        return code
    code = 1
    try:
        served.start()
        wanted = [served.version(place) + 2 for place in (0, 1)]
        served.run_until(lambda: all(served.version(p) >= wanted[p] for p in (0, 1)))
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("call", ["decode_each", "absorb_each", "close_round", "state"])
def test_a_method_that_ends_the_process_loses_nothing_of_its_task_or_another(
    call: str, served: Served
) -> None:
    served.makes_versions(0)
    served.makes_versions(1)
    Spoilt.spoilt, Spoilt.fault = call, lambda: os._exit(7)
    before = [served.version(place) for place in (0, 1)]
    assert [_life(served) for _ in range(2)] == [7, 7]
    Spoilt.fault = None
    assert _life(served) == 0
    assert all(served.version(place) >= before[place] + 2 for place in (0, 1))
    assert held(served.store.first) is None and held(served.store.task(2)) is None
    _require_each_counted_once(served)
    for row in served.store.task(2).rounds.latest(ITEMS):
        if row.next_version is not None:
            assert row.participants == served.store.task(2).log.counted(row.generation, row.round)


class Mute(Exception):
    """One that cannot even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


WRONG: dict[str, tuple[str, Fault]] = {
    "an error without words": ("check_each", _raises(Mute)),
    "a count that no store holds": ("width_of", lambda: 2**70),
    "a count below zero": ("width_of", lambda: -1),
    "items below zero": ("items_of", lambda: -1),
    "a broadcast of another round": ("open_round", lambda: Broadcast(99, 0, {})),
    "a version that no store holds": ("close_round", lambda: RoundSummary(1, 2**70, 3)),
    "a count of nothing": ("close_round", lambda: RoundSummary(1, 5, None)),  # type: ignore[arg-type]
    "a metric that is no number": ("close_round", lambda: RoundSummary(1, 5, 3, {"loss": "low"})),  # type: ignore[dict-item]
    "another device's update": (
        "decode_each",
        lambda: [Update(1, {}, {}, "ab" * 16)] * DEVICES,
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_of_the_right_kind_and_cannot_be_holds_the_task_alone(
    what: str, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.makes_versions(0)
    Spoilt.spoilt, Spoilt.fault = WRONG[what]
    for life in range(2):
        if life:
            served.restart()
        served.makes_versions(1)
        if life or Spoilt.spoilt != "items_of":  # which only a process that starts asks for
            assert f"the method's {Spoilt.spoilt} raised" in str(held(served.store.first))
    Spoilt.fault = None
    served.restart()
    served.makes_versions(0)
    _require_each_counted_once(served)


@pytest.mark.parametrize("call", ["check_each", "close_round", "state"])
@pytest.mark.parametrize("caught", [0, 2])
def test_a_call_that_does_not_come_back_is_ended_and_holds_its_task_alone(
    call: str,
    caught: int,
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    monkeypatch.setattr(PATIENCE, "clock", lambda: now[0])

    def endless() -> None:
        now[0] += 1000.0
        for _ in range(caught):
            with suppress(Exception):
                while True:
                    pass
        while True:
            pass

    served.makes_versions(0)
    Spoilt.spoilt, Spoilt.fault = call, endless
    for life in range(2):
        if life:
            served.restart()
        served.makes_versions(1)
        assert "it did not return in time" in str(held(served.store.first))
    assert f"a method's {call} has run for" in caplog.text
    Spoilt.fault = None
    served.restart()
    served.makes_versions(0)
    _require_each_counted_once(served)


def test_a_call_that_comes_back_as_it_is_ended_is_a_call_that_came_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PATIENCE, "most_seconds", 0.0)
    monkeypatch.setattr(guard, "_LOOK_SECONDS", 0.0)
    binding, ended = GuardedBinding(KnownBinding()), 0
    for _ in range(300):
        try:
            binding.widths_of([])
        except MethodFault as error:
            assert "did not come back" in str(error)
            ended += 1
    monkeypatch.undo()
    for _ in range(1000):
        binding.widths_of([])  # nothing that was on its way comes later


def test_ctrl_c_in_the_midst_of_a_method_is_no_fault_of_it() -> None:
    class Slow(KnownBinding):
        __slots__ = ()

        def build(self, *given: Any) -> Method:
            signal.raise_signal(signal.SIGINT)
            return super().build(*given)

    def asked_twice(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # A shell starts what it runs in the background with the signal ignored.
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.default_int_handler, asked_twice):
            signal.signal(signal.SIGINT, handler)
            with pytest.raises(KeyboardInterrupt):
                GuardedBinding(Slow()).build(1, np.random.default_rng(0))
    finally:
        signal.signal(signal.SIGINT, before)

    class Rude(KnownBinding):
        __slots__ = ()

        def build(self, *given: Any) -> Method:
            raise KeyboardInterrupt

    with pytest.raises(MethodFault, match="build raised KeyboardInterrupt"):
        GuardedBinding(Rude()).build(1, np.random.default_rng(0))
