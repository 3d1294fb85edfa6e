"""The aggregator's half of a federated method: its arithmetic, and what joins it to a task."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.bounds import Bounding, UpdateBounds
from aggregator.methods.model import Arrays, ModelMismatch
from aggregator.tables import TomlTable
from device_sdk.artifact import Artifact
from device_sdk.evaluation.report import STAGES, Stage
from device_sdk.fields import Fields, Within, is_settings
from device_sdk.methods.registry import METHODS, MethodError, load_method
from device_sdk.methods.state import State, part, prefixed
from device_sdk.wire.arrays.exchange import Broadcast, Update, decode_update
from device_sdk.wire.codec.errors import WireError


class Refused(WireError):
    """An update that the method will not take. ``reason`` is a slug, as for any refusal."""

    def __reduce__(self) -> tuple[type[Refused], tuple[str, str]]:
        return (Refused, (self.reason, str(self.args[0])))


class Said(Fields):
    """An update's metadata, read strictly. Raises Refused with reason ``bad-metadata``, in words
    that leave out the value: what a sender chose is not logged."""

    __slots__ = ()

    def error(self, key: str, what: str) -> Refused:
        return Refused("bad-metadata", f"{key} {what}")

    def wrong(self, key: str, value: object, expected: str) -> Refused:
        return self.error(key, f"is not {expected}")


LOSSES = Within(-1e12, 1e12)
"""What a device may say of its loss."""


class NoVersion(ArithmeticError):
    """What was absorbed makes no version that could be published, with these settings; the message
    says why, and what would help."""


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """How a round ended: ``version`` is the one to publish next, ``metrics`` are for people."""

    round_id: int
    version: int
    participants: int
    metrics: Mapping[str, float] = field(default_factory=dict)


class Method(ABC):
    """Aggregates one round after another. Pure arithmetic: no I/O, no clock, no randomness.

    Order of calls: ``open_round``, then any number of ``check`` and ``absorb``, then
    ``close_round``. A round without quorum is given up by opening the next one; what was absorbed
    is forgotten and the version stays.

    A round that *adds up* may be absorbed on several shards, each a method of the same state that
    opened the same round. :meth:`merge` takes what each absorbed into one of them, which then
    closes the round as if it had absorbed everything, bit for bit.

    Whoever calls these, of whatever class, an update is bounded before the class's own ``absorb``
    sees it: see :mod:`aggregator.methods.bounds`. What is held until the round closes comes to
    ``absorb`` then. ``bounds`` says what the updates are made of; None: the class bounds them by
    itself, which a test has to show (``tests/aggregator/methods/test_influence.py``).
    """

    bounds: ClassVar[UpdateBounds | None] = UpdateBounds()

    _round_id = 0
    _version = 0

    def __init_subclass__(cls) -> None:
        """A class that has a ``check`` or ``absorb`` of its own is not passed over by what another
        made of many at once; and all of its calls go through the stage that bounds updates."""
        for one in ("check", "absorb"):
            each = f"{one}_each"
            if one in cls.__dict__ and each not in cls.__dict__:
                setattr(cls, each, getattr(Method, each))
        bounded(cls)

    def expected(self, update: Update) -> Arrays:
        """What the round told this device about the tensors of its update, by their names, in
        their shapes: float; NaN where nothing is known. A tensor's distance from it is what is
        bounded, where the fleet is nearer to it than to zero.

        Here: what the broadcast holds under the same name, in the same shape.
        """
        told, tensors = self._bounding.told, update.tensors
        return {
            name: told[name]
            for name in tensors
            if name in told and told[name].shape == tensors[name].shape
        }

    @property
    def lowered(self) -> dict[str, str]:
        """Whose claims of samples counted for less than they said, and how: for people, who clear
        it. What is told is no part of the state."""
        return self._bounding.lowered

    @property
    def _bounding(self) -> Bounding:
        found = self.__dict__.get("_bounding_stage")
        if found is None:
            found = self.__dict__["_bounding_stage"] = Bounding(self.bounds or UpdateBounds())
        return cast("Bounding", found)

    @property
    def version(self) -> int:
        """The number of rounds that changed something."""
        return self._version

    def _begin(self, round_id: int) -> None:
        """Open the round by its number. Raises ValueError where it is not above the last one."""
        if round_id <= self._round_id:
            raise ValueError(f"round {round_id} does not follow round {self._round_id}")
        self._round_id = round_id

    def _require_round(self, update: Update) -> None:
        """Raises Refused, with reason ``bad-round``, for an update of another round."""
        if update.round_id != self._round_id or self._round_id == 0:
            raise Refused(
                "bad-round", f"the update is for round {update.round_id}, not {self._round_id}"
            )

    @abstractmethod
    def open_round(self, round_id: int) -> Broadcast:
        """Forget what was absorbed and open ``round_id``, which must be above the last one."""

    @abstractmethod
    def check(self, update: Update) -> None:
        """Raise :class:`Refused` unless ``absorb`` will take this update.

        Pure and total: changes nothing, and raises nothing but ``Refused`` whatever the arrays
        hold. Runs before the update is committed to disk.
        """

    @abstractmethod
    def absorb(self, update: Update) -> None:
        """Add a checked update. The same updates in the same order give the same bits; in any
        order, where the round adds up."""

    def check_each(self, updates: Sequence[Update]) -> list[Refused | None]:
        """What :meth:`check` has to say of each; None of a good one. Here one by one: for methods
        that are quicker with many at once."""
        found: list[Refused | None] = []
        for update in updates:
            try:
                self.check(update)
            except Refused as error:
                found.append(error)
            else:
                found.append(None)
        return found

    def absorb_each(self, updates: Sequence[Update]) -> None:
        """:meth:`absorb` of many, with the same bits. Where it raises, any number of them may have
        been absorbed: the state is to be made again."""
        for update in updates:
            self.absorb(update)

    @property
    def adds_up(self) -> bool:
        """Whether the open round's updates enter as sums, which several shards may make apart.

        Decided when the round opens, by settings and what was known then. Here: False.
        """
        return False

    @property
    def full(self) -> bool:
        """Whether the open round holds all that it may: ``check`` refuses any other update with
        reason ``round-full``. Here: where the stage that bounds updates does."""
        return self.bounds is not None and self._bounding.full

    def share(self) -> State:
        """What was absorbed in the open round, as named arrays (copies): sums, counts, and little
        else. Raises TypeError where it does not add up."""
        raise TypeError(f"a round of {type(self).__name__} does not add up")

    def merge(self, share: State) -> None:
        """Add another shard's :meth:`share`: in any order and grouping, the same bits. What an
        earlier round had, that made no version, may be added too.

        Raises :class:`~device_sdk.methods.state.RestoreError` for arrays that do not fit,
        :class:`~aggregator.methods.sums.RefusedShare` for those of a later round or another scale,
        and changes nothing then; TypeError where the round does not add up.
        """
        raise TypeError(f"a round of {type(self).__name__} does not add up")

    @abstractmethod
    def close_round(self) -> RoundSummary:
        """Make the next version out of what was absorbed; without updates the version stays.

        Raises :class:`NoVersion` where none can be made.
        """

    @abstractmethod
    def state(self) -> State:
        """Everything, the open round's sums included, as named arrays (copies)."""

    @abstractmethod
    def restore(self, state: State) -> None:
        """Continue, bit for bit, where ``state()`` was taken. Raises
        :class:`~device_sdk.methods.state.RestoreError`, and changes nothing, where it does not fit.
        """

    @property
    def model_arrays(self) -> Arrays | None:
        """The version's model as named arrays: copies. Here: None, for the devices keep theirs.

        What is kept of each version, and what :meth:`begin_with` and :meth:`adopt` take back.
        """
        return None

    @property
    def derived(self) -> frozenset[str]:
        """Names among :attr:`model_arrays` of what says how the others are used, and is not begun
        with. Here: none."""
        return frozenset()

    def fits(self, name: str, array: NDArray[Any]) -> bool:
        """Whether :meth:`begin_with` takes ``array`` under ``name``. Here: one of the shape that
        the own model's has."""
        own = (self.model_arrays or {}).get(name)
        return own is not None and own.shape == array.shape

    def begin_with(self, model: Arrays) -> None:
        """Begin with another model than the own one: its version is 0 still.

        What was learnt about the model's steps (momenta, a rate that decays) begins anew. Between
        rounds. Raises ModelMismatch, and changes nothing, where it does not fit.
        """
        raise ModelMismatch("the method keeps no model at the aggregator: each device has its own")

    def adopt(self, model: Arrays) -> None:
        """Make ``model`` the next version; as :meth:`begin_with` does otherwise."""
        self.begin_with(model)
        self._version += 1

    def begin_at(self, version: int) -> None:
        """Number the model, before the first round: a task that is replaced counts on."""
        self._version = version

    def forget(self, sender: str) -> None:  # noqa: B027
        """Drop what is kept of a device, where it is known: it was revoked. Between rounds.

        Here: nothing. For methods that hand on what single devices sent in earlier rounds.
        """


