"""Single values: of the fleet, and of each task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

from aggregator.errors import AggregatorError
from aggregator.store.database import Database, Table
from device_sdk.fields import plain, read
from device_sdk.wire.codec import cbor

Value = TypeVar("Value")


_FILE_BEFORE = "file before version "
"""What the name of a replaced task file begins with, in ``task_facts``."""


@dataclass(frozen=True)
class PublishedContent:
    """An artifact or a catalogue at the broker. ``tasks``: the numbers of those that use it;
    ``epoch``: of the group key that it is sealed under; ``sealed_as``: what else the sealing
    depends on."""

    tasks: tuple[int, ...]
    epoch: int
    sealed_as: str


@dataclass(frozen=True)
class PublishedContents:
    """All of them, by content id in hexadecimal."""

    by_id: Mapping[str, PublishedContent] = field(default_factory=dict)


@dataclass(frozen=True)
class CohortKey:
    """A cohort's key (32 bytes), and the members and key epoch that it was drawn for."""

    key: bytes = field(repr=False)
    drawn_for: str


@dataclass(frozen=True)
class SealedContent:
    """A content's plaintext bytes, and what says under which keys it is sealed."""

    size: int
    sealed_under: str


@dataclass(frozen=True)
class AttachmentBook:
    """Which attachments are sealed, under which keys: what does not change is not sealed again.

    ``secret``: 32 bytes from which content ids are derived, drawn once. ``cohorts`` by name,
    ``sealed`` by content id in hexadecimal.
    """

    secret: bytes = field(repr=False)
    cohorts: Mapping[str, CohortKey] = field(default_factory=dict)
    sealed: Mapping[str, SealedContent] = field(default_factory=dict)


class Named(Table):
    """Named values, each an attribute of its own. ``TABLE`` has them."""

    TABLE: ClassVar[str]

    def get(self, name: str) -> Any:
        """What is stored under a name, or None."""
        stored = self._value("value", self.TABLE, name=name)
        return None if stored is None else self._database.from_any(stored)

    def put(self, name: str, value: Any) -> None:
        """Store it."""
        row = {**self._fixed, "name": name, "value": self._database.to_any(value)}
        self._database.insert(self.TABLE, row, replace=True)


class Fact(Generic[Value]):
    """A named value as an attribute of a :class:`Named`, read and written where it is used.

    An empty text is none. Where there is none it is ``default``; without one, reading it raises
    AggregatorError. A record is stored as CBOR. ``name``: in the database, where it is not the
    attribute's.
    """

    def __init__(self, kind: type[Any], default: Any = MISSING, name: str = "") -> None:
        self._kind, self._default, self._name = kind, default, name

    def __set_name__(self, owner: type[Named], name: str) -> None:
        self._name = self._name or name

    def __get__(self, facts: Named, owner: type[Named]) -> Value:
        found = facts.get(self._name)
        if is_dataclass(self._kind) and found:
            return cast("Value", read(self._kind, cbor.decode(found, limit_bytes=len(found))))
        stored = int if self._kind is bool else self._kind  # SQLite has no truth values
        if isinstance(found, stored) and found != "":
            return cast("Value", self._kind(found))
        if self._default is MISSING:
            raise AggregatorError(f"the database lacks {self._name!r}; run tessera-aggregator init")
        return cast("Value", self._default)

    def __set__(self, facts: Named, value: Value) -> None:
        if is_dataclass(self._kind) and value is not None:
            facts.put(self._name, cbor.encode(plain(value)))
        else:
            facts.put(self._name, "" if value is None else self._kind(value))


class Facts(Named):
    """What the fleet has once."""

    TABLE = "facts"

    generation = Fact[int](int)
    """Unix time of ``init`` or of the last restore from a backup; no task's is lower."""
    root_fingerprint = Fact[bytes](bytes)
    """16 bytes that stand for the root key."""
    seed = Fact[int](int)
    """What the first model is drawn from."""
    rotation_due = Fact[bool](bool, False)
    """Whether the group key must be another one from the next round on."""
    openings = Fact[int](int, 0)
    """How many rounds have opened, of all tasks: what devices and rounds are ordered by."""
    mirrored = Fact[bool](bool, False)
    """Whether devices were ever told of a mirror: then each is told where there is none."""
    mirror_problem = Fact[str | None](str, None)
    """Why chunks cannot be written to ``cluster.chunk_store`` at present; None: they can."""
    clock_problem = Fact[str | None](str, None)
    """How the calendar differs from the time that ``serve`` goes by; None: it does not."""
    keys_problem = Fact[str | None](str, None)
    """Why devices refuse this aggregator's keys, or will soon; None: they do not."""
    successor = Fact[str](str, "")
    """The move to another broker that was asked for last; see ``aggregator.serve.successor``."""
    packet_bytes = Fact[int | None](int, None)
    """The largest packet that the brokers took at the last connection; None: any of ours."""
    contents = Fact[PublishedContents](PublishedContents, PublishedContents())
    """Which artifacts and catalogues are published, for which tasks; see ``Contents``."""
    started_unix_seconds = Fact[int | None](int, None, "started")
    """When the last life of this home began, as its presence said; None before the first."""
    announced_unix_seconds = Fact[int | None](int, None, "announced")
    """When the last life began that devices may have heard of: one that the fence ended, because
    this home is a copy, is none. Else the next start would take itself for the rightful one."""
    cluster_life = Fact[bytes | None](bytes, None)
    """The incarnation of the life that a cluster's processes share; None where there is none."""
    cluster_started = Fact[int | None](int, None)
    """When that one began. Another serve, and a restore, begin another."""
    served_seconds = Fact[float](float, 0.0)
    """How long ``serve`` has run in this home, in all: a clock that no calendar can turn."""


