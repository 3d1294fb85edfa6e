"""What there is to see of a running aggregator, and the port on which Prometheus asks for it."""

from __future__ import annotations

import hmac
import io
import math
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import accumulate
from socketserver import ThreadingMixIn
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from aggregator.errors import AggregatorError
from aggregator.evaluation import ends_of, part_name
from aggregator.events import LogEvent
from aggregator.rounds.model_parts import ModelParts
from aggregator.serve.receipt_times import BOUNDS_SECONDS, ReceiptTimes
from aggregator.store.evaluations import EvaluatedVersion
from aggregator.store.rows import RoundRow
from aggregator.task.file import MetricsSettings

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


@dataclass(frozen=True, slots=True)
class TaskSnapshot:
    """One moment of a task. Counters are since the start of the process."""

    name: str
    version: int
    current: RoundRow | None
    seconds_left: float | None
    arrived: int
    participants: int
    quorum: int
    counted: int
    eligible: int = 0
    """Devices that it is for."""
    wait_for_devices: int = 0
    """So many there must be before a round opens."""
    paused: bool = False
    widths: Mapping[int, int] = field(default_factory=dict)
    """Of the open round's updates, by what part of the model they are of."""
    parts: ModelParts = field(default_factory=ModelParts)
    """What those are called."""
    outcomes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """What devices told, by outcome and reason."""
    unpublished: str | None = None
    """Why the next round could not be published, and is held."""
    finished: tuple[RoundRow, ...] = ()
    """The last closed rounds, newest first."""
    evaluated: EvaluatedVersion | None = None
    """The newest version that has figures."""
    metric: str = ""
    """That versions are compared by."""
    control: bool = False
    """Whether some of the devices are to train a model alone."""
    stopped: bool = False
    """Whether early stopping has ended its rounds."""
    waits_for: int = 0
    """Devices that the open round waits for."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment. Counters are since the start of the process."""

    connected: bool
    broker: str
    devices: int
    sessions: int
    bytes_received: int
    bytes_sent: int
    tasks: tuple[TaskSnapshot, ...]
    refusals: Mapping[str, int] = field(default_factory=dict)
    refused_subscriptions: tuple[str, ...] = ()
    """The topic filters that the broker refuses at present; they are asked for again."""
    broker_losses: int = 0
    """Messages of our own to ourselves that the broker acknowledged and did not deliver."""
    receipt_times: ReceiptTimes = field(default_factory=ReceiptTimes)


_OF_EACH_TASK: dict[str, tuple[str, Callable[[TaskSnapshot], float]]] = {
    "model_version": ("The model's version", lambda task: task.version),
    "round": (
        "The round that is open, 0 for none",
        lambda task: 0 if task.current is None else task.current.round,
    ),
    "round_held": (
        "Whether the round waits for the operator",
        lambda task: bool(task.unpublished or (task.current and task.current.held)),
    ),
    "round_selected_devices": (
        "Devices selected",
        lambda task: 0 if task.current is None else task.current.expected,
    ),
    "round_arrived_updates": ("Updates counted in this round", lambda task: task.arrived),
    "round_waits_for_devices": (
        "Devices that this round waits for, with a quorum or without",
        lambda task: task.waits_for,
    ),
    "round_seconds_left": (
        "Until this round closes if nothing more comes",
        lambda task: task.seconds_left or 0.0,
    ),
    "updates_counted_total": ("Updates counted", lambda task: task.counted),
    "task_devices": ("Devices that the task is for", lambda task: task.eligible),
    "evaluated_version": (
        "The version that the figures are of, 0 for none",
        lambda task: 0 if task.evaluated is None else task.evaluated.version,
    ),
    "early_stopped": ("Whether no round opens, since none improved", lambda task: task.stopped),
    "task_paused": ("Whether the operator paused it", lambda task: task.paused),
}

_COMPARED = {
    "over_alone": "How much better the control arm's devices do than alone",
    "over_received": "How much better devices do with their own models than with the received one",
}
_Samples = Iterable[tuple[Mapping[str, object], float]]


