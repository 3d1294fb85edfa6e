"""Prometheus' text format on a loopback port, for whoever scrapes it."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from aggregator.errors import AggregatorError
from aggregator.evaluation.figures import Figure
from aggregator.evaluation.words import part_name
from aggregator.store.evaluations import EvaluatedVersion
from aggregator.store.rounds import RoundRow
from aggregator.task.file import MetricsSettings

# What there is to see of a running aggregator, for the live view, the log and the metrics.


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
    outcomes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """What devices told, by outcome and reason."""
    unpublished: str | None = None
    """Why the next round could not be published, and is held."""
    finished: tuple[RoundRow, ...] = ()
    """The last closed rounds, newest first."""
    evaluated: EvaluatedVersion | None = None
    """The newest version that has figures."""
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


_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def format_metrics(seen: Snapshot) -> str:
    lines: list[str] = []

    def put(name: str, about: str, samples: dict[str, float]) -> None:
        kind = "counter" if name.endswith("_total") else "gauge"
        lines.append(f"# HELP tessera_{name} {about}")
        lines.append(f"# TYPE tessera_{name} {kind}")
        lines.extend(f"tessera_{name}{labels} {value:.15g}" for labels, value in samples.items())

    def put_each(name: str, about: str, value: Callable[[TaskSnapshot], float]) -> None:
        put(name, about, {_labels(seen, task): value(task) for task in seen.tasks})

    values: dict[str, tuple[str, float]] = {
        "connected": ("Whether there is a connection to the broker", seen.connected),
        "subscriptions_refused": (
            "Subscriptions that the broker refuses at present",
            len(seen.refused_subscriptions),
        ),
        "devices": ("Devices that are enrolled and not revoked", seen.devices),
        "sessions": ("Sessions in memory", seen.sessions),
        "received_bytes_total": ("Bytes of messages received", seen.bytes_received),
        "sent_bytes_total": ("Bytes of messages sent", seen.bytes_sent),
        "broker_losses_total": (
            "Test messages that the broker acknowledged and did not deliver",
            seen.broker_losses,
        ),
    }
    for name, (about, value) in values.items():
        put(name, about, {"": value})
    for name, (about, of_task) in _OF_EACH.items():
        put_each(name, about, of_task)
    put(
        "round_updates_by_k",
        "Updates of this round by the width that was trained",
        {
            _labels(seen, task, k=width): count
            for task in seen.tasks
            for width, count in sorted(task.widths.items())
        },
    )
    put(
        "evaluation",
        "What devices found out about the model: the fleet's figure, the median device's own, the "
        "worst tenth's",
        {
            _labels(seen, task, **_of_figure(figure), statistic=name): value
            for task in seen.tasks
            for figure in _figures(task)
            for name, value in (
                ("value", figure.value),
                ("median", figure.median),
                ("worst_tenth", figure.worst_tenth),
            )
            if value is not None and not math.isnan(value)
        },
    )
    put(
        "evaluation_devices",
        "Devices that a figure is of",
        {
            _labels(seen, task, **_of_figure(figure)): figure.devices
            for task in seen.tasks
            for figure in _figures(task)
        },
    )
    put(
        "device_outcomes_total",
        "How rounds ended on the devices, as these told",
        {
            _labels(seen, task, outcome=outcome, reason=reason): count
            for task in seen.tasks
            for (outcome, reason), count in sorted(task.outcomes.items())
        },
    )
    put(
        "refused_total",
        "Messages refused, by reason",
        {_written({"reason": why}): count for why, count in sorted(seen.refusals.items())},
    )
    return "\n".join(lines) + "\n"


_OF_EACH: dict[str, tuple[str, Callable[[TaskSnapshot], float]]] = {
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


def _figures(task: TaskSnapshot) -> tuple[Figure, ...]:
    return () if task.evaluated is None else task.evaluated.figures


def _of_figure(figure: Figure) -> dict[str, str]:
    return {"stage": figure.stage, "metric": figure.metric, "part": part_name(figure.part)}


def _labels(seen: Snapshot, task: TaskSnapshot, **labels: object) -> str:
    """A home with one task names none: its series stay what they were."""
    if len(seen.tasks) > 1:
        labels = {"task": task.name, **labels}
    return _written(labels)


def _written(labels: Mapping[str, object]) -> str:
    pairs = ",".join(f'{name}="{str(value).translate(_ESCAPES)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


@contextmanager
def serve_metrics(
    settings: MetricsSettings, snapshot: Callable[[], Snapshot | None]
) -> Iterator[int]:
    """Serve ``GET /metrics``; the port. Raises AggregatorError when it is taken, and for an address
    that is none of this machine's."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen = snapshot()
            if self.path != "/metrics" or seen is None:
                self.send_error(404 if seen is not None else 503)
                return
            body = format_metrics(seen).encode()
            self.send_response(200)
            self.send_header("Content-Type", _TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            return  # a scrape every few seconds is no news

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in settings.address else socket.AF_INET

    try:
        server = Server((settings.address, settings.port), Handler)
    except OSError as error:
        raise AggregatorError(
            f"metrics.port {settings.port} at metrics.address {settings.address} cannot be used: "
            f"{error}"
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="tessera-metrics", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
