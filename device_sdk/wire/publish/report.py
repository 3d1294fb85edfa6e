"""What a device tells of a round that it was selected for, beside its update or alone.

Canonical CBOR of {outcome, reason}, and of ``details`` and ``evaluation`` where they are there. Of
all but the evaluation at most 211 bytes. Details are an array, in the order of :class:`Details`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import Record, require_name
from device_sdk.wire.publish.standing import require_labels

MOST_OUTCOME_BYTES = 211
MOST_EVALUATION_BYTES = 4096
MOST_REPORT_BYTES = MOST_OUTCOME_BYTES + MOST_EVALUATION_BYTES + 14
MOST_LABELS_BYTES = 56
"""Of a device's own labels as CBOR: what 211 bytes leave beside all the rest at its longest."""
_MOST_REASON = 24
MOST_TEXT_BYTES = {"sdk": 16, "runtime": 16, "platform": 18, "option": 16}
_MOST_COUNT = 2**32 - 1
_FIELDS, _OPTIONAL = frozenset(("outcome", "reason")), frozenset(("details", "evaluation"))


class ReportedOutcome(Enum):
    """How a round ended on a device that was selected for it."""

    TRAINED = "trained"
    DECLINED = "declined"
    """It could not, or would not: the next round may be another matter."""
    FAILED = "failed"


class Reason(Enum):
    """Why a round ended without an update. Newer devices may know further ones."""

    NO_DATA = "no-data"
    TOO_FEW_SAMPLES = "too-few-samples"
    """Fewer than one step of the model needs."""
    UNKNOWN_ITEMS = "unknown-items"
    """None of the items that were recorded is in the task's catalogue."""
    BAD_DATA = "bad-data"
    """Samples of another shape or type than the model takes."""
    NOT_FINITE = "not-finite"
    """A loss or a parameter became NaN, infinite or larger than what can be sent: NaN or absurd
    numbers in the data, labels that are no class, or a learning rate that is too high."""
    TOO_SLOW = "too-slow"
    """Training would take, or took, longer than the round has."""
    TOO_LATE = "too-late"
    """Not all of the round's broadcast, or not its turn among tasks, came before its deadline."""
    OVER_BUDGET = "over-budget"
    """The round would take more than is left of what the device may spend on this day."""
    NO_ARTIFACT_FITS = "no-artifact-fits"
    DOES_NOT_FIT = "does-not-fit"
    """Broadcast, artifact or the device's own state are not of one kind."""
    NO_METHOD = "no-method"
    """This version of the device does not know the task's method."""
    NO_RUNTIME = "no-runtime"
    """onnxruntime is missing, or does not run the artifact."""
    BAD_CONTENT = "bad-content"
    """What the aggregator published cannot be read."""
    OUT_OF_MEMORY = "out-of-memory"
    STEP_TOO_LONG = "step-too-long"
    """One step of the artifact, or the opening of its graphs, did not end in the time that the task
    gives a whole training, and was ended."""
    CRASHED = "crashed"
    """The artifact ended the process that ran it."""
    KILLED = "killed"
    """Somebody else ended the process of the artifact's first run: nothing is known of it."""
    DISK = "disk"
    NOT_NOW = "not-now"
    """The app, or the method, chose not to."""
    ERROR = "error"


_OUTCOMES = {each.value: each for each in ReportedOutcome}
_KNOWN = frozenset(reason.value for reason in Reason)


def known_reason(reason: str) -> str:
    """The reason, or ``other`` for one that this version does not know: a device may send any."""
    return reason if reason in _KNOWN or not reason else "other"


@dataclass(frozen=True, slots=True)
class ItemCount:
    """How many items a device has recorded for a task, each of them once, and how many of these the
    task's catalogue does not know: 0 to 2^32 - 1."""

    recorded: int
    unknown: int

    def __post_init__(self) -> None:
        if not 0 <= self.unknown <= self.recorded <= _MOST_COUNT:
            raise ValueError(f"{self.unknown} unknown of {self.recorded} items")

    def __str__(self) -> str:
        return f"{self.unknown} of {self.recorded} items unknown"


@dataclass(frozen=True, slots=True)
class Details:
    """What an app can switch off. Texts are cut to fit by whoever makes a report.

    Attributes:
        sdk: the version of Tessera, at most 16 bytes.
        runtime: the version of onnxruntime, at most 16 bytes; empty where there is none.
        platform: system and processor, at most 18 bytes.
        option: the columns, or the artifact, that was trained, at most 16 bytes; empty for none.
        seconds: that the training took; None where there was none.
        received_bytes: of the messages that the round brought, at most 2^32 - 1.
        labels: what the device calls itself; at most ``MOST_LABELS_BYTES`` as CBOR.
        items: what it knows of the catalogue; None for a task without one.
    """

    sdk: str
    runtime: str
    platform: str
    option: str = ""
    seconds: float | None = None
    received_bytes: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    items: ItemCount | None = None

    def __post_init__(self) -> None:
        for name, most in MOST_TEXT_BYTES.items():
            if len(getattr(self, name).encode()) > most:
                raise ValueError(f"{name} has more than {most} bytes")
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"seconds is {self.seconds}; expected a finite number from 0, or None")
        if not 0 <= self.received_bytes <= _MOST_COUNT:
            raise ValueError(f"received_bytes is {self.received_bytes}; expected 0 to 2^32 - 1")
        require_own_labels(self.labels)


