"""The rows of the store's tables, each declared once: tables, reading and writing follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from device_sdk.wire.publish.report import Report

U64 = Annotated[int, "64 bits"]
"""A whole number of 64 bits without a sign, which no engine has: 8 bytes, the lowest first."""
TaskState = Literal["active", "paused", "retiring", "retired"]


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task.

    Attributes:
        number: what the other tables know it by; 1 for the first.
        name: None for the first one before it was served.
        state: ``retiring`` until its parts are gone, then ``retired``: its name may be used again.
        file: the task file, relative to the home or absolute.
        served: the text of the file that its state belongs to; None before it was served.
        unwritten: what the file is to hold. Committed first, so that a crash in between loses
            neither.
        request: what the operator wants the task replaced by, as JSON.
        problem: why it is not served, or not as the file says.
    """

    number: int = field(metadata={"column": "task"})
    name: str | None
    state: TaskState
    file: str
    served: str | None = None
    unwritten: str | None = None
    request: str | None = None
    problem: str | None = None

    def is_replaced_by(self, text: str) -> bool:
        """And its file written: before that, what somebody writes into it would be lost."""
        return self.request is None and self.served == text and self.unwritten is None


Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One identity, its fields the table's columns. ``first_round``: it takes part in the rounds
    that opened as the ``first_round``-th or later, counted over all tasks. ``labels``: what tasks
    choose by."""

    device_id: bytes
    identity: bytes
    handle: bytes
    admission_key: bytes
    shard: int
    token_id: bytes
    enrolled_unix_seconds: int
    first_round: int
    revoked_unix_seconds: int | None = None
    labels: Labels = field(default_factory=dict)
    name: str | None = None

    def __repr__(self) -> str:
        return f"DeviceRow(device_id={self.device_id.hex()}, ...)"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One code. ``last_stranger``: the key of the latest other identity that tried to use it."""

    token_id: bytes
    secret: bytes
    expires_unix_seconds: int
    replaces: bytes | None = None
    device_id: bytes | None = None
    strangers: int = 0
    last_stranger: bytes | None = None
    name: str | None = None
    labels: Labels = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"TokenRow(token_id={self.token_id.hex()}, ...)"


