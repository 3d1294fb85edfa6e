"""The aggregator's half of a federated method: its arithmetic, and what joins it to a task."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from aggregator.methods.bounds import Bounding, Judged, Sized, TensorBounding, UpdateBounds
from aggregator.methods.robust import HeldUpdates
from aggregator.methods.sums import MOST_UPDATES, Additive, RefusedShare
from aggregator.tables import TomlTable
from device_sdk.artifact import Artifact
from device_sdk.artifact.flat_layout import FlatLayout
from device_sdk.artifact.submodels import Submodel
from device_sdk.evaluation.report import SERVED, Stage
from device_sdk.fields import Fields, Within, is_settings
from device_sdk.methods.registry import METHODS, MethodError, load_method
from device_sdk.methods.state import COUNT, Entry, Schema, State
from device_sdk.wire.arrays.exchange import Broadcast, TrainingSettings, Update, decode_update
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


# A dtype compares with another at once, with a scalar type only after making one of it.
FLOAT32 = np.dtype(np.float32)


def require_floats(name: str, values: NDArray[Any], shape: tuple[int, ...]) -> None:
    """Raises :class:`Refused` with reason ``bad-values`` unless these are float32 of the shape."""
    if values.dtype != FLOAT32 or values.shape != shape:
        raise Refused(
            "bad-values", f"{name} are {values.dtype} {values.shape}; expected float32 {shape}"
        )


def require_within(values: NDArray[Any], most: float) -> None:
    """Raises :class:`Refused` with reason ``bad-values`` where one is larger by size, or no
    number."""
    # NaN fails the comparison too.
    if values.size and not float(np.abs(values).max()) <= most:
        raise Refused("bad-values", "a value is not finite or is absurdly large")


def late_weight(age: int | None) -> float:
    """(1 + age)^-1/2, for an update of ``age`` versions ago (Nguyen et al. 2022, Federated learning
    with buffered asynchronous aggregation, section 5); 1 for one of this version.

    It multiplies what the update moves, and not the weight that the sum is divided by: what a round
    of old updates moves is less far.
    """
    return 1 / math.sqrt(1 + (age or 0))


class NoVersion(ArithmeticError):
    """What was absorbed makes no version that could be published, with these settings; the message
    says why, and what would help."""


# A model as named arrays: what is kept of a version, and what one may begin with.

Arrays = Mapping[str, NDArray[Any]]
_MOST_NAMED = 12


class ModelMismatch(ValueError):
    """Arrays that are no model of the method, which is unchanged; the message says how."""


def fitted(
    wanted: Mapping[str, tuple[int, ...]], given: Arrays, ignored: Collection[str] = ()
) -> dict[str, NDArray[np.float32]]:
    """The arrays of these names and shapes, as float32, in the order of ``wanted``.

    ``ignored``: names that may be given and are not asked for. Raises ModelMismatch.
    """
    odd = [f"{name!r} {list(wanted[name])} is missing" for name in wanted if name not in given]
    odd += [f"{name!r} is unknown" for name in given if name not in wanted and name not in ignored]
    for name, shape in wanted.items():
        array = given.get(name)
        if array is None:
            continue
        if array.shape != shape or array.dtype.kind != "f":
            found = f"{array.dtype} {list(array.shape)}"
            odd.append(f"{name!r} is {found}, expected float32 {list(shape)}")
        elif not np.isfinite(array.astype(np.float32)).all():
            odd.append(f"{name!r} holds numbers that are not finite")
    if odd:
        more = f"; and {len(odd) - _MOST_NAMED} more" if len(odd) > _MOST_NAMED else ""
        raise ModelMismatch("; ".join(odd[:_MOST_NAMED]) + more)
    return {name: given[name].astype(np.float32) for name in wanted}


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """How a round ended: ``version`` is the one to publish next, ``metrics`` are for people."""

    round_id: int
    version: int
    participants: int
    metrics: Mapping[str, float] = field(default_factory=dict)


FINAL = frozenset(
    {"open_round", "check", "check_each", "absorb", "absorb_each", "close_round", "participants"}
    | {"adds_up", "full", "share", "merge", "state", "restore", "version", "lowered"}
)
"""What no class redefines."""


class Method(Additive, ABC):
    """A method's formula, and the stages that every method gets around it.

    An update goes through **decode** (:meth:`Binding.decode`), **bound**
    (:mod:`aggregator.methods.bounds`), **weigh and sum** (:meth:`add`); a round's end is **make the
    version** (:meth:`step`). A method writes :meth:`tell`, :meth:`require`, :meth:`add` and
    :meth:`step`, and declares what it keeps: :meth:`schema`, and in ``ADDED`` what of it the open
    round adds up, which is zero when a round begins. Rounds, bounds, what is held, checkpoints and
    shards are the stages', which no class redefines. All is pure arithmetic: no I/O, no clock, no
    randomness.

    Order of calls: ``open_round``, then any number of ``check`` and ``absorb``, then
    ``close_round``. A round without quorum is given up by opening the next one; what was absorbed
    is forgotten and the version stays.

    A round that *adds up* may be absorbed on several shards, each a method of the same state that
    opened the same round. :meth:`merge` takes what each absorbed into one of them, which then
    closes the round as if it had absorbed everything, bit for bit.

    Attributes:
        bounds: what the updates are made of, for the stage that bounds them; None: the class bounds
            them by itself, which ``tests/aggregator/methods/test_influence.py`` has to show.
        SHARDS: whether rounds may add up: all that ``add`` changes is whole numbers named in
            ``ADDED``, and parts that add up.
        TAKES_LATE: whether updates of earlier versions may enter: ``add`` multiplies what they move
            by :func:`late_weight`, once it is bounded.
    """

    bounds: ClassVar[UpdateBounds | None] = UpdateBounds()
    SHARDS: ClassVar[bool] = False
    TAKES_LATE: ClassVar[bool] = False
    PARTS: ClassVar[tuple[str, ...]] = ("bounding", "held")
    ADDED: ClassVar[tuple[str, ...]] = ("participants",)

    _bounding: Bounding
    _held: HeldUpdates
    _round_id = 0
    _version = 0
    _participants = 0

    def __new__(cls, *given: object, **named: object) -> Self:
        found = super().__new__(cls)
        found._bounding = Bounding() if cls.bounds is None else TensorBounding(cls.bounds)
        found._held = HeldUpdates()
        return found

    def __init_subclass__(cls, *, stages: bool = True) -> None:
        """Raises TypeError for a class that redefines a stage, past which updates could go."""
        own = sorted(FINAL & cls.__dict__.keys())
        if stages and own:
            raise TypeError(
                f"{cls.__qualname__} redefines {own[0]}, a stage that every method gets: write "
                "tell, require, add and step"
            )
        if "require" in cls.__dict__ and "sound_together" not in cls.__dict__:
            # What another class sees at a glance is not what this one asks.
            cls.sound_together = Method.sound_together  # type: ignore[method-assign]

    # -- the formula -------------------------------------------------------------------------------

    @abstractmethod
    def tell(self) -> Broadcast:
        """What the round that opens tells the devices: of ``_round_id`` and ``_version``."""

    @abstractmethod
    def require(self, update: Update) -> None:
        """Raise :class:`Refused` unless ``add`` will take this update, which is of the open round.

        Pure and total: changes nothing, and raises nothing but ``Refused`` (a WireError is taken
        for one) whatever the arrays hold. Runs before the update is committed to disk.
        """

    @abstractmethod
    def add(self, update: Update) -> None:
        """Add an update, as it counts, to the round's sums. The same updates in the same order give
        the same bits; in any order, where the round adds up."""

    @abstractmethod
    def step(self) -> Mapping[str, float]:
        """Make the next version out of what was added: of ``_participants`` updates, one or more.
        Returns figures for people. Raises :class:`NoVersion` where none can be made."""

    def schema(self) -> Schema:
        """What is kept, beside ``PARTS``: the array ``name`` is the attribute ``_name``; see
        :class:`~device_sdk.methods.state.Stateful`. Here: nothing."""
        return {}

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
    def keeps(self) -> bool:
        """Whether updates are held until the round closes, because ``step`` is to follow all of
        ``add`` at once. Here: False."""
        return False

    def sound_together(self, updates: Sequence[Update]) -> bool:
        """Whether :meth:`require` takes all of these; False where that is not seen at a glance. For
        methods that are quicker with many at once. Here: False."""
        return False

    def sized(self, updates: Iterable[Update]) -> Iterator[list[Sized]]:
        """Checked updates with what they are bounded by, in groups that are added together. Here:
        each alone, with what is expected of its tensors."""
        for update in updates:
            yield [Sized(update, self.expected(update))]

    def sum_up(self, judged: Sequence[Judged]) -> None:
        """Add a group of updates as they count. Here: :meth:`add` of each."""
        for one in judged:
            self.add(one.update)

    def sum_held(self, judged: Iterable[Judged], largest: float) -> None:
        """Likewise all of a held round's, none of which is known to have a larger norm than
        ``largest``. ``judged`` is made as it is gone through. Here: :meth:`add` of each."""
        for one in judged:
            self.add(one.update)

    def follow(self) -> None:
        """What is known of the fleet changed, and with it what ``require`` takes. Here: nothing."""

    # -- the stages --------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The number of rounds that changed something."""
        return self._version

    @property
    def participants(self) -> int:
        """Updates that were absorbed in the open round."""
        return self._participants

    @property
    def lowered(self) -> dict[str, str]:
        """Whose claims of samples counted for less than they said, and how: for people, who clear
        it. No part of the state."""
        return self._bounding.lowered

    def open_round(self, round_id: int) -> Broadcast:
        """Forget what was absorbed and open ``round_id``, which must be above the last one."""
        if round_id <= self._round_id:
            raise ValueError(f"round {round_id} does not follow round {self._round_id}")
        self._round_id = round_id
        self.begin(round_id)
        self._open()
        opened = self.tell()
        if type(self).expected is Method.expected:
            self._bounding.tell(opened.tensors)
        return opened

    def begin(self, round_id: int) -> None:
        super().begin(round_id)
        self._held = self._held.emptied()

    def _open(self) -> None:
        """Decide what becomes of the round's updates."""

    def check(self, update: Update) -> None:
        """Raise :class:`Refused` unless ``absorb`` will take this update; changes nothing."""
        if (refused := self._refusal(update)) is not None:
            raise refused

    def check_each(self, updates: Sequence[Update]) -> list[Refused | None]:
        """What :meth:`check` has to say of each; None of a good one."""
        found: list[Refused | None] = []
        for start in range(0, len(updates), _CHECKED_TOGETHER):
            group = updates[start : start + _CHECKED_TOGETHER]
            good = len(group) > 1 and not self._is_full and self._of_round(group)
            if good and self.sound_together(group):
                found.extend([None] * len(group))
            else:
                found.extend(map(self._refusal, group))
        return found

    def _of_round(self, updates: Sequence[Update]) -> bool:
        opened, late = self._round_id, self.TAKES_LATE
        return opened != 0 and all(
            update.round_id == opened or (late and update.age is not None) for update in updates
        )

    def _refusal(self, update: Update) -> Refused | None:
        if not self._of_round([update]):
            of = f"the update is for round {update.round_id}, not {self._round_id}"
            return Refused("bad-round", of)
        try:
            self.require(update)
        except Refused as error:
            return error
        except WireError as error:
            return Refused(error.reason, str(error))
        if self.bounds is not None:
            for values in update.tensors.values():
                if values.dtype.kind == "f" and not np.isfinite(values).all():
                    return Refused("bad-values", "a value is not finite")
        if self._is_full:
            return Refused("round-full", "this round holds as many updates as it may")
        return None

    def absorb(self, update: Update) -> None:
        """Add a checked update, or hold it until the round closes. The same updates in the same
        order give the same bits; in any order, where the round adds up."""
        self._absorb([update])

    def absorb_each(self, updates: Sequence[Update]) -> None:
        """:meth:`absorb` of many, with the same bits. Where it raises, any number of them may have
        been absorbed: the state is to be made again."""
        self._absorb(updates)

    def _absorb(self, updates: Sequence[Update]) -> None:
        if self._holds:
            for update in updates:
                self._held.add(update)
        else:
            self._count(updates)
        self._participants += len(updates)

    @property
    def _holds(self) -> bool:
        """Whether the open round's updates are held until it closes, whatever for."""
        return self.keeps or self._bounding.holds

    def _count(self, updates: Iterable[Update]) -> None:
        """Bound, and add."""
        for group in self.sized(updates):
            for one in group:
                self._bounding.note(one)
            self.sum_up([self._bounding.judged(one) for one in group])

    def _count_held(self) -> None:
        """Likewise of all that was held, each judged by all where nothing is known but them."""
        largest = 0.0
        # Decoded twice, one by one: what they unfold to may be many times what is held.
        for one in self._held_sized():
            largest = max(largest, one.found.norm)
            self._bounding.note(one)
        self._bounding.look_again()
        self.follow()
        self.sum_held(map(self._bounding.judged, self._held_sized()), largest)

    def _held_sized(self) -> Iterator[Sized]:
        for update in self._held:
            for group in self.sized([update]):
                yield from group

    @property
    def adds_up(self) -> bool:
        """Whether the open round's updates enter as sums, which several shards may make apart.

        Decided when the round opens, by settings and what was known then.
        """
        return self.SHARDS and not self._holds

    @property
    def full(self) -> bool:
        """Whether the open round holds all that it may: ``check`` refuses any other update with
        reason ``round-full``."""
        return self._is_full

    @property
    def _is_full(self) -> bool:
        return self._held.full or self._participants >= MOST_UPDATES

    def share(self) -> dict[str, NDArray[Any]]:
        """What was absorbed in the open round, as named arrays (copies): sums, counts, and little
        else. Raises TypeError where it does not add up."""
        self._require_adding_up()
        return super().share()

    def merge(self, share: State) -> None:
        """Add another shard's :meth:`share`: in any order and grouping, the same bits. What an
        earlier round had, that made no version, may be added too.

        Raises :class:`~device_sdk.methods.state.RestoreError` for arrays that do not fit,
        :class:`~aggregator.methods.sums.RefusedShare` for those of a later round or another scale,
        and changes nothing then; TypeError where the round does not add up.
        """
        self._require_adding_up()
        super().merge(share)

    def _require_adding_up(self) -> None:
        if not self.SHARDS:
            raise TypeError(f"a round of {type(self).__name__} does not add up")
        if self._holds:
            raise TypeError(f"round {self._round_id} does not add up: its updates are held")

    def _read(self, share: State) -> dict[str, Any]:
        found = super()._read(share)
        if self._participants + int(found["participants"]) > MOST_UPDATES:
            raise RefusedShare(f"a round of more than {MOST_UPDATES} updates could overflow")
        return found

    def close_round(self) -> RoundSummary:
        """Make the next version out of what was absorbed; without updates the version stays.

        Raises :class:`NoVersion` where none can be made.
        """
        metrics: dict[str, float] = {}
        if self._participants:
            if self._holds:
                self._count_held()
            metrics.update(self.step())
            metrics.update(self._bounding.metrics())
            self._version += 1
            self.settle()
        summary = RoundSummary(self._round_id, self._version, self._participants, metrics)
        self.begin(self._round_id)
        return summary

    def _schema(self) -> Schema:
        return {
            **super()._schema(),
            **self.schema(),
            **dict.fromkeys(("version", "round_id"), COUNT),
        }

    # -- the model ---------------------------------------------------------------------------------

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

    def forget(self, sender: str) -> None:
        """Drop what is kept of a device, where it is known: it was revoked. Between rounds.

        Here: nothing. For methods that hand on what single devices sent in earlier rounds.
        """


