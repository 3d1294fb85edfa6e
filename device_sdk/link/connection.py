"""One connection to a broker: a paho client that lives exactly as long as its socket.

paho keeps unacknowledged messages and callbacks across reconnections, acknowledges on whatever
connection is current, and lets a failing callback kill its thread while it still looks connected.
A client for each connection, driven by the link's own loop, has none of these.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paho.mqtt.client import (
    MQTT_CLEAN_START_FIRST_ONLY,
    Client,
    ConnectFlags,
    DisconnectFlags,
    MQTTMessage,
)
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from device_sdk.link import LinkSettings
from device_sdk.link.broker_url import BrokerWay
from device_sdk.link.buffered_client import Admits, BufferedClient
from device_sdk.link.dial import Stream, dial, unseen
from device_sdk.link.events import Message, MqttVersion, ServerLimits
from device_sdk.link.proxy import Proxy

_FAILURE = 128
_UNSUPPORTED_VERSION = 132
UNWANTED_CODES = (133, 134, 135)
"""A broker's reason codes for client ids, users and passwords that it does not want."""


@dataclass(frozen=True, slots=True)
class Sink:
    """Where a connection delivers what arrives. Called on the thread that calls ``step``."""

    arrived: Callable[[Sequence[Message]], None]
    acknowledged: Callable[[int, int, str], None]
    """Packet id, code, and what it means where it is a refusal."""
    written: Callable[[Sequence[int]], None]
    granted: Callable[[int, Sequence[tuple[int, str]]], None]


@dataclass(frozen=True, slots=True)
class ConnectionEnd:
    """Why a connection ended; ``reason`` as in ``link_events.Disconnected``, or ``refused``."""

    reason: str
    detail: str
    code: int | None = None


@dataclass(frozen=True, slots=True)
class Dialling:
    """What each connection of a link is made from. ``client_id``: behind the way's prefix;
    ``clock``: monotonic seconds; ``admits``: see :class:`~device_sdk.link.link.Link`."""

    broker: BrokerWay
    client_id: str
    settings: LinkSettings
    clock: Callable[[], float]
    admits: Admits | None
    proxy: Proxy | None = None


