"""Whether a broker lets ``serve`` do what it does, tried without leaving anything there."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from cryptography import x509

from aggregator.clock import moment_of
from aggregator.errors import AggregatorError
from aggregator.keys.fence import Fence
from aggregator.operate.soundness import Aspect, CheckedPart, Soundness
from device_sdk.link import LinkSettings
from device_sdk.link.broker_url import BrokerWay, TlsFiles
from device_sdk.link.dial import dial
from device_sdk.link.events import (
    Connected,
    ConnectRefused,
    Delivery,
    Disconnected,
    Event,
    Message,
    Outcome,
    Subscribed,
    SubscribeRefused,
)
from device_sdk.link.link import Link
from device_sdk.link.proxy import proxy_for
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.topics import (
    ChunkTopic,
    DescriptorTopic,
    DownTopic,
    EnrolAnswerTopic,
    EnrolRequestTopic,
    PresenceTopic,
    ProbeTopic,
    Topics,
)
from device_sdk.wire.seal.keys import RandomBytes, draw

_TLS, _BROKER, _HOME = Aspect("tls"), Aspect("broker"), Aspect("home")
_SOON_SECONDS = 14 * 86_400
_FEW_UNACKNOWLEDGED = 256
_LOOK_SECONDS = 0.1
_ANOTHER_TRY = ("no-connack", "version")
"""Why a connection ended that is made again at once, as one of an older MQTT."""
_RIGHTS = "give {user} the rights of aggregator/acl.template"


def ends_of(path: Path) -> list[float]:
    """When a file's certificates end, in Unix seconds. Raises OSError, ValueError."""
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError:
        raise ValueError("it is no plain PEM certificate: openssl x509 -in writes one") from None
    return [each.not_valid_after_utc.timestamp() for each in found]


def validity(part: Aspect, what: str, ends: float, now: float) -> CheckedPart:
    """Of a certificate that ends then. All times are Unix seconds."""
    if ends <= now:
        return part.wrong(f"{what} has ended at {moment_of(ends)}", "renew it")
    said = f"{what} holds until {moment_of(ends)}"
    return part.ok(said) if ends - now >= _SOON_SECONDS else part.warning(said, "renew it")