def metrics_of(seen: Snapshot) -> Iterator[Metric]:
    """Metrics of one moment, as prometheus-client writes them down."""
    # A home with one task names none: its series stay what they were.
    tasks = [({"task": one.name} if len(seen.tasks) > 1 else {}, one) for one in seen.tasks]
    figures = [
        ({**of, "stage": one.stage, "metric": one.metric, "part": part_name(one.part)}, one)
        for of, task in tasks
        if task.evaluated is not None
        for one in task.evaluated.figures
    ]
    refused = len(seen.refused_subscriptions)
    yield _metric("connected", "Whether there is a connection to the broker", seen.connected)
    yield _metric("subscriptions_refused", "Subscriptions the broker refuses at present", refused)
    yield _metric("devices", "Devices that are enrolled and not revoked", seen.devices)
    yield _metric("sessions", "Sessions in memory", seen.sessions)
    yield _metric("received_bytes_total", "Bytes of messages received", seen.bytes_received)
    yield _metric("sent_bytes_total", "Bytes of messages sent", seen.bytes_sent)
    yield _metric(
        "broker_losses_total",
        "Test messages that the broker acknowledged and did not deliver",
        seen.broker_losses,
    )
    for name, (about, value) in _OF_EACH_TASK.items():
        yield _metric(name, about, [(of, value(task)) for of, task in tasks])
    yield _metric(
        "round_updates_by_part",
        "Updates of this round by what was trained: a ladder's rung, or so many columns",
        [
            ({**of, "part": part}, count)
            for of, task in tasks
            for part, count in task.parts.counts(task.widths).items()
        ],
    )
    yield _metric(
        "evaluation",
        "What devices found out about the model: the fleet's figure, the median device's own, the "
        "worst tenth's",
        [
            ({**of, "statistic": statistic}, value)
            for of, figure in figures
            for statistic in ("value", "median", "worst_tenth")
            if (value := getattr(figure, statistic)) is not None and not math.isnan(value)
        ],
    )
    yield _metric(
        "evaluation_devices",
        "Devices that a figure is of",
        [(of, figure.devices) for of, figure in figures],
    )
    for name, about in _COMPARED.items():
        yield _metric(
            f"evaluation_{name}",
            f"{about}, and the ends of its 95 % interval",
            [
                ({**of, "bound": bound}, value)
                for of, figure in figures
                for bound, value in _bounds(
                    getattr(figure, name), getattr(figure, f"{name}_half_width")
                )
            ],
        )
    yield _metric(
        "evaluation_control_devices",
        "Devices of the control arm that a comparison is of",
        [(of, figure.control_devices) for of, figure in figures],
    )
    yield _metric(
        "device_outcomes_total",
        "How rounds ended on the devices, as these told",
        [
            ({**of, "outcome": outcome, "reason": reason}, count)
            for of, task in tasks
            for (outcome, reason), count in sorted(task.outcomes.items())
        ],
    )
    yield _metric(
        "refused_total",
        "Messages refused, by reason",
        [({"reason": reason}, count) for reason, count in sorted(seen.refusals.items())],
    )
    bounds = (*map(str, BOUNDS_SECONDS), "+Inf")
    yield HistogramMetricFamily(
        "tessera_receipt_seconds",
        "How long updates waited for their receipts, once they were taken in",
        [*zip(bounds, accumulate(seen.receipt_times.counts), strict=True)],
        seen.receipt_times.seconds,
    )


def _bounds(mean: float, half_width: float) -> list[tuple[str, float]]:
    ends = ends_of(mean, half_width)
    return [*zip(("mean", "low", "high"), (mean, *ends), strict=True)] if ends else []


def _metric(name: str, about: str, samples: float | _Samples) -> Metric:
    """A counter where the name ends as Prometheus' counters do, a gauge otherwise."""
    counter = name.endswith("_total")
    metric = Metric(
        f"tessera_{name.removesuffix('_total')}", about, "counter" if counter else "gauge"
    )
    for labels, value in [({}, samples)] if isinstance(samples, int | float) else samples:
        metric.add_sample(f"tessera_{name}", {key: str(one) for key, one in labels.items()}, value)
    return metric


class ToldProblem(Protocol):
    """Something that is wrong; see :class:`~aggregator.operate.problems.FleetProblem`."""

    @property
    def code(self) -> str: ...
    @property
    def severity(self) -> str: ...
    @property
    def task(self) -> str | None: ...
    @property
    def sentence(self) -> str: ...


@dataclass(frozen=True)
class Told:
    """What the port tells, whenever it is asked. All are called from its threads.

    Attributes:
        snapshot: of the last second; None: there is none yet.
        problems: that stand.
        works: whether the process goes on with its work.
    """

    snapshot: Callable[[], Snapshot | None]
    problems: Callable[[], Sequence[ToldProblem]] = tuple
    works: Callable[[], bool] = lambda: True


class _Collected(Collector):
    def __init__(self, told: Told) -> None:
        self._told = told

    def collect(self) -> Iterator[Metric]:
        seen = self._told.snapshot()
        if seen is not None:
            yield from metrics_of(seen)
        standing = Counter((each.code, each.severity, each.task) for each in self._told.problems())
        yield _metric(
            "problem",
            "Problems that stand, by code, as status has them",
            [
                ({"code": code, "severity": severity, "task": task or ""}, count)
                for (code, severity, task), count in standing.items()
            ],
        )