class Connection:
    """Connects, then moves packets one ``step`` at a time until ``end`` is set."""

    def __init__(self, way: Dialling, version: MqttVersion, sink: Sink) -> None:
        self._way, self._settings, self._clock = way, way.settings, way.clock
        self._version = version
        self._sink = sink
        self._socket: Any = None
        self._tls: ssl.SSLContext | None = None
        self.limits: ServerLimits | None = None
        """Set by the broker's acceptance."""
        self.end: ConnectionEnd | None = None
        self.last_received_seconds = self._clock()
        """By the clock, when the broker last sent anything."""
        self._client = self._make_client()

    def open(self) -> None:
        """Read the files that the way names, make the TCP connection, do the TLS handshake, send
        CONNECT. Sets ``end`` on failure."""
        broker = self._way.broker
        try:
            if broker.url.user is not None:
                self._client.username_pw_set(broker.url.user, broker.password())
            self._tls = broker.context()
        except ValueError as error:
            self._finish(ConnectionEnd("files", str(error)))
            return
        properties = None
        clean_start: bool | Literal[3] = (
            MQTT_CLEAN_START_FIRST_ONLY  # what paho wants to see on 3.1.1
        )
        if self._version is MqttVersion.V5:
            clean_start = True
            properties = Properties(PacketTypes.CONNECT)
            properties.ReceiveMaximum = self._settings.receive_maximum
            properties.MaximumPacketSize = self._settings.maximum_packet_bytes
        try:
            self._client.connect(
                broker.url.host,
                broker.url.port,
                self._settings.keepalive_seconds,
                clean_start=clean_start,
                properties=properties,
            )
        except ssl.SSLError as error:
            self._finish(ConnectionEnd("tls", _mistrust(error)))
        except OSError as error:
            self._finish(ConnectionEnd("unreachable", _cause(error)))
        except Exception as error:  # paho raises ValueError for odd hosts
            self._finish(ConnectionEnd("unreachable", f"{type(error).__name__}: {error}"))
        else:
            self._socket = self._client.socket()
            if self._socket is None:
                self._finish(ConnectionEnd("closed", "closed while connecting"))
                return
        self.last_received_seconds = self._clock()

    def step(self, timeout_seconds: float, wake: socket.socket, read: bool) -> None:
        """Wait for the socket or ``wake``, then move what can be moved."""
        if self.end is not None:
            return
        try:
            sock = self._socket
            # What was read ahead, or TLS has already decrypted, does not show in select.
            buffered = read and (self._client.has_read_ahead or unseen(sock) > 0)
            poll = select.poll()
            interest = (select.POLLIN if read else 0) | (
                select.POLLOUT if self._client.has_to_write else 0
            )
            poll.register(wake, select.POLLIN)
            poll.register(sock, interest)
            ready = dict(poll.poll(0 if buffered else max(0.0, timeout_seconds) * 1000))
            state = ready.get(sock.fileno(), 0)
            if state & ~select.POLLOUT or buffered:
                if state & select.POLLIN or buffered:
                    self.last_received_seconds = self._clock()
                    if self.limits is None:
                        # The CONNACK alone: it is told before what follows.
                        self._client.loop_read()
                    else:
                        self._client.read()
                elif state & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
                    self._finish(ConnectionEnd("closed", "the connection was closed"))
            if self.end is None and read:
                self._client.loop_misc()
            self.flush()
        except Exception as error:  # a hostile packet must end this connection, never the thread
            self._finish(ConnectionEnd("protocol", f"{type(error).__name__}: {error}"))
        if self.end is None and self._client.socket() is None:
            self._finish(ConnectionEnd("closed", "the connection was closed"))

    def publish(self, topic: str, payload: bytes, qos: int, retain: bool) -> int:
        """Hand a publication to the socket's buffer; returns its packet id, or a number above all
        packet ids at QoS 0."""
        if not qos:
            return self._client.publish_once(topic, payload, retain)
        return self._client.publish(topic, payload, qos, retain).mid

    def subscribe(self, filters: Sequence[tuple[str, int]]) -> int:
        """Ask for subscriptions, filters with their QoS, in one packet; returns its id."""
        _, mid = self._client.subscribe(list(filters))
        return -1 if mid is None else mid

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription. The answer is of no interest: late messages are parsed anyway."""
        self._client.unsubscribe(topic_filter)

    def flush(self) -> None:
        """Write what the socket takes without waiting."""
        if self.end is None and self._client.has_to_write:
            try:
                self._client.write()
            except Exception as error:
                self._finish(ConnectionEnd("protocol", f"{type(error).__name__}: {error}"))

    def close(self, end: ConnectionEnd) -> None:
        """Say goodbye if the broker still listens, and close the socket."""
        if self.limits is not None and self.end is None and end.reason in ("stopped", "moved"):
            self.end = end
            try:
                self._client.say_goodbye()
            except Exception as error:
                self.end = ConnectionEnd(end.reason, f"without goodbye: {type(error).__name__}")
        self._finish(end)

    def _make_client(self) -> BufferedClient:
        way, settings = self._way, self._settings
        five = self._version is MqttVersion.V5
        client = BufferedClient(
            CallbackAPIVersion.VERSION2,
            client_id=way.broker.client_id_prefix + way.client_id,
            clean_session=None if five else True,
            protocol=MQTTProtocolVersion.MQTTv5 if five else MQTTProtocolVersion.MQTTv311,
            reconnect_on_failure=False,
            dial=self._dial,
            read_bytes=settings.read_bytes,
            admits=way.admits,
            on_messages=self._sink.arrived,
            on_written=self._sink.written,
        )
        # The link bounds what is in flight; paho's own window would only add a hidden queue.
        client.max_inflight_messages_set(65_535)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        # With this set paho leaves writing to us, so that many packets go out in one step.
        client.on_socket_register_write = lambda *_: None
        return client

    def _dial(self) -> Stream:
        way = self._way
        url = way.broker.url
        return dial(url, self._tls, way.proxy, way.settings.connect_timeout_seconds, self._clock)

    def _finish(self, end: ConnectionEnd) -> None:
        if self.end is None:
            self.end = end
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _on_connect(
        self,
        client: Client,
        userdata: object,
        flags: ConnectFlags,
        code: ReasonCode,
        properties: Properties | None,
    ) -> None:
        if code.value == _UNSUPPORTED_VERSION:
            self.end = ConnectionEnd("version", str(code), code.value)
        elif code.value >= _FAILURE:
            detail = _detail(code, properties)
            if code.value in UNWANTED_CODES:
                detail += f" ({_who(self._way.broker)})"
            self.end = ConnectionEnd("refused", detail, code.value)
        else:
            self.limits = _limits(properties)

    def _on_disconnect(
        self,
        client: Client,
        userdata: object,
        flags: DisconnectFlags,
        code: ReasonCode,
        properties: Properties | None,
    ) -> None:
        if self.end is not None:
            return
        if flags.is_disconnect_packet_from_server:
            self.end = ConnectionEnd("server", _detail(code, properties), code.value)
        elif self.limits is None:
            self.end = ConnectionEnd("no-connack", "closed before the CONNACK")
        else:
            self.end = ConnectionEnd("closed", str(code))

    def _on_message(self, client: Client, userdata: object, message: MQTTMessage) -> None:
        self._sink.arrived([Message(message.topic, bytes(message.payload), message.retain)])

    def _on_publish(
        self,
        client: Client,
        userdata: object,
        mid: int,
        code: ReasonCode,
        properties: Properties | None,
    ) -> None:
        refused = code.value >= _FAILURE
        self._sink.acknowledged(mid, code.value, _detail(code, properties) if refused else "")

    def _on_subscribe(
        self,
        client: Client,
        userdata: object,
        mid: int,
        codes: list[ReasonCode],
        properties: Properties | None,
    ) -> None:
        self._sink.granted(mid, [(code.value, _detail(code, properties)) for code in codes])


def _mistrust(error: ssl.SSLError) -> str:
    """Why there is no TLS, and what to do where the other end's authority is not known."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return str(error)
    return (
        f"{error.verify_message}: where the authority is one of your own, name its certificate by "
        "ca_file (--ca-file) or in the variable SSL_CERT_FILE"
    )