@dataclass(frozen=True)
class BrokerCheck:
    """Of one broker. ``topics``: the fleet's; ``fence``: what the home's next life would know of
    others, None without a home; ``seconds``: for each step; ``clock``: monotonic seconds.

    Its client id is random, as ``serve``'s are, so it takes nobody's place. It subscribes to what
    ``serve`` does, and takes in nothing but what devices are told of their aggregator; what it
    publishes goes to topics that nobody reads (ids drawn at random), but for one message to
    ``serve``'s own probe, which heeds only its own.
    The one that is retained is empty: a broker takes that for clearing.
    """

    way: BrokerWay
    proxy: str | None
    topics: Topics
    fence: Fence | None
    clock: Callable[[], float]
    unix_clock: Callable[[], float]
    rng: np.random.Generator
    random_bytes: RandomBytes
    seconds: float = 10.0

    def look(self) -> Iterator[CheckedPart]:
        """TLS first, where there is any."""
        if self.way.url.tls:
            found = list(self._tls())
            yield from found
        yield from self._connection()

    # -- TLS ---------------------------------------------------------------------------------------

    def _tls(self) -> Iterator[CheckedPart]:
        files = self.way.tls or TlsFiles()
        try:
            context = files.context()
        except ValueError as error:
            yield _TLS.wrong(str(error), "see [broker] in the task file")
            return
        now = self.unix_clock()
        # Of authorities one that holds may do; a chain holds no longer than each part of it.
        for name, of_all in (("ca_file", max), ("certificate_file", min)):
            if (path := getattr(files, name)) is None:
                continue
            what = f"broker.{name} {path}"
            try:
                holds = validity(_TLS, what, of_all(ends_of(Path(path))), now)
            except (OSError, ValueError) as error:  # it could be used
                holds = _TLS.warning(f"how long {what} holds cannot be told", str(error))
            if holds.soundness is not Soundness.OK:
                yield holds
        try:
            proxy = proxy_for(self.way.url, self.proxy)
            url = replace(self.way.url, path=None)  # a WebSocket's would come behind it
            stream = dial(url, context, proxy, self.seconds, self.clock)
        except ssl.SSLError as error:
            yield _TLS.wrong(
                f"{self.way} is not trusted ({error})",
                "its certificate has to be valid now, for the host in broker.url, and signed by "
                "an authority in broker.ca_file; is this machine's clock right?",
            )
            return
        except (OSError, ValueError):
            return  # the connection says it
        with closing(stream):
            presented = stream.getpeercert() if isinstance(stream, ssl.SSLSocket) else None
        if presented:
            ends = ssl.cert_time_to_seconds(str(presented["notAfter"]))
            yield validity(_TLS, f"the certificate of {self.way}", ends, now)

    # -- MQTT --------------------------------------------------------------------------------------

    def _connection(self) -> Iterator[CheckedPart]:
        settings = LinkSettings(proxy=self.proxy, connect_timeout_seconds=self.seconds)
        probe = self.topics.write(ProbeTopic())
        heard = {probe.encode(), *(each.encode() for each in self._fenced())}
        try:
            link = Link(
                self.way,
                rng=self.rng,
                clock=self.clock,
                settings=settings,
                admits=heard.__contains__,
            )
        except ValueError as error:
            yield _BROKER.wrong(str(error), "see [broker] in the task file")
            return
        try:
            yield from self._talk(link, probe)
        finally:
            link.stop()

    def _fenced(self) -> Mapping[str, Callable[[bytes], None]]:
        """Who hears what is retained of the fleet's aggregator, by topic."""
        if self.fence is None:
            return {}
        return {
            self.topics.write(DescriptorTopic()): self.fence.heard_descriptor,
            self.topics.write(PresenceTopic()): self.fence.heard_presence,
        }

    def _talk(self, link: Link, probe: str) -> Iterator[CheckedPart]:
        fenced = self._fenced()
        filters = (self.topics.up_filter(), self.topics.write(EnrolRequestTopic()), probe, *fenced)
        for each in filters:
            link.subscribe(each)
        talk = _Talk(link, fenced, self.clock, self.seconds)
        link.start()
        talk.until(lambda: talk.connected is not None)
        if talk.connected is None:
            yield _BROKER.wrong(
                f"{self.way}: {talk.problem or f'no answer within {self.seconds:g} s'}",
                "is it running, and are broker.url, user and password_file right?",
            )
            return
        limits = talk.connected.limits
        yield _BROKER.ok(f"{self.way} lets us in, by MQTT {talk.connected.version.value}")
        rights = _RIGHTS.format(user=self.way.url.user or "this user")
        talk.until(lambda: len(talk.granted) + len(talk.refused) == len(filters))
        for each in filters:
            if each not in talk.granted:
                why = talk.refused.get(each, talk.problem or "no answer")
                yield _BROKER.wrong(f"it refuses the subscription to {each} ({why})", rights)
        if self.fence is not None:
            self.fence.connected()
            talk.until(self.fence.may_announce)
            if talk.fenced_off:
                yield _HOME.wrong(talk.fenced_off)
        nonce = draw(self.random_bytes, 16)
        sent = {
            "down/#": link.publish(self.topics.write(DownTopic(draw(self.random_bytes, 16))), b""),
            "enrol/answer/#": link.publish(
                self.topics.write(EnrolAnswerTopic(draw(self.random_bytes, 16))), b""
            ),
            "all/#": link.publish(
                self.topics.write(ChunkTopic(draw(self.random_bytes, 32), 0)), b"", retain=True
            ),
            "all/probe": link.publish(probe, nonce),
        }
        talk.until(lambda: all(each.outcome is not None for each in sent.values()))
        lacking = {
            place: _fate(each, talk.problem)
            for place, each in sent.items()
            if each.outcome is not Outcome.ACKNOWLEDGED
        }
        for place, why in lacking.items():
            topic = f"{self.topics.prefix}/{place}"
            yield _BROKER.wrong(f"nothing can be published to {topic} ({why})", rights)
        if not lacking and not talk.until(lambda: nonce in talk.came):
            yield _BROKER.warning(
                f"it acknowledged a message to {probe}, and did not deliver it to us",
                f"{rights}: else serve cannot see whether messages are lost",
            )
        if not limits.retain_available:
            yield _BROKER.wrong("it keeps no retained messages", "have it keep them")
        if limits.maximum_qos < 1:
            yield _BROKER.wrong("it knows QoS 0 alone", "have it take QoS 1")
        if limits.receive_maximum < _FEW_UNACKNOWLEDGED:
            yield _BROKER.warning(
                f"it takes {limits.receive_maximum} messages before it wants to have acknowledged "
                "the first, which slows serve",
                "in mosquitto.conf, max_inflight_messages 1000",
            )
        if not lacking and talk.granted.issuperset(filters):
            yield _BROKER.ok("serve may subscribe and publish there")


def _fate(delivery: Delivery, problem: str) -> str:
    if delivery.outcome is Outcome.LOST:
        return f"the connection ended: {problem}"
    return delivery.detail or "no answer"


class _Talk:
    """What the broker said so far."""

    def __init__(
        self,
        link: Link,
        fenced: Mapping[str, Callable[[bytes], None]],
        clock: Callable[[], float],
        seconds: float,
    ) -> None:
        self._link, self._fenced, self._clock, self._seconds = link, fenced, clock, seconds
        self.connected: Connected | None = None
        self.problem = ""
        self.granted: set[str] = set()
        self.refused: dict[str, str] = {}
        self.came: set[bytes] = set()
        self.fenced_off = ""
        """Why serve would end."""
        self._is_over = False

    def until(self, true: Callable[[], bool]) -> bool:
        """Listen until it is, for as long as it may take; whether it is."""
        ends = self._clock() + self._seconds
        while not (done := true()) and not self._is_over and self._clock() < ends:
            for event in self._link.events(timeout_seconds=_LOOK_SECONDS):
                self._hear(event)
        return done

    def _hear(self, event: Event) -> None:
        match event:
            case Connected():
                self.connected = event
            case ConnectRefused():
                self.problem, self._is_over = event.detail, True
            case Disconnected():
                self.problem = event.detail
                self._is_over = event.reason not in _ANOTHER_TRY
            case Subscribed():
                self.granted.add(event.topic_filter)
            case SubscribeRefused():
                self.refused[event.topic_filter] = event.detail
            case Message(topic=topic) if topic in self._fenced:
                try:
                    with suppress(WireError):  # nobody's whom a device would heed
                        self._fenced[topic](event.payload)
                except AggregatorError as error:
                    self.fenced_off = self.fenced_off or str(error)
            case Message():
                self.came.add(event.payload)
            case _:
                pass
