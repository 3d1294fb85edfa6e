"""What one device found out about a model, and its bytes inside a report.

Statistics are packed as ``cells 1+ | (gap 1+, count 1+) a cell | sum 8 each``: of the whole counts
only those that are not 0, with LEB128 gaps (as row ids in ``wire/arrays/sparse.py``), then all sums
as float64, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np

from device_sdk.evaluation.metrics import METRICS, Metric, Statistics, metric_of
from device_sdk.fields import Declared, Key, Length, Within
from device_sdk.wire.arrays.sparse import LARGEST_ID, decode_number, encode_number
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.codec.message import Name, Record, decode, encode, require_name

MOST_METRICS = 16


@dataclass(frozen=True, slots=True)
class EvaluationTerms(Declared):
    """Which devices evaluate when, what, and at which cost."""

    metrics: Annotated[tuple[Name, ...], Length(1, MOST_METRICS)]
    """Names out of ``metrics.METRICS``, each once. One that a device does not know it leaves out,
    and says so."""
    every_rounds: Annotated[int, Within(1, 1_000_000)] = 1
    """In rounds whose number is a multiple of this."""
    share: Annotated[float, Within(0, 1, above=True)] = 1.0
    """Of the devices that train in such a round, about this share evaluates."""
    least_samples: Annotated[int, Within(1, 1_000_000)] = 1
    """A device that holds fewer back reports none. With scatter each user holds one back."""
    time_share: Annotated[float, Within(0, 1, above=True)] = 0.25
    """An evaluation takes no longer than this share of ``train_seconds``, all stages together;
    beyond it a device goes by a sample."""
    control: Annotated[float, Within(0, 1)] = 0.0
    """About this share of the task's devices, always the same ones, also trains a model alone."""

    def check(self) -> None:
        if len(set(self.metrics)) != len(self.metrics):
            raise ValueError("metrics names one of them twice")

    @property
    def threshold(self) -> int:
        """What a device's draw must be below (``manifest.evaluates``)."""
        return round(self.share * 2**64)

    @property
    def control_threshold(self) -> int:
        """Likewise (``manifest.is_control``)."""
        return round(self.control * 2**64)


Stage = Literal["global", "personal", "alone"]
SERVED: tuple[Stage, ...] = ("global", "personal")
"""The model as it was received, before training; the device's own, after it."""
ALONE: Stage = "alone"
"""The control arm's second model, after its training."""
STAGES: tuple[Stage, ...] = (*SERVED, ALONE)


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Statistics of one metric over held-out data of one device, or over those of many added up.

    Attributes:
        stage: which model they are about.
        metric: its name.
        statistics: float64, as the metric's class says; kept as a read-only copy.

    Raises ValueError for an unknown metric, and for statistics that no data has.
    """

    stage: Stage
    metric: str
    statistics: Statistics

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"stage is {self.stage!r}; expected one of {', '.join(STAGES)}")
        metric = metric_of(self.metric)
        own = np.array(self.statistics)
        metric.check(own)
        own.setflags(write=False)
        object.__setattr__(self, "statistics", own)

    @property
    def samples(self) -> float:
        """Its weight: the samples, or users, that it is of."""
        return METRICS[self.metric].weight(self.statistics)

    @property
    def value(self) -> float:
        """The metric's figure; NaN where these statistics do not define it."""
        return METRICS[self.metric].value(self.statistics)


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationReport:
    """All that a device says of one round's evaluation.

    Attributes:
        results: at most one of each stage and metric, by stage, then name. In a stage all metrics
            of samples are of the same ones, and so are all metrics of users.
        reason: why something, or everything, that was asked for is not here; a slug such as
            ``no-test-data``. Empty where nothing is missing.
        rounds: that the control arm's second model has trained; 0 without one.

    Raises ValueError for anything else.
    """

    results: tuple[Evaluation, ...] = ()
    reason: str = ""
    rounds: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "results", _in_order(self.results))
        weights: dict[tuple[Stage, str], float] = {}
        for each in self.results:
            kind = (each.stage, METRICS[each.metric].weighs)
            if weights.setdefault(kind, each.samples) != each.samples:
                raise ValueError(
                    f"{each.metric} ({each.stage}) is of {each.samples:g} {kind[1]}, another "
                    f"metric of {weights[kind]:g}"
                )
        if self.reason:
            require_name("reason", self.reason)

    def of(self, stage: Stage, metric: str) -> Evaluation | None:
        """One of the results; None where it is not here."""
        found = (e for e in self.results if (e.stage, e.metric) == (stage, metric))
        return next(found, None)


def _in_order(results: Sequence[Evaluation]) -> tuple[Evaluation, ...]:
    by_key = {(STAGES.index(each.stage), each.metric): each for each in results}
    if len(by_key) != len(results):
        raise ValueError("a metric of a stage is given twice")
    return tuple(by_key[key] for key in sorted(by_key))