# The calls of a class as they are once the stage that bounds updates stands before them.
#
# Each is run as it is where another of them is running: a class may make one of another's, or of
# its parent's.

_Call = Callable[..., Any]
_STAGE = "bounds."


def bounded(kind: type[Method]) -> None:
    """Have a class's calls go through the stage, unless it bounds its updates by itself."""
    if kind.bounds is None:
        return
    for name, wrap in _STAGED.items():
        own = _found(kind, name)
        call = own.fget if isinstance(own, property) else own
        if call is None or hasattr(call, "staged") or own is Method.__dict__.get(name):
            continue
        if getattr(call, "__isabstractmethod__", False):
            continue
        made = _outermost(wrap, call)
        setattr(kind, name, property(made) if isinstance(own, property) else made)


def require_staged(method: Method) -> None:
    """See to it that all of an object's calls go through the stage, those too that its class got
    after it was made. Raises TypeError for a call that is set on the object alone."""
    bounded(type(method))
    past = sorted(_STAGED.keys() & method.__dict__.keys())
    if past and type(method).bounds is not None:
        raise TypeError(
            f"{past[0]} is set on the object, past the bounds of updates: define it in the class"
        )


def _found(kind: type[Method], name: str) -> Any:
    return next((each.__dict__[name] for each in kind.__mro__ if name in each.__dict__), None)