@dataclass(frozen=True, slots=True)
class Report:
    """One device's part in one round. ``reason``: a slug of at most 24 characters, where it did not
    train; ``evaluation``: as ``device_sdk.evaluation.report`` writes it, or nothing.

    Raises ValueError, naming what is wrong.
    """

    outcome: ReportedOutcome
    reason: str = ""
    details: Details | None = None
    evaluation: bytes = b""

    def __post_init__(self) -> None:
        if (self.outcome is ReportedOutcome.TRAINED) is bool(self.reason):
            raise ValueError("a reason goes with what was not trained, and with nothing else")
        if self.reason:
            require_name("reason", self.reason)
            if len(self.reason) > _MOST_REASON:
                raise ValueError(f"a reason has at most {_MOST_REASON} characters")
        if len(self.evaluation) > MOST_EVALUATION_BYTES:
            raise ValueError(f"the evaluation has more than {MOST_EVALUATION_BYTES} bytes")


_DETAILS = len(fields(Details))
_COUNTS = [int, int]


def require_own_labels(labels: Mapping[str, str]) -> None:
    """Raises ValueError for labels that a device cannot give itself."""
    if not labels:
        return
    require_labels(labels)
    size = len(cbor.encode(dict(labels)))
    if size > MOST_LABELS_BYTES:
        raise ValueError(
            f"the device's own labels take {size} bytes, a report has room for "
            f"{MOST_LABELS_BYTES}: use fewer or shorter ones, or let the operator give them"
        )


def write_outcome(report: Report) -> bytes:
    """The report without its evaluation: at most 211 bytes, by the bounds of its fields."""
    return cbor.encode(_outcome(report))


def _outcome(report: Report) -> dict[str, cbor.CborValue]:
    value: dict[str, cbor.CborValue] = {"outcome": report.outcome.value, "reason": report.reason}
    if report.details is not None:
        value["details"] = _packed(report.details)
    return value


def write_report(report: Report) -> bytes:
    """The report's bytes."""
    value = _outcome(report)
    if report.evaluation:
        value["evaluation"] = report.evaluation
    return cbor.encode(value)


def read_report(data: bytes) -> Report:
    """The inverse, total. Raises ``WireError``: ``too-large``, ``bad-cbor``, ``wrong-fields``,
    ``bad-field``.

    The evaluation is not looked into: that is for whoever knows its metrics.
    """
    value = cbor.decode(data, limit_bytes=MOST_REPORT_BYTES)
    record = Record(value, _FIELDS, optional=_OPTIONAL)
    evaluation = record.take("evaluation") if "evaluation" in record else b""
    if not isinstance(evaluation, bytes) or ("evaluation" in record and not evaluation):
        raise WireError("bad-field", "an evaluation that is no byte string, or an empty one")
    outcome = _OUTCOMES.get(record.text("outcome", 16))
    if outcome is None:
        raise WireError("bad-field", "an outcome that no device has")
    try:
        return Report(
            outcome,
            record.text("reason", _MOST_REASON),
            _unpacked(record.take("details")) if "details" in record else None,
            evaluation,
        )
    except ValueError:
        raise WireError("bad-field", "a report that no device writes") from None


def _packed(details: Details) -> cbor.CborValue:
    return [
        details.sdk,
        details.runtime,
        details.platform,
        details.option,
        None if details.seconds is None else float(details.seconds),
        details.received_bytes,
        dict(details.labels),
        None if details.items is None else [details.items.recorded, details.items.unknown],
    ]


def _unpacked(values: Any) -> Details:
    if not isinstance(values, list) or len(values) != _DETAILS:
        raise WireError("bad-field", f"details are an array of {_DETAILS}")
    sdk, runtime, platform, option, seconds, received_bytes, labels, items = values
    if not (
        type(sdk) is type(runtime) is type(platform) is type(option) is str
        and (seconds is None or isinstance(seconds, float))
        and type(received_bytes) is int
        and isinstance(labels, dict)
        and (items is None or (isinstance(items, list) and list(map(type, items)) == _COUNTS))
    ):
        raise WireError("bad-field", "details of other types")
    count = None if items is None else ItemCount(*items)
    return Details(sdk, runtime, platform, option, seconds, received_bytes, labels, count)