Packed = Annotated[Mapping[Name, bytes], Length(1, 64)]


@dataclass(frozen=True, slots=True)
class PackedReport(Record):
    """A report's bytes inside of a :class:`~device_sdk.wire.publish.report.Report`."""

    received: Annotated[Packed, Key("global")] = field(default_factory=dict)
    """By metric, the packed statistics of the model as it was received."""
    personal: Packed = field(default_factory=dict)
    """Likewise of the device's own model, after training."""
    alone: Packed = field(default_factory=dict)
    """Likewise of the control arm's second model, after training."""
    reason: Name = ""
    """Why something, or everything, that was asked for is not here."""
    rounds: Annotated[int, Within(0, LARGEST_ID)] = 0
    """That the control arm's second model has trained."""

    MOST_BYTES = 4096


def write_evaluations(report: EvaluationReport) -> bytes:
    """The bytes of ``report``; of an empty one, those of an empty map.

    Raises ValueError for counts that are not whole or reach 2^31, and above 4 KiB.
    """
    received, personal, alone = (
        {
            each.metric: pack_statistics(METRICS[each.metric], each.statistics)
            for each in report.results
            if each.stage == stage
        }
        for stage in STAGES
    )
    data = encode(PackedReport(received, personal, alone, report.reason, report.rounds))
    if len(data) > PackedReport.MOST_BYTES:
        raise ValueError(f"evaluations take {len(data)} bytes; {PackedReport.MOST_BYTES} fit")
    return data


def read_evaluations(data: bytes) -> EvaluationReport:
    """The inverse, total: raises ``WireError`` for bytes that no device writes, and for statistics
    that no data has.

    Reasons: ``too-large``, ``bad-cbor``, ``wrong-fields``, ``bad-field``, ``bad-name``,
    ``bad-rows``, ``truncated``, ``bad-statistics``.
    """
    packed = decode(PackedReport, data)
    results = []
    by_stage = (packed.received, packed.personal, packed.alone)
    for stage, cells in zip(STAGES, by_stage, strict=True):
        for name, cell in sorted(cells.items()):
            if (metric := METRICS.get(name)) is None:
                raise WireError("bad-field", "an unknown metric")
            statistics = unpack_statistics(metric, cell)
            try:
                results.append(Evaluation(stage, name, statistics))
            except ValueError as error:
                raise WireError("bad-statistics", str(error)) from error
    try:
        return EvaluationReport(tuple(results), packed.reason, packed.rounds)
    except ValueError as error:
        raise WireError("bad-statistics", str(error)) from error


def pack_statistics(metric: Metric, statistics: Statistics) -> bytes:
    """The packed form of statistics [metric.size]; raises ValueError for counts that it has no form
    for."""
    counts, sums = statistics[: metric.counts], statistics[metric.counts :]
    whole = np.rint(counts)
    if (whole != counts).any() or (whole > LARGEST_ID).any():
        raise ValueError(f"{metric.name}: counts must be whole numbers below 2^31")
    places = np.flatnonzero(whole)
    parts, before = [encode_number(len(places))], -1
    for place, count in zip(places.tolist(), whole[places].tolist(), strict=True):
        parts += [encode_number(place - before - 1), encode_number(int(count))]
        before = place
    # Adding 0.0 makes -0.0 the 0.0 that it equals.
    return b"".join(parts) + struct.pack(f"<{metric.sums}d", *(sums + 0.0).tolist())


def unpack_statistics(metric: Metric, data: bytes) -> Statistics:
    """The inverse. Raises ``WireError``: ``bad-rows``, ``bad-field``, ``truncated``."""
    statistics = np.zeros(metric.size)
    cells, offset = decode_number(data, 0)
    if cells > metric.counts:
        raise WireError("bad-rows", f"{cells} cells; {metric.name} has {metric.counts}")
    place = -1
    for _ in range(cells):
        gap, offset = decode_number(data, offset)
        count, offset = decode_number(data, offset)
        place += 1 + gap
        if place >= metric.counts or not 0 < count <= LARGEST_ID:
            raise WireError("bad-rows", "a cell out of bounds, or a count of 0")
        statistics[place] = count
    if len(data) != offset + 8 * metric.sums:
        raise WireError("truncated", f"{metric.name} has {metric.sums} sums of 8 bytes")
    sums = np.frombuffer(data, "<f8", metric.sums, offset)
    if not np.isfinite(sums).all():
        raise WireError("bad-field", "sums must be finite")
    # One number has one form.
    if (np.signbit(sums) & (sums == 0)).any():
        raise WireError("bad-field", "a sum is -0.0")
    statistics[metric.counts :] = sums
    return statistics
