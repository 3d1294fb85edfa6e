"""What may be wrong with a fleet, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from aggregator.store.rows import DeviceRow


class Severity(StrEnum):
    """``error``: something that a fleet is for does not happen. ``warning``: it does, mostly."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """One kind of problem. ``code`` is for programs, and stays what it is; ``means`` and ``to_do``
    are for people, sentences without their full stop."""

    code: str
    severity: Severity
    means: str
    to_do: str


def _error(code: str, means: str, to_do: str) -> ProblemKind:
    return ProblemKind(code, Severity.ERROR, means, to_do)


def _warning(code: str, means: str, to_do: str) -> ProblemKind:
    return ProblemKind(code, Severity.WARNING, means, to_do)


KINDS = {
    each.code: each
    for each in (
        _error(
            "serve-stopped",
            "no `serve` runs on this home, nor coordinates its cluster: no round opens or closes",
            "start serve",
        ),
        _error(
            "broker-away",
            "`serve` has no connection to its broker; devices wait, and nothing is lost",
            "look at the broker, and at the way to it: tessera-aggregator broker",
        ),
        _error(
            "store-away",
            "`serve` waits for its store, which does not answer",
            "look at the database server; nothing to restart here",
        ),
        _error(
            "health-unread",
            "`serve` could not find out what is wrong with the fleet, if anything is",
            "mend what it names; where that is nothing of yours, serve's log has the traceback",
        ),
        _warning(
            "topics-refused",
            "the broker refuses subscriptions that it granted before",
            "give serve's user the rights of aggregator/acl.template",
        ),
        _warning(
            "broker-drops",
            "the broker acknowledges messages and does not deliver them",
            "raise max_queued_messages at the broker",
        ),
        _warning(
            "console-away",
            "the console, which `serve` runs beside itself, does not answer; rounds go on",
            "mend what it names, mostly [console] in the task file; serve tries again",
        ),
        _error(
            "no-coordinator",
            "a cluster's workers take updates in, and nobody opens or closes rounds; they end "
            "after ten minutes",
            "start serve --cluster ray",
        ),
        _warning(
            "worker-away",
            "a cluster's worker is silent, or has no connection to its broker",
            "look at its machine; it is restarted where Ray finds room",
        ),
        _error(
            "disk-full",
            "there is hardly room left where the home is; when there is none, serve ends",
            "make room there",
        ),
        _warning(
            "clock",
            "this machine's calendar jumped while `serve` ran; rounds go on by the time before",
            "set the clock right; if it is, wait a minute",
        ),
        _error(
            "keys",
            "devices refuse this aggregator's keys, or will soon",
            "tessera-aggregator rotate keys",
        ),
        _warning(
            "chunk-store",
            "`cluster.chunk_store` cannot be written to: devices ask the broker instead",
            "look at that store; serve tries again",
        ),
        _warning(
            "two-machines",
            "two machines had one device's identity within the last day: its home was copied",
            "enrol one of them again, with a code from invite",
        ),
        _warning(
            "code-leaked",
            "a second device tried to use an enrolment code: it leaked, or went to two",
            "give that device a code of its own; revoke whoever should not have joined",
        ),
        _error(
            "task-refused",
            "what a task's file says, or was asked for, cannot be served, or not before a restart",
            "tessera-aggregator task check, and mend the file or task replace",
        ),
        _error(
            "no-room",
            "a round's messages are larger than the broker takes",
            "raise the broker's largest packet, or make the model smaller",
        ),
        _error(
            "round-held",
            "a round does not go on until somebody has looked at it; nothing is lost",
            "mend what it names, then see tessera-aggregator release",
        ),
        _error(
            "no-device-fits",
            "no device has the labels that a task is for",
            "see [task] only in its file, and the labels in tessera-aggregator devices",
        ),
        _warning(
            "too-few-devices",
            "fewer devices than `round.wait_for_devices` are enrolled: no round opens",
            "invite more, or lower round.wait_for_devices and round.quorum",
        ),
        _error(
            "shut-out",
            "no device was counted in the last 5 rounds: all are away, or refuse the rounds",
            "where they are not all away, each says why in tessera-device status. Was this home "
            "put back from a backup? Then run tessera-aggregator restored, with serve stopped and, "
            "where since the backup keys were rotated or the fleet was moved, rotate keys or "
            "broker move",
        ),
        _warning(
            "no-quorum",
            "the last 3 rounds ended with fewer updates than `round.quorum`: no version came",
            "lower round.quorum, or lengthen round.deadline_seconds",
        ),
        _warning(
            "devices-fail",
            "half of the devices or more that told how the newest round ended failed in it",
            "tessera-aggregator status says why, by reason; task check rehearses the task",
        ),
        _warning(
            "devices-silent",
            "more than half of the devices were not heard of for a day",
            "tessera-aggregator devices has them; look at what they share: power, network, app",
        ),
        _warning(
            "unevaluated",
            "a task evaluates, and its last 10 versions have no figure: too few devices told one",
            "lower evaluation.least_devices or least_samples, or raise evaluation.share",
        ),
        _warning(
            "rollback-dropped",
            "the version that was asked for did not become the next one",
            "ask again, for one that fits, or rollback --cancel",
        ),
    )
}


_MOST_LISTED = 100


@dataclass(frozen=True, slots=True)
class FleetProblem:
    """A problem that stands now.

    Attributes:
        code: of its kind, one of :data:`KINDS`.
        what: in words, with names and numbers; printable.
        task: which it is of; None: of the fleet.
        device_ids: of the devices that it is about, of the first ones of many.
        devices: how many these are.
    """

    code: str
    what: str
    task: str | None = None
    device_ids: tuple[bytes, ...] = ()
    devices: int = 0

    @classmethod
    def of_devices(cls, code: str, what: str, devices: Sequence[DeviceRow]) -> FleetProblem:
        """One of the fleet, about these."""
        ids = tuple(each.device_id for each in devices[:_MOST_LISTED])
        return cls(code, what, None, ids, len(devices))

    @property
    def severity(self) -> Severity:
        return KINDS[self.code].severity

    @property
    def to_do(self) -> str:
        return KINDS[self.code].to_do

    @property
    def sentence(self) -> str:
        """What, and what to do."""
        return (
            f"{self.what}: {self.to_do}"
            if ": " not in self.what
            else f"{self.what}. {_upper(self.to_do)}"
        )

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "code": self.code,
            "severity": str(self.severity),
            "task": self.task,
            "what": self.what,
            "to_do": self.to_do,
            "devices": self.devices,
            "device_ids": [each.hex() for each in self.device_ids],
        }


def _upper(text: str) -> str:
    return text if text.startswith("tessera-") else text[:1].upper() + text[1:]