class ModelMethod(Method):
    """A method whose version is one model of an artifact, as a vector.

    Args:
        initial: the first version, float32 [p].
        layout: which parameter lies where.
        training: what every device is told.

    Left to write are ``require``, ``add`` and ``step``, which changes ``_model``. Raises ValueError
    where ``initial`` does not fit.
    """

    def __init__(
        self, initial: NDArray[np.float32], layout: FlatLayout, training: TrainingSettings
    ) -> None:
        if initial.dtype != np.float32 or initial.shape != (layout.size,):
            raise ValueError(
                f"initial is {initial.dtype} {initial.shape}; expected float32 [{layout.size}], "
                "the model's parameters"
            )
        if not np.isfinite(initial).all():
            raise ValueError("initial holds values that are not finite")
        self._layout, self._training = layout, training
        self._model = initial.copy()
        self.reset()
        self.begin(0)

    def reset(self) -> None:
        """Forget what was learnt about the model's steps: it is another one. Here: nothing was."""

    @property
    def model(self) -> NDArray[np.float32]:
        """The version, float32 [p]: a copy."""
        return self._model.copy()

    @property
    def model_arrays(self) -> dict[str, NDArray[np.float32]]:
        """The version's parameters by torch's names."""
        return self._layout.unflatten(self._model)

    def begin_with(self, model: Arrays) -> None:
        """Takes all parameters."""
        shapes = {entry.name: entry.shape for entry in self._layout.entries}
        self._model = self._layout.flatten(fitted(shapes, model))
        self.reset()
        self.begin(self._round_id)

    def tell(self) -> Broadcast:
        """``model`` float32 [p], and the training settings."""
        told = self._training.as_scalars()
        return Broadcast(self._round_id, self._version, {"model": self.model}, told)

    def schema(self) -> Schema:
        return {"model": Entry(np.float32, (self._layout.size,))}