def registry_of(told: Told) -> CollectorRegistry:
    """Asks what there is to tell at each scrape; before there is a snapshot, only for problems."""
    registry = CollectorRegistry()
    registry.register(_Collected(told))
    return registry


# The port: /metrics for Prometheus, /healthz and /readyz for whoever restarts and routes.

_PATIENCE_SECONDS = 10.0
"""How long one who asks may take over his question, and to read the answer."""
_MOST_ASKING = 32
_ROOM_SECONDS = 1.0
_PLAIN = [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")]


class _Port(ThreadingMixIn, WSGIServer):
    """A thread for each who asks, of whom there are few at a time: where there is no room for one
    more, whoever came first makes some."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, settings: MetricsSettings, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[socket.socket, float] = {}
        self._changed = Condition()
        self.address_family = socket.AF_INET6 if ":" in settings.address else socket.AF_INET
        super().__init__((settings.address, settings.port), _Asked)

    def verify_request(self, request: Any, client_address: object) -> bool:
        """Whether there is room for it."""
        with self._changed:
            if not self._has_room():
                self._end(min(self._until, key=self._until.__getitem__))
            has_room = self._changed.wait_for(self._has_room, _ROOM_SECONDS)
            if has_room:
                self._until[request] = self._clock() + _PATIENCE_SECONDS
            return has_room

    def service_actions(self) -> None:
        """Called twice a second."""
        now = self._clock()
        with self._changed:
            for request in [each for each, until in self._until.items() if until <= now]:
                self._end(request)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self._until.pop(request, None)
            self._changed.notify()

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asks may hang up; anything else is a mistake of ours."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            LogEvent.METRICS_FAIL.log(error)

    def _has_room(self) -> bool:
        return len(self._until) < _MOST_ASKING

    def _end(self, request: socket.socket) -> None:
        """Its thread hears of it, and closes it."""
        self._until[request] = math.inf
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _Asked(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: anybody may ask."""

    def get_stderr(self) -> Any:
        """Where it is told whose connection broke: nowhere."""
        return io.StringIO()


def answers(told: Told, token: str | None) -> WSGIApplication:
    """The port's application. ``token``: without it nobody is told; None: anybody is."""
    metrics: WSGIApplication = make_wsgi_app(registry_of(told))

    def plain(start: StartResponse, status: HTTPStatus, lines: Iterable[str]) -> list[bytes]:
        start(f"{status.value} {status.phrase}", [*_PLAIN])
        return ["".join(f"{line}\n" for line in lines).encode()]

    def answer(asked: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = asked.get("PATH_INFO", "")
        if path == "/healthz":  # says nothing of the fleet: probes need no token for it
            if told.works():
                return plain(start, HTTPStatus.OK, ["works"])
            return plain(start, HTTPStatus.SERVICE_UNAVAILABLE, ["does not come to its work"])
        given = asked.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            return plain(
                start,
                HTTPStatus.UNAUTHORIZED,
                ["Authorization: Bearer TOKEN, of metrics.token_file"],
            )
        if path == "/readyz":
            errors = [each for each in told.problems() if each.severity == "error"]
            if not errors and told.snapshot() is not None:
                return plain(start, HTTPStatus.OK, ["ready"])
            lines = [f"{each.code}: {each.sentence}" for each in errors] or ["not yet"]
            return plain(start, HTTPStatus.SERVICE_UNAVAILABLE, lines)
        if path in ("/metrics", "/"):
            return metrics(asked, start)
        return plain(start, HTTPStatus.NOT_FOUND, ["there are /metrics, /readyz and /healthz"])

    def answer_in_any_case(asked: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        try:
            return answer(asked, start)
        except Exception as error:
            LogEvent.METRICS_FAIL.log(error)
            return plain(start, HTTPStatus.INTERNAL_SERVER_ERROR, ["serve's log says why"])

    return answer_in_any_case


@contextmanager
def serve_metrics(
    settings: MetricsSettings, told: Told, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[int]:
    """Serve ``GET /metrics``, ``/readyz`` and ``/healthz``; the port. Raises AggregatorError when
    it is taken, for an address that is none of this machine's, and for a token that cannot be
    read."""
    token = settings.token()
    try:
        server = _Port(settings, clock)
    except OSError as error:
        raise AggregatorError(
            f"metrics.port {settings.port} at metrics.address {settings.address} cannot be used: "
            f"{error}"
        ) from None
    server.set_app(answers(told, token))
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