def _outermost(wrap: Callable[[Method, _Call], _Call], own: _Call) -> _Call:
    @functools.wraps(own)
    def call(self: Method, *arguments: Any) -> Any:
        inner = functools.partial(own, self)
        if self.__dict__.get("_in_stage") or type(self).bounds is None:
            return inner(*arguments)
        return wrap(self, inner)(*arguments)

    call.staged = True  # type: ignore[attr-defined]
    return call


@contextmanager
def _inside(method: Method) -> Iterator[None]:
    method.__dict__["_in_stage"] = True
    try:
        yield
    finally:
        del method.__dict__["_in_stage"]


def _open_round(self: Method, own: _Call) -> _Call:
    def open_round(round_id: int) -> Broadcast:
        with _inside(self):
            opened: Broadcast = own(round_id)
        self._bounding.begin(round_id)
        if type(self).expected is Method.expected:
            # In the state as long as the round is open: another process may have to go on.
            self._bounding.told = {
                name: each for name, each in opened.tensors.items() if each.dtype.kind == "f"
            }
        return opened

    return open_round


def _check(self: Method, own: _Call) -> _Call:
    def check(update: Update) -> None:
        with _inside(self):
            own(update)
        if (refused := _not_taken(self, update)) is not None:
            raise refused

    return check


def _check_each(self: Method, own: _Call) -> _Call:
    def check_each(updates: Sequence[Update]) -> list[Refused | None]:
        with _inside(self):
            found: list[Refused | None] = own(updates)
        return [one or _not_taken(self, each) for one, each in zip(found, updates, strict=True)]

    return check_each