_CHECKED_TOGETHER = 64
"""Updates; where one of them is bad, all are looked at one by one."""


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
    control: bool = False
    """Whether some of the devices also train a model alone (``evaluation.control``)."""

    settings_class: ClassVar[type[Any]]
    """A frozen dataclass, read from the task file's table of the method's name."""
    needs_catalogue: ClassVar[bool] = False
    """Whether the task must have a catalogue; without the need it has none."""
    artifacts: ClassVar[range] = range(1, MOST_ARTIFACTS + 1)
    """How many artifacts a task may list."""
    one_model: ClassVar[bool] = False
    """Whether several artifacts are the rungs of one model's ladder; else each is one by itself."""

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
        return SERVED

    def why_no_control(self, artifacts: int) -> str:
        """Why none of the devices of a task with so many artifacts could train a model alone; empty
        where they can. Here: for whoever writes ``Learner.train_alone`` says so."""
        return "its devices take no steps alone"

    @property
    def why_no_companions(self) -> str:
        """Why devices have no use for artifacts that go with the task's; empty where they may."""
        return ""

    @property
    def note(self) -> str:
        """What an operator should know of the settings, though nothing is wrong; here: nothing."""
        return ""

    def why_no_staleness(self, ladder: Sequence[Submodel] = ()) -> str:
        """Why an update of an earlier version cannot count at a lesser weight (``round.late``), in
        words, with these settings and, where it is known, the ladder of the task's artifacts; empty
        where it can. Here: it cannot."""
        return (
            f"updates of {self.method_name} are no changes of one model, which an older one could "
            "be added to at a lesser weight"
        )

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
        """How much of the model the device trained, for the operator's eyes: the number of its
        rung, which updates of a ladder say; or its k. 0 where there is no such thing."""
        return int(update.metadata["rung"]) if self.one_model and "rung" in update.metadata else 0


class PersonalBinding(Binding[Settings]):
    """Models of any kind: none of them is sent to anybody, each device has its own."""

    __slots__ = ()

    def why_no_control(self, artifacts: int) -> str:
        """Devices can: without what the others say."""
        return ""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return ("personal",)


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
    """``learning_rate`` as it is in round ``round_id``, counted from 1; where it does not fall, 0
    stays what devices take for the artifact's own."""
    if rate_decay == 1:
        return learning_rate
    return max(_LEAST, learning_rate * rate_decay ** (round_id - 1))
