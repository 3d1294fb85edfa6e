"""The one door between this program and a method's code, which may be any package's."""

from __future__ import annotations

import copy
import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from opcode import opmap
from typing import Any, Generic, TypeVar

import numpy as np

from aggregator.errors import CallOverdue, MethodFault
from aggregator.events import LogEvent
from aggregator.methods.method import (
    FINAL,
    Binding,
    Method,
    ModelMismatch,
    NoVersion,
    Refused,
    RoundSummary,
)
from device_sdk.artifact import Artifact
from device_sdk.methods.state import RestoreError, State
from device_sdk.wire.arrays.exchange import Broadcast, Update
from device_sdk.wire.codec.errors import WireError

_LOOK_SECONDS = 0.25


# Ends a call of somebody else's code that does not come back.


@dataclass(slots=True)
class _Call:
    call: str
    began_seconds: float
    told: bool = False
    ended: bool = False


class Patience:
    """Ends a call of a method's code that does not come back, by an exception raised inside it.

    It looks on from a thread of its own, one for all methods of this process. Python code is ended
    between two of its instructions, again and again where it catches that; a single call into
    native code only once it returns.
    """

    def __init__(self, most_seconds: float = 600.0, tell_seconds: float = 30.0) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.most_seconds = most_seconds
        self.tell_seconds = tell_seconds
        """After so long the log names the call."""
        self._running: dict[int, _Call] = {}  # by thread
        self._lock = threading.Lock()
        self._process = 0

    @property
    def within(self) -> bool:
        """Whether this thread is within a call, which is then the one to end."""
        return threading.get_ident() in self._running

    def began(self, call: str) -> None:
        """This thread begins a call."""
        if self._process != os.getpid():
            self._process = os.getpid()
            threading.Thread(target=self._look_on, name="tessera-patience", daemon=True).start()
        self._running[threading.get_ident()] = _Call(call, self.clock())

    def came_back(self) -> None:
        """The call is over; an exception that is on its way to it comes to nobody."""
        thread = threading.get_ident()
        while True:
            try:
                with self._lock:
                    running = self._running.pop(thread, None)
                    if running is not None and running.ended:
                        _raise_in(thread, None)
                return
            except CallOverdue:
                continue  # it came just now

    def _look_on(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            now = self.clock()
            with self._lock:
                for thread, running in list(self._running.items()):
                    self._look_at(thread, running, now - running.began_seconds)

    def _look_at(self, thread: int, running: _Call, seconds: float) -> None:
        if seconds > self.tell_seconds and not running.told:
            running.told = True
            LogEvent.METHOD_SLOW.log(
                call=running.call, seconds=seconds, most_seconds=self.most_seconds
            )
        if seconds > self.most_seconds:
            running.ended = True
            _raise_in(thread, CallOverdue)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Have a thread raise this at its next instruction; None: nothing, though it was asked for."""
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


PATIENCE = Patience()
"""Of this process."""


_RAISE = opmap["RAISE_VARARGS"]
_MOST_COUNTED = 2**63
_COMES_AND_GOES = re.compile(r"[0-9a-f]{32}|\|")
"""In the name of an array that a later state may lack: a device's id; what updates call it."""


def _asked_to_end(error: BaseException) -> bool:
    """Whether a signal raised it: Python's handler between two instructions of whatever runs, from
    no ``raise``, or a handler of our own."""
    trace = error.__traceback__
    if not isinstance(error, KeyboardInterrupt) or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    handler = getattr(signal.getsignal(signal.SIGINT), "__code__", None)
    return code is handler or code.co_code[trace.tb_lasti] != _RAISE


@contextmanager
def _calling(call: str, *allowed: type[Exception]) -> Iterator[None]:
    """The method's code runs. Raises what is ``allowed`` as it is, Ctrl-C too, and of all else a
    MethodFault: a ``SystemExit`` is no more this program's end than a ``ValueError``, and a call
    that does not come back is one that failed."""
    outermost = not PATIENCE.within
    try:
        try:
            if outermost:
                PATIENCE.began(call)  # from here on it may be ended at any instruction
            yield
        finally:
            if outermost:
                PATIENCE.came_back()
    except allowed:
        raise
    except BaseException as error:
        within = isinstance(error, MethodFault) and not isinstance(error, CallOverdue)
        if within or _asked_to_end(error):
            raise
        raise MethodFault(call, error) from error


_Kind = TypeVar("_Kind")


def _a(kind: type[_Kind], found: object) -> _Kind:
    """What was returned, which has to be of this kind."""
    if not isinstance(found, kind):
        raise TypeError(f"it returned {type(found).__name__}, expected {kind.__name__}")
    return found


def _count(found: object) -> int:
    """What was returned, a number that a store holds."""
    number = _a(int, found)
    if type(number) is not int or not 0 <= number < _MOST_COUNTED:
        raise ValueError(f"it returned {number!r:.40}, expected a whole number of 0 to 2^63 - 1")
    return number


def _of_round(found: object, round_id: int) -> Broadcast:
    """What was returned, which has to be of the round that was asked for."""
    broadcast = _a(Broadcast, found)
    if broadcast.round_id != round_id:
        raise ValueError(f"it returned a broadcast of round {broadcast.round_id}, not {round_id}")
    return broadcast


def _from(update: Update, sender: str, round_id: int) -> Update:
    """What was returned, which has to be of who sent it: whose it is, is no body's to say."""
    if update.sender != sender or update.round_id != round_id:
        raise ValueError("it returned an update of another round or sender than it was given")
    return update


def _summary(found: object) -> RoundSummary:
    """What was returned, of plain numbers."""
    summary = _a(RoundSummary, found)
    for number in (summary.round_id, summary.version, summary.participants):
        _count(number)
    for name, value in _a(Mapping, summary.metrics).items():  # type: ignore[type-abstract]
        if not isinstance(name, str) or not isinstance(value, (int, float)):
            raise TypeError(f"it returned the metric {name!r:.40}: {type(value).__name__}")
    return summary


def _nothing(found: object, *given: object) -> None:
    """Whatever was returned."""


def _refusals(found: object, updates: Sequence[Update]) -> list[Refused | None]:
    return _each(found, len(updates), Refused, type(None))


def _each(found: object, count: int, *kinds: type) -> list[Any]:
    """What was returned, a list with one of these kinds for each of ``count``."""
    listed = _a(list, found)
    odd = [type(each).__name__ for each in listed if not isinstance(each, kinds)]
    if len(listed) != count or odd:
        names = " or ".join(kind.__name__ for kind in kinds)
        wrong = f"{odd[0]} among {len(listed)}" if odd else str(len(listed))
        raise TypeError(f"it returned a list of {wrong}, expected {count}, each {names}")
    return listed


def _arrays(found: object) -> State:
    """What was returned, named arrays."""
    if not isinstance(found, Mapping):
        raise TypeError(f"it returned {type(found).__name__}, expected named arrays")
    for name, array in found.items():
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise TypeError(f"it returned {name!r}: {type(array).__name__}, expected named arrays")
    return found


# A state is full if the method can go on from it, and nothing is missing that it had before. No
# other is ever committed: the version before it would be lost.

_MOST_KEPT_BYTES = 1 << 29
"""Of a state, for the method that it is tried on to be kept: to build one takes a while, and a
large one memory."""
_Form = tuple[np.dtype[Any], int, bool]


def _forms(state: State) -> dict[str, _Form]:
    """Of each array that stays: its dtype, number of axes, and whether it is finite."""
    return {
        name: (array.dtype, array.ndim, _is_finite(array))
        for name, array in state.items()
        if not _COMES_AND_GOES.search(name)
    }


def _is_finite(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _require_forms(forms: Mapping[str, _Form], before: Mapping[str, _Form]) -> None:
    for name, (dtype, axes, finite) in before.items():
        if name not in forms:
            raise ValueError(f"it returned no {name!r}, which the state before has")
        if forms[name][:2] != (dtype, axes):
            raise ValueError(
                f"it returned {name!r} as {forms[name][0]} of {forms[name][1]} axes; the state "
                f"before has {dtype} of {axes}"
            )
        if finite and not forms[name][2]:
            raise ValueError(f"it returned {name!r} with numbers that are not finite")


def _require_alike(method: GuardedMethod, anew: GuardedMethod) -> None:
    """Raises ValueError where one that goes on from the other's state is another."""
    for what, one, other in (
        ("version", method.version, anew.version),
        ("adds_up", method.adds_up, anew.adds_up),
        ("model", method.model_arrays, anew.model_arrays),
        *([("share", method.share(), anew.share())] if method.adds_up else ()),
    ):
        if not _same(one, other):
            raise ValueError(f"another {what} is in a method that goes on from what it returned")


def _told(broadcast: Broadcast) -> dict[str, object]:
    attached = {n: (each.cohort, each.tensors) for n, each in broadcast.attachments.items()}
    return {
        "version": broadcast.version,
        "tensors": broadcast.tensors,
        "settings": broadcast.settings,
        "cohorts": broadcast.cohorts,
        "parts": {name: tensors for name, (_, tensors) in attached.items()},
        "readers": {name: cohort for name, (cohort, _) in attached.items()},
    }


def _same(one: object, other: object) -> bool:
    """Whether two values of a method are the same, to the bit."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return bool(np.array_equal(one, other)) or one.tobytes() == other.tobytes()
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return one == other


class GuardedBinding:
    """A binding whose code, and whose method's, may fail in any way: everybody who has one of the
    two has it from here. Raises what :class:`~aggregator.methods.method.Binding` says, and of all
    else :class:`MethodFault`."""

    def __init__(self, binding: Binding[Any]) -> None:
        self._binding = binding
        self.method_name = binding.method_name

    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> GuardedMethod:
        """See :class:`~aggregator.methods.method.Binding`."""
        drawn = copy.deepcopy(rng)
        with _calling("build", ValueError):
            made = self._binding.build(items, rng, artifacts)
        with _calling("build"):
            past = sorted(FINAL & _a(Method, made).__dict__.keys())  # type: ignore[type-abstract]
            if past:
                raise TypeError(f"{past[0]} is set on the object, past the stages of every method")
            return GuardedMethod(made, lambda: self._build_again(items, drawn, artifacts))

    def _build_again(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact]
    ) -> GuardedMethod:
        try:
            return self.build(items, copy.deepcopy(rng), artifacts)
        except ValueError as error:
            raise MethodFault("build", error) from error  # they did suit it

    @property
    def made_with(self) -> str:
        """The settings, in words: of other ones a state may hold less."""
        with _calling("settings"):
            return f"{self.method_name} {self._binding.settings!r}"

    def items_of(self, method: GuardedMethod) -> int:
        """See :class:`~aggregator.methods.method.Binding`."""
        with _calling("items_of"):
            return _count(self._binding.items_of(method.unguarded))

    def grow(self, method: GuardedMethod, items: int, rng: np.random.Generator) -> None:
        """See :class:`~aggregator.methods.method.Binding`."""
        with _calling("grow"):
            self._binding.grow(method.unguarded, items, rng)

    def decode(self, body: bytes, round_id: int, items: int, sender: str = "") -> Update:
        """See :class:`~aggregator.methods.method.Binding`."""
        with _calling("decode", WireError):
            found = _a(Update, self._binding.decode(body, round_id, items, sender))
            return _from(found, sender, round_id)

    def decode_each(
        self, bodies: Sequence[tuple[bytes, str]], round_id: int, items: int
    ) -> list[Update | WireError]:
        """See :class:`~aggregator.methods.method.Binding`."""
        with _calling("decode_each"):
            found = self._binding.decode_each(bodies, round_id, items)
            for each, (_, sender) in zip(
                _each(found, len(bodies), Update, WireError), bodies, strict=True
            ):
                if isinstance(each, Update):
                    _from(each, sender, round_id)
            return found

    def widths_of(self, updates: Sequence[Update | WireError]) -> list[int]:
        """What ``width_of`` says of each; 0 of what is no update."""
        width_of = self._binding.width_of
        with _calling("width_of"):
            found = [width_of(each) if isinstance(each, Update) else 0 for each in updates]
            return [_count(each) for each in found]


_Found = TypeVar("_Found")


def _door(
    call: str, read: Callable[..., _Found], *allowed: type[Exception]
) -> Callable[..., _Found]:
    """The method's ``call``, as :func:`_calling` has it; ``read`` gives what was returned, or
    raises where it is of another kind."""

    def through(self: GuardedMethod, *given: Any) -> _Found:
        with _calling(call, *allowed):
            return read(getattr(self.unguarded, call)(*given), *given)

    return through


class _Window(Generic[_Found]):
    """Likewise a property."""

    def __init__(self, call: str, read: Callable[[object], _Found]) -> None:
        self._call, self._read = call, read

    def __get__(self, method: GuardedMethod, kind: type[GuardedMethod]) -> _Found:
        with _calling(self._call):
            return self._read(getattr(method.unguarded, self._call))


class GuardedMethod:
    """A :class:`~aggregator.methods.method.Method` whose code may fail in any way; see
    :class:`GuardedBinding`. Its calls are the method's.

    ``anew`` makes another one, as a process that starts does.
    """

    def __init__(self, method: Method, anew: Callable[[], GuardedMethod]) -> None:
        self.unguarded = method
        self._anew = anew
        self._before: dict[str, _Form] | None = None
        self._tried_on: GuardedMethod | None = None

    version = _Window("version", _count)
    adds_up = _Window("adds_up", lambda found: _a(bool, found))
    full = _Window("full", lambda found: _a(bool, found))
    model_arrays = _Window("model_arrays", lambda found: None if found is None else _arrays(found))
    derived = _Window("derived", lambda found: _a(frozenset, found))
    fits = _door("fits", lambda found, name, array: _a(bool, found))
    open_round = _door("open_round", _of_round)
    check = _door("check", _nothing, Refused)
    check_each = _door("check_each", _refusals)
    share = _door("share", _arrays)
    merge = _door("merge", _nothing, RestoreError)
    close_round = _door("close_round", _summary, NoVersion)
    begin_with = _door("begin_with", _nothing, ModelMismatch)
    adopt = _door("adopt", _nothing, ModelMismatch)
    begin_at = _door("begin_at", _nothing)
    forget = _door("forget", _nothing)

    def take_each(self, decoded: Sequence[Update | WireError]) -> list[Update | WireError]:
        """What the method takes of ``decoded``; an error in the place of what it does not."""
        refused = iter(self.check_each([each for each in decoded if isinstance(each, Update)]))
        return [next(refused) or each if isinstance(each, Update) else each for each in decoded]

    @property
    def lowered(self) -> dict[str, str]:
        return self.unguarded.lowered

    def absorb(self, update: Update) -> None:
        self._absorb("absorb", update, 1)

    def absorb_each(self, updates: Sequence[Update]) -> None:
        self._absorb("absorb_each", updates, len(updates))

    def _absorb(self, call: str, given: object, count: int) -> None:
        with _calling(call):
            due = self.unguarded.participants + count
            getattr(self.unguarded, call)(given)
            if self.unguarded.participants != due:
                raise TypeError(f"{call} took an update past the stages of every method")

    def state(self) -> State:
        """A full one: of what no method can go on from, or lacks what this one's first state had,
        a MethodFault is raised."""
        with _calling("state"):
            found, _ = self._full_state()
            _require_alike(self, self._reopened(found))
            return found

    def next_version(self, round_id: int) -> tuple[State, Broadcast]:
        """A full state between two rounds, and the next one's broadcast, which one that goes on
        from that state gives too."""
        with _calling("state"):
            found, forms = self._full_state()
            kept_model = self.model_arrays is not None
            # Whatever a round does to arrays that were taken back, these are stored.
            own = found if kept_model else {name: array.copy() for name, array in found.items()}
            anew = self._reopened(own)
            _require_alike(self, anew)
        opened = self.open_round(round_id)
        if not kept_model:
            # All that there is to see of what it keeps.
            with _calling("state"):
                again = anew.open_round(round_id)
                if not _same(_told(opened), _told(again)):
                    raise ValueError(
                        "another broadcast comes from a method that goes on from what it returned"
                    )
        self._before = forms
        return found, opened

    def _full_state(self) -> tuple[State, dict[str, _Form]]:
        found = _arrays(self.unguarded.state())
        forms = _forms(found)
        if self._before is None:
            self._before = forms
        _require_forms(forms, self._before)
        return found, forms

    def _reopened(self, state: State) -> GuardedMethod:
        anew, self._tried_on = self._tried_on or self._anew(), None
        try:
            anew.restore(state)
        except RestoreError as error:
            raise ValueError(f"no method can go on from what it returned: {error}") from error
        if sum(array.nbytes for array in state.values()) <= _MOST_KEPT_BYTES:
            self._tried_on = anew
        return anew

    def restore(self, state: State) -> None:
        with _calling("restore", RestoreError):
            self.unguarded.restore(state)
        self._before = self._before or _forms(state)

    def settings_changed(self) -> None:
        """What was restored is of other settings, and these may have no use for some of it."""
        with _calling("state"):
            used = _arrays(self.unguarded.state())
        self._before = {name: form for name, form in (self._before or {}).items() if name in used}
