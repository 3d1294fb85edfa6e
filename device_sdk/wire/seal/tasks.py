"""Tasks: the aggregator's signed word on which names it serves, before it has published any round.

Bytes: ``version 1 | type 9 | signature 64 | body``, the body canonical CBOR of {incarnation,
revision, tasks}; signed by the signing key of the descriptor in force, over
SHA-256(descriptor) || body.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import (
    MOST_NAME_BYTES,
    MessageType,
    Record,
    check_prefix,
    prefix,
    read_name,
    require_name,
)
from device_sdk.wire.seal import signature
from device_sdk.wire.seal.descriptor import Descriptor
from device_sdk.wire.seal.freshness import INCARNATION_BYTES
from device_sdk.wire.seal.signature import Purpose

MOST_TASKS = 256
MAX_BYTES = 40_960
"""Room for as many tasks of the longest names."""
_BODY_AT = 2 + signature.SIGNATURE_BYTES
_MOST_REVISION = 2**63 - 1
_MOST_SHOWN = 8


@dataclass(frozen=True)
class ServedTasks:
    """What one life of the aggregator serves. Raises ValueError, naming what is wrong."""

    incarnation: bytes
    """That of the life's presence, 16 bytes."""
    revision: int
    """Rises with each list of the same life that says something else, from 0."""
    names: tuple[tuple[str, str], ...]
    """Task and cohort of each, in rising order; at most 256."""

    def __post_init__(self) -> None:
        if len(self.incarnation) != INCARNATION_BYTES:
            raise ValueError(f"an incarnation has {INCARNATION_BYTES} bytes")
        if not 0 <= self.revision <= _MOST_REVISION:
            raise ValueError("the revision must be an integer from 0, below 2^63")
        if len(self.names) > MOST_TASKS:
            raise ValueError(f"{len(self.names)} tasks; at most {MOST_TASKS} are told")
        for task, cohort in self.names:
            require_name("task", task)
            require_name("cohort", cohort)
        if any(after <= before for before, after in pairwise(self.names)):
            raise ValueError("tasks must be in rising order, each once")

    def serves(self, task: str, cohort: str) -> bool:
        """Whether the task is served to the cohort."""
        return (task, cohort) in self.names

    def __str__(self) -> str:
        """For people: what there is, and not all of a long list."""
        told = [f"task {task!r} with cohort {cohort!r}" for task, cohort in self.names]
        left = len(told) - _MOST_SHOWN
        more = f" and {left} more" if left > 0 else ""
        return (", ".join(told[:_MOST_SHOWN]) or "none") + more


def sign_tasks(tasks: ServedTasks, descriptor: Descriptor, signing: Ed25519PrivateKey) -> bytes:
    """The retained message. Published anew after a rotation: it names the descriptor in force."""
    body = cbor.encode(
        {
            "incarnation": tasks.incarnation,
            "revision": tasks.revision,
            "tasks": [{"task": task, "cohort": cohort} for task, cohort in tasks.names],
        }
    )
    signed = signature.sign(signing, Purpose.TASKS, descriptor.digest + body)
    return prefix(MessageType.TASKS) + signed + body


def read_tasks(message: bytes, descriptor: Descriptor) -> ServedTasks:
    """Verify a list of tasks. Raises ``WireError``: ``bad-signature``, or a parser's reason."""
    check_prefix(message, MessageType.TASKS, _BODY_AT + 1, MAX_BYTES)
    body = message[_BODY_AT:]
    key = signature.public_key(descriptor.signing)
    signature.verify(key, Purpose.TASKS, descriptor.digest + body, message[2:_BODY_AT])
    record = Record(cbor.decode(body, limit_bytes=MAX_BYTES), ("incarnation", "revision", "tasks"))
    names = tuple(_name(entry) for entry in record.array("tasks", MOST_TASKS))
    if any(after <= before for before, after in pairwise(names)):
        raise WireError("bad-field", "tasks must be in rising order, each once")
    return ServedTasks(
        record.octets("incarnation", INCARNATION_BYTES),
        record.unsigned("revision", _MOST_REVISION),
        names,
    )


def _name(entry: cbor.CborValue) -> tuple[str, str]:
    record = Record(entry, ("task", "cohort"))
    task, cohort = (
        read_name(what, record.text(what, MOST_NAME_BYTES).encode()) for what in ("task", "cohort")
    )
    return task, cohort


class TasksWatch:
    """Keeps the list to go by: the newest of the life shown last, under the descriptor in force.

    The broker keeps old lists and may show them again. One of the same life with a lower revision
    changes nothing. One of another life takes the place of this life's, but says nothing of this
    one: then nothing is known, as if there were no list.
    """

    def __init__(self) -> None:
        self._kept: tuple[bytes, ServedTasks] | None = None

    def take(self, message: bytes, descriptor: Descriptor) -> None:
        """A list came. Raises ``WireError``."""
        tasks = read_tasks(message, descriptor)
        known = self.of(tasks.incarnation, descriptor)
        if known is None or known.revision <= tasks.revision:
            self._kept = (descriptor.digest, tasks)

    def of(self, incarnation: bytes | None, descriptor: Descriptor | None) -> ServedTasks | None:
        """What this life of the aggregator serves; None where that is not known."""
        if self._kept is None or descriptor is None:
            return None
        digest, tasks = self._kept
        is_current = (digest, tasks.incarnation) == (descriptor.digest, incarnation)
        return tasks if is_current else None