def _not_taken(self: Method, update: Update) -> Refused | None:
    for values in update.tensors.values():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            return Refused("bad-values", "a value is not finite")
    if self._bounding.full:
        return Refused("round-full", "this round holds as many updates as memory is set aside for")
    return None


def _absorb(self: Method, own: _Call) -> _Call:
    def absorb(update: Update) -> None:
        if (counted := _taken_in(self, update)) is not None:
            with _inside(self):
                own(counted)

    return absorb


def _absorb_each(self: Method, own: _Call) -> _Call:
    def absorb_each(updates: Sequence[Update]) -> None:
        found = [_taken_in(self, update) for update in updates]
        with _inside(self):
            own([each for each in found if each is not None])

    return absorb_each


def _taken_in(self: Method, update: Update) -> Update | None:
    """An update as it counts; None where it is held."""
    stage = self._bounding
    if stage.holds:
        stage.held.add(update)
        return None
    expected = self.expected(update)
    stage.note(update, expected)
    return stage.bounded(update, expected)


def _close_round(self: Method, own: _Call) -> _Call:
    def close_round() -> RoundSummary:
        stage, before = self._bounding, self.version
        each = [(update, self.expected(update)) for update in stage.held]
        for update, expected in each:
            stage.note(update, expected)
        if each:
            stage.look_again()
        with _inside(self):
            for update, expected in each:
                self.absorb(stage.bounded(update, expected))
            summary: RoundSummary = own()
        acted = {"shortened": stage.shortened, "fewer_samples": stage.fewer}
        told = {name: float(count) for name, count in acted.items() if count}
        if summary.version != before:
            stage.settle()
        stage.begin(summary.round_id)
        return replace(summary, metrics={**summary.metrics, **told}) if told else summary

    return close_round


def _full(self: Method, own: _Call) -> _Call:
    return lambda: own() or self._bounding.full


def _adds_up(self: Method, own: _Call) -> _Call:
    return lambda: own() and not self._bounding.holds


def _state(self: Method, own: _Call) -> _Call:
    return lambda: {**own(), **prefixed(_STAGE, self._bounding.state())}


def _restore(self: Method, own: _Call) -> _Call:
    def restore(state: State) -> None:
        stage = self._bounding.restored(part(_STAGE, state))
        with _inside(self):
            own({name: array for name, array in state.items() if not name.startswith(_STAGE)})
        self.__dict__["_bounding_stage"] = stage

    return restore


def _share(self: Method, own: _Call) -> _Call:
    def share() -> State:
        if self._bounding.holds:
            raise TypeError("the round does not add up: its updates are held")
        return {**own(), **prefixed(_STAGE, self._bounding.share())}

    return share


def _merge(self: Method, own: _Call) -> _Call:
    def merge(share: State) -> None:
        stage = self._bounding.restored(self._bounding.state())
        stage.told = self._bounding.told
        stage.merge(part(_STAGE, share))
        with _inside(self):
            own({name: array for name, array in share.items() if not name.startswith(_STAGE)})
        self.__dict__["_bounding_stage"] = stage

    return merge


_STAGED: Mapping[str, Callable[[Method, _Call], _Call]] = {
    "open_round": _open_round,
    "check": _check,
    "check_each": _check_each,
    "absorb": _absorb,
    "absorb_each": _absorb_each,
    "close_round": _close_round,
    "full": _full,
    "adds_up": _adds_up,
    "state": _state,
    "restore": _restore,
    "share": _share,
    "merge": _merge,
}


def taken_of(method: Method, decoded: Sequence[Update | WireError]) -> list[Update | WireError]:
    """What the method takes of ``decoded``; an error in the place of what it does not."""
    refused = iter(method.check_each([each for each in decoded if isinstance(each, Update)]))
    return [next(refused) or each if isinstance(each, Update) else each for each in decoded]


Settings = TypeVar("Settings")


MOST_ARTIFACTS = 32