class TaskFacts(Named):
    """What each task has for itself."""

    TABLE = "task_facts"

    label = Fact[str | None](str, None, "task")
    """The task and method that the stored state belongs to; None before the first ``serve``."""
    made_with = Fact[str | None](str, None)
    """The method's settings that the stored version was made with."""
    catalogue = Fact[bytes | None](bytes, None)
    """The catalogue's content as last used."""
    attachments = Fact[AttachmentBook | None](AttachmentBook, None)
    """None before the first."""
    unpublished = Fact[str | None](str, None)
    """Why the next round could not be published, or what the last one sent out did harm, so that
    none opens before the operator looked; None: nothing stands in its way."""
    no_room = Fact[str | None](str, None)
    """Why no round can be published at the broker, by its largest packet; None: one can. Rounds go
    on by themselves at one that takes larger ones."""
    failed = Fact[bool](bool, False)
    """Whether it is held because the code of its method failed, which the next life tries again."""
    stopped_at = Fact[int | None](int, None)
    """The version that early stopping ended with, once the best one was asked for; None while
    rounds go on."""
    judged_from = Fact[int](int, 0)
    """The first version of the present model: those of before it took the task over are no
    measure. Another server optimizer is no other model."""
    replaced_at = Fact[int](int, 0)
    """The version that the last replacement began with: early stopping counts no rounds of before
    it. At least ``judged_from``."""
    evaluated_from = Fact[int | None](int, None)
    """The oldest version that devices may still say something of: the figures of those before it
    are made, or never will be. None before the first was published."""
    dropped_rollback = Fact[str | None](str, None)
    """Why the version that was asked for last did not become the next one; None: it did, or was
    called off."""
    key_epoch = Fact[int](int, 0)
    """The epoch of the group key that it is published under; 0 before the first publication."""
    own_generation = Fact[int](int, 0, "generation")
    """When it was made or replaced, in Unix time."""

    def __init__(self, database: Database, task: int, fleet: Facts) -> None:
        super().__init__(database, task=task)
        self._task, self._fleet = task, fleet

    @property
    def generation(self) -> int:
        """Unix time of when it was made or replaced, or of the fleet's last restore."""
        return max(self._fleet.generation, self.own_generation)

    def keep_file(self, version: int, text: str) -> None:
        """Keep the text of the task file that was in force before this version: another one took
        its place with it, or in the end several after each other, of which none made a version."""
        if self.get(f"{_FILE_BEFORE}{version}") is None:
            self.put(f"{_FILE_BEFORE}{version}", text)

    def file_of(self, version: int) -> str | None:
        """The text of the task file that this version was made under; None where that is the
        present one."""
        query = "SELECT name FROM task_facts WHERE task = ? AND name LIKE ?"
        names = self._database.rows(query, (self._task, f"{_FILE_BEFORE}%"))
        later = (int(name.removeprefix(_FILE_BEFORE)) for (name,) in names)
        until = min((each for each in later if each > version), default=None)
        return None if until is None else str(self.get(f"{_FILE_BEFORE}{until}"))

    def clear(self) -> None:
        """Forget all of them."""
        self._delete(self.TABLE)


# How often what was refused, since the beginning.


class RefusalCounts(Table):
    def add(self, counts: Mapping[str, int]) -> None:
        self._database.execute_many(
            "INSERT INTO refusals VALUES (?, ?) "
            "ON CONFLICT (reason) DO UPDATE SET count = refusals.count + excluded.count",
            sorted(counts.items()),
        )

    def all(self) -> dict[str, int]:
        return dict(self._database.rows("SELECT reason, count FROM refusals ORDER BY reason"))
