"""What a device tells of a round that it was selected for, beside its update or alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated

from device_sdk.fields import Declared, Length, Such, Within
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.message import Name, Record
from device_sdk.wire.publish.task_messages import Labels

MOST_OUTCOME_BYTES = 211
MOST_EVALUATION_BYTES = 4096
MOST_LABELS_BYTES = 56
"""Of a device's own labels as CBOR: what 211 bytes leave beside all the rest at its longest."""
MOST_TEXT_BYTES = {"sdk": 16, "runtime": 16, "platform": 18, "option": 16}
Small = Annotated[int, Within(0, 2**32 - 1)]


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


_KNOWN = frozenset(reason.value for reason in Reason)


def known_reason(reason: str) -> str:
    """The reason, or ``other`` for one that this version does not know: a device may send any."""
    return reason if reason in _KNOWN or not reason else "other"


@dataclass(frozen=True, slots=True)
class ItemCount(Declared):
    """How many items a device has recorded for a task, each of them once, and how many of these the
    task's catalogue does not know."""

    recorded: Small
    unknown: Small

    IS_ROW = True

    def check(self) -> None:
        if self.unknown > self.recorded:
            raise ValueError(f"{self.unknown} unknown of {self.recorded} items")

    def __str__(self) -> str:
        return f"{self.unknown} of {self.recorded} items unknown"


def _fit(labels: Mapping[str, str]) -> bool:
    return not labels or len(cbor.encode(dict(labels))) <= MOST_LABELS_BYTES


OwnLabels = Annotated[
    Labels,
    Such(
        _fit,
        f"labels that take at most {MOST_LABELS_BYTES} bytes, which is what a report has room for: "
        "use fewer or shorter ones, or let the operator give them",
    ),
]
"""What a device can call itself."""


@dataclass(frozen=True, slots=True)
class Details(Declared):
    """What an app can switch off. Texts are cut to fit by whoever makes a report."""

    sdk: Annotated[str, Length(0, MOST_TEXT_BYTES["sdk"])]
    """The version of Tessera."""
    runtime: Annotated[str, Length(0, MOST_TEXT_BYTES["runtime"])]
    """The version of onnxruntime; empty where there is none."""
    platform: Annotated[str, Length(0, MOST_TEXT_BYTES["platform"])]
    """System and processor."""
    option: Annotated[str, Length(0, MOST_TEXT_BYTES["option"])] = ""
    """The columns, or the artifact, that was trained; empty for none."""
    seconds: Annotated[float, Within(0)] | None = None
    """That the training took; null where there was none."""
    received_bytes: Small = 0
    """Of the messages that the round brought."""
    labels: OwnLabels = field(default_factory=dict)
    """What the device calls itself."""
    items: ItemCount | None = None
    """What it knows of the catalogue; null for a task without one."""

    IS_ROW = True


@dataclass(frozen=True, slots=True)
class Report(Record):
    """One device's part in one round. All but the evaluation take at most 211 bytes."""

    outcome: ReportedOutcome
    reason: Annotated[Name, Length(0, 24)] = ""
    """Why it did not train: a :class:`Reason`, or what a newer device knows."""
    details: Details | None = None
    evaluation: Annotated[bytes, Length(1, MOST_EVALUATION_BYTES)] = b""
    """As ``device_sdk.evaluation.report`` writes it, not looked into here."""

    MOST_BYTES = MOST_OUTCOME_BYTES + MOST_EVALUATION_BYTES + 14

    def without_evaluation(self) -> Report:
        """The part that takes at most ``MOST_OUTCOME_BYTES``."""
        return replace(self, evaluation=b"")

    def check(self) -> None:
        if (self.outcome is ReportedOutcome.TRAINED) is bool(self.reason):
            raise ValueError("a reason goes with what was not trained, and with nothing else")