@dataclass(frozen=True, slots=True)
class Binding(Generic[Settings], ABC):
    """A method as a task has it: its name and settings, and how its messages are read.

    It has no state. The defaults are those of a method on local arrays: no catalogue, models from
    artifacts, updates of named arrays. A method says what its ``settings_class`` is and how it is
    built from it.
    """

    method_name: str
    """The name that devices are told."""
    settings: Settings

    settings_class: ClassVar[type[Any]]
    """A frozen dataclass, read from the task file's table of the method's name."""
    needs_catalogue: ClassVar[bool] = False
    """Whether the task must have a catalogue; without the need it has none."""
    artifacts: ClassVar[range] = range(1, MOST_ARTIFACTS + 1)
    """How many artifacts a task may list."""

    @classmethod
    def read(cls, method_name: str, table: TomlTable) -> Self:
        """Read the method's table. Raises TaskError, naming the key, and MethodError for a class
        that lacks what a binding has to say."""
        lacks = sorted(cls.__abstractmethods__)
        if not is_settings(getattr(cls, "settings_class", None)):
            lacks.append("settings_class, a frozen dataclass")
        if lacks:
            raise MethodError(f"the binding {cls.__qualname__} lacks {' and '.join(lacks)}")
        return cls(method_name, table.read(cls.settings_class))

    @property
    def trains_artifacts(self) -> bool:
        """Whether devices train those that a task lists; else they are not told of them."""
        return True

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Which models the devices evaluate; versions are compared by the first unless the task
        says otherwise. Here: the one that they receive, and their own."""
        return STAGES

    @property
    def note(self) -> str:
        """What an operator should know of the settings, though nothing is wrong; here: nothing."""
        return ""

    @abstractmethod
    def build(
        self, items: int, rng: np.random.Generator, artifacts: Sequence[Artifact] = ()
    ) -> Method:
        """A method at version 0 for a catalogue of ``items`` items and the task's artifacts,
        smallest first.

        Raises ValueError where the artifacts do not suit it.
        """

    def items_of(self, method: Method) -> int:
        """The length of the catalogue that ``method`` is at; 0 without a catalogue."""
        return 0

    def grow(self, method: Method, items: int, rng: np.random.Generator) -> None:
        """Lengthen the catalogue to ``items``, between rounds; the version rises by one."""
        raise TypeError(f"{self.method_name} has no catalogue that could grow")

    def decode(self, body: bytes, round_id: int, items: int, sender: str = "") -> Update:
        """The update in ``body`` of the device ``sender``. Raises ``WireError``; pure and total."""
        return decode_update(body, round_id, sender)

    def decode_each(
        self, bodies: Sequence[tuple[bytes, str]], round_id: int, items: int
    ) -> list[Update | WireError]:
        """The updates in many bodies, each with its sender, as :meth:`decode` has them; an error in
        the place of a bad one. Here one by one: for methods that are quicker with many at once."""
        found: list[Update | WireError] = []
        for body, sender in bodies:
            try:
                found.append(self.decode(body, round_id, items, sender))
            except WireError as error:
                found.append(error)
        return found

    def width_of(self, update: Update) -> int:
        """How much of the model the device trained (its k), for the operator's eyes; 0 where the
        method has no such thing."""
        return 0


def read_binding(method: str, table: TomlTable) -> Binding[Any]:
    """A task's binding, from the installed package that offers the method.

    ``table``: the one of the method's name. Raises MethodError, and TaskError, naming the key.
    """
    kind: type[Binding[Any]] = load_method(METHODS, method, Binding)
    return kind.read(method, table)


# A learning rate of the devices that falls from round to round.

RateDecay = Annotated[float, Within(0, 1, above=True)]
"""A round's factor."""
_LEAST = 1e-9
"""Never quite 0, which devices refuse or take for the artifact's own."""


def rate_at(learning_rate: float, rate_decay: float, round_id: int) -> float:
    """``learning_rate`` as it is in round ``round_id``, counted from 1."""
    return max(_LEAST, learning_rate * rate_decay ** (round_id - 1))
