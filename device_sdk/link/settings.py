"""Limits and times of a link, validated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from device_sdk.fields import Declared, Within
from device_sdk.link.proxy import parse_proxy_url

_Word = Annotated[int, Within(1, 65_535)]
_Positive = Annotated[int, Within(1)]
_Seconds = Annotated[float, Within(0, above=True)]


@dataclass(frozen=True, slots=True)
class LinkSettings(Declared):
    """How a link behaves. Raises ValueError, naming the setting, for a value outside its range."""

    keepalive_seconds: _Word = 30
    """Without traffic for this long the broker is asked for a sign of life."""
    stall_seconds: _Seconds = 20.0
    """A broker that owes an answer for this long is given up, however alive it looks."""
    connect_timeout_seconds: _Seconds = 10.0
    """For each of: the TCP connection, the TLS handshake, the CONNACK."""
    version_probe_seconds: _Seconds = 3.0
    """For the CONNACK to an MQTT 5 connect, until the broker has answered one: some that speak only
    3.1.1 say nothing at all."""
    backoff_first_seconds: _Seconds = 1.0
    backoff_most_seconds: float = 60.0
    yield_seconds: _Seconds = 30.0
    """Whoever is thrown out by another client of the same id waits up to so long, and half of it at
    least, each further time longer, up to ``most_yield_seconds``."""
    most_yield_seconds: float = 600.0
    settled_seconds: _Seconds = 10.0
    """A connection that lasted this long starts the back-off anew."""
    in_flight: _Word = 64
    """Unacknowledged publications of ours; fewer where the broker allows fewer."""
    filters_in_packet: _Word = 8
    """The most subscriptions that one packet asks for: AWS IoT Core takes no more. Whoever has
    thousands is at no such broker, and asks for more of them at once."""
    send_queue_messages: _Positive = 8192
    send_queue_bytes: _Positive = 16 << 20
    event_queue_messages: _Positive = 4096
    event_queue_bytes: _Positive = 32 << 20
    read_bytes: _Positive = 65_536
    """The most that is taken from the socket before what waits to be sent is looked at again."""
    receive_maximum: _Word = 256
    """Told to a broker that speaks MQTT 5: unacknowledged publications to us."""
    maximum_packet_bytes: Annotated[int, Within(1024, 2**28 - 1)] = 128 << 10
    """Told to a broker that speaks MQTT 5: it drops larger messages to us."""
    proxy: str | None = field(default=None, repr=False)
    """``http://host:port`` or ``http://user:password@host:port``: reach the broker through it, by
    CONNECT. Empty: through none. None: ``ws://`` and ``wss://`` through the environment's, see
    :func:`~device_sdk.link.proxy.proxy_for`; the others through none."""

    def check(self) -> None:
        if self.proxy:
            parse_proxy_url(self.proxy)
        if self.backoff_most_seconds < self.backoff_first_seconds:
            raise ValueError("backoff_most_seconds is below backoff_first_seconds")
