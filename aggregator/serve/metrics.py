"""Prometheus' text format on a loopback port, for whoever scrapes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from aggregator.errors import AggregatorError
from aggregator.store.rounds import RoundRow

# What there is to see of a running aggregator, for the live view, the log and the metrics.


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment. Counters are since the start of the process."""

    task: str
    connected: bool
    broker: str
    devices: int
    sessions: int
    version: int
    current: RoundRow | None
    seconds_left: float | None
    arrived: int
    participants: int
    quorum: int
    counted: int
    bytes_received: int
    bytes_sent: int
    widths: Mapping[int, int] = field(default_factory=dict)
    refusals: Mapping[str, int] = field(default_factory=dict)
    refused_subscriptions: tuple[str, ...] = ()
    """The topic filters that the broker refuses at present; they are asked for again."""
    broker_losses: int = 0
    """Messages of our own to ourselves that the broker acknowledged and did not deliver."""
    unpublished: str | None = None
    """Why the next round could not be published, and is held."""
    finished: tuple[RoundRow, ...] = ()
    """The last closed rounds, newest first."""


_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def format_metrics(seen: Snapshot) -> str:
    lines: list[str] = []

    def put(name: str, about: str, samples: dict[str, float]) -> None:
        kind = "counter" if name.endswith("_total") else "gauge"
        lines.append(f"# HELP tessera_{name} {about}")
        lines.append(f"# TYPE tessera_{name} {kind}")
        lines.extend(f"tessera_{name}{labels} {value:g}" for labels, value in samples.items())

    row = seen.current
    values: dict[str, tuple[str, float]] = {
        "connected": ("Whether there is a connection to the broker", seen.connected),
        "subscriptions_refused": (
            "Subscriptions that the broker refuses at present",
            len(seen.refused_subscriptions),
        ),
        "devices": ("Devices that are enrolled and not revoked", seen.devices),
        "sessions": ("Sessions in memory", seen.sessions),
        "model_version": ("The model's version", seen.version),
        "round": ("The round that is open, 0 for none", row.round if row else 0),
        "round_held": (
            "Whether the round waits for the operator",
            bool(seen.unpublished or (row and row.held)),
        ),
        "round_selected_devices": ("Devices selected", row.expected if row else 0),
        "round_arrived_updates": ("Updates counted in this round", seen.arrived),
        "round_seconds_left": ("Until the deadline", seen.seconds_left or 0.0),
        "updates_counted_total": ("Updates counted", seen.counted),
        "received_bytes_total": ("Bytes of messages received", seen.bytes_received),
        "sent_bytes_total": ("Bytes of messages sent", seen.bytes_sent),
        "broker_losses_total": (
            "Test messages that the broker acknowledged and did not deliver",
            seen.broker_losses,
        ),
    }
    for name, (about, value) in values.items():
        put(name, about, {"": value})
    put(
        "round_updates_by_k",
        "Updates of this round by the width that was trained",
        {f'{{k="{width}"}}': count for width, count in sorted(seen.widths.items())},
    )
    put(
        "refused_total",
        "Messages refused, by reason",
        {f'{{reason="{why}"}}': count for why, count in sorted(seen.refusals.items())},
    )
    return "\n".join(lines) + "\n"


@contextmanager
def serve_metrics(port: int, snapshot: Callable[[], Snapshot | None]) -> Iterator[int]:
    """Serve ``GET /metrics`` on 127.0.0.1; the port. Raises AggregatorError when it is taken."""

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

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise AggregatorError(f"metrics.port {port} cannot be used: {error}") from None
    thread = threading.Thread(target=server.serve_forever, name="tessera-metrics", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