def _cause(error: OSError) -> str:
    """Why there is no connection, in words where the system's are few."""
    said = str(error) or type(error).__name__
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens there: {said}"
    if isinstance(error, socket.gaierror):
        return f"the host's name does not resolve: {said}"
    return said


def _who(broker: BrokerWay) -> str:
    """As whom we came, and what to do where that is not wanted."""
    user = "no user" if broker.url.user is None else f"user {broker.url.user!r}"
    prefix = broker.client_id_prefix
    ids = f"a client id that begins with {prefix!r}" if prefix else "a client id without a prefix"
    return (
        f"{broker} was given {user} and {ids}: check user and password, and whether it asks for "
        f"{'another' if prefix else 'a'} client_id_prefix"
    )


def _detail(code: ReasonCode, properties: Properties | None) -> str:
    text = getattr(properties, "ReasonString", None)
    return f"{code}: {text}" if isinstance(text, str) else str(code)


def _limits(properties: Properties | None) -> ServerLimits:
    """paho decodes these CONNACK properties and then ignores all but the keep-alive."""
    keepalive = getattr(properties, "ServerKeepAlive", None)
    return ServerLimits(
        receive_maximum=max(1, getattr(properties, "ReceiveMaximum", 65_535)),
        maximum_packet_bytes=getattr(properties, "MaximumPacketSize", None),
        maximum_qos=min(1, getattr(properties, "MaximumQoS", 1)),
        retain_available=bool(getattr(properties, "RetainAvailable", 1)),
        keepalive_seconds=keepalive,
    )
