"""Limits and times of a link, validated."""

from __future__ import annotations

from dataclasses import dataclass, field

from device_sdk.link.proxy import parse_proxy_url


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How a link behaves. Raises ValueError, naming the setting, for a value outside its range."""

    keepalive_seconds: int = 30
    """Without traffic for this long the broker is asked for a sign of life."""
    stall_seconds: float = 20.0
    """A broker that owes an answer for this long is given up, however alive it looks."""
    connect_timeout_seconds: float = 10.0
    """For each of: the TCP connection, the TLS handshake, the CONNACK."""
    version_probe_seconds: float = 3.0
    """For the CONNACK to an MQTT 5 connect, until the broker has answered one: some that speak only
    3.1.1 say nothing at all."""
    backoff_first_seconds: float = 1.0
    backoff_most_seconds: float = 60.0
    yield_seconds: float = 30.0
    """Whoever is thrown out by another client of the same id waits up to so long, and half of it at
    least, each further time longer, up to ``most_yield_seconds``."""
    most_yield_seconds: float = 600.0
    settled_seconds: float = 10.0
    """A connection that lasted this long starts the back-off anew."""
    in_flight: int = 64
    """Unacknowledged publications of ours; fewer where the broker allows fewer."""
    filters_in_packet: int = 8
    """The most subscriptions that one packet asks for: AWS IoT Core takes no more. Whoever has
    thousands is at no such broker, and asks for more of them at once."""
    send_queue_messages: int = 8192
    send_queue_bytes: int = 16 << 20
    event_queue_messages: int = 4096
    event_queue_bytes: int = 32 << 20
    read_bytes: int = 65_536
    """The most that is taken from the socket before what waits to be sent is looked at again."""
    receive_maximum: int = 256
    """Told to a broker that speaks MQTT 5: unacknowledged publications to us."""
    maximum_packet_bytes: int = 128 << 10
    """Told to a broker that speaks MQTT 5: it drops larger messages to us."""
    proxy: str | None = field(default=None, repr=False)
    """``http://host:port`` or ``http://user:password@host:port``: reach the broker through it, by
    CONNECT. Empty: through none. None: ``ws://`` and ``wss://`` through the environment's, see
    :func:`~device_sdk.link.proxy.proxy_for`; the others through none."""

    def __post_init__(self) -> None:
        for name in ("in_flight", "receive_maximum", "keepalive_seconds", "filters_in_packet"):
            if not 1 <= getattr(self, name) <= 65_535:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 1 to 65,535")
        for name in (
            "stall_seconds",
            "connect_timeout_seconds",
            "version_probe_seconds",
            "backoff_first_seconds",
            "settled_seconds",
            "yield_seconds",
            "send_queue_messages",
            "send_queue_bytes",
            "event_queue_messages",
            "event_queue_bytes",
            "read_bytes",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0")
        if self.proxy:
            parse_proxy_url(self.proxy)
        if self.backoff_most_seconds < self.backoff_first_seconds:
            raise ValueError("backoff_most_seconds is below backoff_first_seconds")
        if not 1024 <= self.maximum_packet_bytes < 2**28:
            raise ValueError(
                f"maximum_packet_bytes is {self.maximum_packet_bytes}; expected 1,024 to 2^28 - 1"
            )