@dataclass(frozen=True, slots=True)
class IssuedDescriptor:
    """A descriptor, and until when its keys are honoured (None: it is the current one)."""

    serial: int
    message: bytes
    honoured_until_unix_seconds: int | None


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round. ``closed_unix_seconds`` None: open. ``next_version`` None: the quorum was missed.
    Closed, with ``participants`` None: nothing enters any more, and its version is being made.

    ``held``: why the round may not close before the operator looked. ``forgotten``: its verdicts
    were deleted. ``opening``: the how-manieth round of any task it was to open. ``took_seconds``:
    how long it lasted, see :class:`~aggregator.rounds.attendance.RoundTimes`; None where it was
    given up, too.
    """

    round: int
    generation: int
    version: int
    opened_unix_seconds: float
    deadline_unix_seconds: float
    seed: bytes
    threshold: U64
    expected: int
    items: int
    closed_unix_seconds: float | None = None
    next_version: int | None = None
    participants: int | None = None
    metrics: Mapping[str, float] | None = None
    held: str | None = None
    forgotten: bool = False
    opening: int = 0
    took_seconds: float | None = None

    @property
    def length_seconds(self) -> float:
        """How long it collects at most."""
        return self.deadline_unix_seconds - self.opened_unix_seconds

    @property
    def unfinished(self) -> bool:
        """Whether it is open, or being closed."""
        return self.participants is None


class LoggedUpdate(NamedTuple):
    """An accepted update. ``seq`` gives the order of commits, which is the order of absorption.

    A tuple, as SQLite takes it: a fleet's updates are too many to be written out twice.
    """

    seq: int
    round: int
    device_id: bytes
    arrived_seconds: float
    body: bytes


NOTED = "noted"
"""In the place of a reason: a contribution without an update, whose report was taken."""


class StoredVerdict(NamedTuple):
    """What was decided on a body: counted (``reason`` None), ``NOTED``, or refused; and when it
    came, in seconds after the round opened."""

    generation: int
    round: int
    device_id: bytes
    body_sha256: bytes
    reason: str | None
    seconds: float = 0.0


class LastParticipation(NamedTuple):
    """A device's newest update that was counted, and what it told of its newest round.

    Attributes:
        counted_unix_seconds: when the update was counted; None: none was.
        width: what part of the model it was of (k, or a ladder's rung), if any.
        told_unix_seconds, round: when the device told how which round ended; None: it never did.
        report: what it told, without evaluation; None, too, once it is revoked.
    """

    counted_unix_seconds: int | None = None
    width: int | None = None
    told_unix_seconds: int | None = None
    round: int | None = None
    report: bytes | None = None


class Habit(NamedTuple):
    """What is known of a device's updates in a task.

    Attributes:
        seconds: after a round's opening, its longest time of late; None: no update came yet.
        missed: 0 as soon as an update came; 1, 2, 4, 8 ... after so many waits in vain since.
        lives: whether it said anything since the last of them.
    """

    seconds: float | None = None
    missed: int = 0
    lives: bool = True


class StoredReport(NamedTuple):
    """A tuple, as SQLite takes it. Details are None where the app keeps them to itself. What the
    device found out about the model is not among it: that is kept for less long, in
    ``evaluations.py``."""

    generation: int
    round: int
    device_id: bytes
    outcome: str
    reason: str
    sdk: str | None
    runtime: str | None
    platform: str | None
    option: str | None
    seconds: float | None
    received_bytes: int | None
    items: int | None = None
    unknown_items: int | None = None

    @classmethod
    def of(cls, generation: int, number: int, device_id: bytes, report: Report) -> StoredReport:
        """What a device told of one round."""
        told = report.details
        details: tuple[Any, ...] = (None,) * 8
        if told is not None:
            details = (told.sdk, told.runtime, told.platform, told.option, told.seconds)
            known = told.items
            details += (told.received_bytes,)
            details += (None, None) if known is None else (known.recorded, known.unknown)
        head = (generation, number, device_id, report.outcome.value, report.reason)
        return cls._make((*head, *details))


class StoredCheckpoint(NamedTuple):
    """A method's state: ``version``, or ``partial`` within an open round."""

    kind: str
    round: int
    seq: int
    version: int
    state: bytes


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version of the task's model.

    Attributes:
        round: the round that made it; 0: what the task began with.
        closed_unix_seconds: when that round closed.
        devices: whose updates made it.
        artifact: the artifact of its parameters, in hexadecimal; empty without one.
        origin: for people, where it is from where no round made it; empty where one did.
        bytes: the model's size; 0 for a method that keeps none.
        metrics: figures by name, as the fleet evaluated it.
        kept: whether the model is there, and not only what is known of it.
        items: how many items of the task's catalogue it has vectors of; 0 for a method without.
    """

    version: int
    round: int
    closed_unix_seconds: float
    devices: int
    artifact: str
    origin: str
    bytes: int
    metrics: Mapping[str, float]
    pinned: bool
    kept: bool = field(metadata={"column": "model IS NOT NULL"})
    items: int


class DeviceEvaluation(NamedTuple):
    """What one device said of a version. ``report``: as ``device_sdk.evaluation.report`` writes."""

    device_id: bytes
    part: str
    report: bytes


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """Who coordinates. ``term`` rises each time that another process takes over."""

    holder: str
    term: int
    until_unix_seconds: float
    program: str


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The process that holds a slot, or held it last. ``shards``: what it listens to, in words;
    ``connected``: whether it hears its cell's broker."""

    slot: int
    epoch: int
    cell: str
    shards: str
    program: str
    heartbeat_unix_seconds: float
    connected: bool = False


@dataclass(frozen=True, slots=True)
class ShareRow:
    """What a slot has committed of a round.

    Attributes:
        epoch, commits: of whom it is, and its how-manieth: who has the same pair has the same
            ``state``.
        state: the method's share as ``pack_state`` writes it; None where bodies are kept.
    """

    round: int
    slot: int
    epoch: int
    commits: int
    counted: int
    heard: int
    state: bytes | None
