"""What waits to be sent: receipts at once, retained messages as the link has room."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aggregator.events import LogEvent
from aggregator.publish.mirror import ChunkMirror, is_chunk
from aggregator.rounds.ingest import Settled
from aggregator.serve.broker_links import BrokerLinks, Deliveries
from aggregator.serve.standings import Standings
from aggregator.serve.uplink import Uplink
from aggregator.store.publications import Retained
from device_sdk.link.events import Delivery, LinkError, Outcome

_SILENT_SECONDS = 4.0
_MOST_REPEATS = 3
_MOST_UNMIRRORED = 1 << 16
_IDLE_PUMPS = 64


class _OnItsWay(NamedTuple):
    """A retained message on its way; ``payload`` None: the store has it."""

    topic: str
    payload: bytes | None
    delivery: Delivery


class Outgoing:
    """Nothing here waits, and nothing is lost that matters.

    Receipts travel at QoS 0: the few messages that a broker lets wait for its acknowledgement,
    times the round trips in a second, would be all that a fleet gets. A receipt that is lost, or
    finds no room, does no harm: the device sends its update again and gets the same verdict.
    Retained messages wait as topics; their bytes stay in the store until they are sent. Chunks go
    to the mirror, where there is one and it keeps up, before what names them goes to the broker.

    What is out of date is cleared at each broker that is there, and remembered in the store until
    it was at all of them: one that is away holds up nothing at the others, and its own turn comes
    with its connection.

    A broker of several nodes that has just lost one waits for the others, gives up, and
    acknowledges what it did not retain. So a retained message whose acknowledgement came after a
    long silence is sent again, up to three times.
    """

    def __init__(
        self, link: BrokerLinks, retained: Retained, mirror: ChunkMirror | None = None
    ) -> None:
        self._link = link
        self._retained = retained
        self._mirror = mirror
        self._unmirrored: deque[str] = deque(maxlen=_MOST_UNMIRRORED)  # the newest of them
        self._standing: deque[tuple[str, bytes]] = deque()
        self._topics: deque[str] = deque()
        self._clearing: dict[str, Delivery | Deliveries] = {}
        self._cleared: set[str] = set()  # at all brokers that are there, and not at all
        self._idle_pumps = 0  # left, in which the store is not asked what is to be cleared
        self._on_their_way: deque[_OnItsWay] = deque()
        self._repeats: Counter[str] = Counter()
        self.bytes_sent = 0
        self.dropped = 0

    def send(self, topic: str, payload: bytes) -> None:
        """Send an answer to one device that would be dear to ask for again."""
        if self._publish(topic, payload, retain=False) is None:
            self.dropped += 1

    def send_receipts(self, receipts: Sequence[tuple[str, bytes]]) -> None:
        """Send a group's receipts, each to its topic."""
        try:
            self._link.publish_each(receipts, qos=0)
            sent = len(receipts)
        except LinkError as error:
            sent = error.taken
        self.dropped += len(receipts) - sent
        self.bytes_sent += sum(len(payload) for _, payload in receipts[:sent])

    def announce(self, standing: Iterable[tuple[str, bytes]], topics: Iterable[str]) -> None:
        """Send retained messages: ``standing`` as given, then ``topics`` from the store."""
        self._standing.extend(standing)
        topics = tuple(topics)
        self._topics = deque(dict.fromkeys((*self._topics, *topics)))
        self._idle_pumps = 0
        if self._mirror is not None:
            self._unmirrored.extend(topics)

    def connected(self) -> None:
        """There is another connection, and all is announced anew. What waits for brokers that were
        there already goes first: one that comes and goes all the time keeps nothing from them."""
        waiting = self._topics.copy()
        self.connection_lost()
        self._topics = waiting

    def connection_lost(self) -> None:
        """Forget what waits: all of it is announced anew at the next connection."""
        self._standing.clear()
        self._topics.clear()
        self._clearing.clear()
        self._cleared.clear()
        self._idle_pumps = 0
        self._on_their_way.clear()
        self._repeats.clear()

    def pump(self) -> None:
        """Send what there is room for."""
        self._doubt()
        while self._standing and self._show(*self._standing[0], stored=False):
            self._standing.popleft()
        mirrored = self._mirror is None or self._is_mirrored(self._mirror)
        while self._topics and not self._standing:
            message = self._retained.message(self._topics[0])
            if message is not None:
                if not mirrored and not is_chunk(message):
                    return
                if not self._show(self._topics[0], message, stored=True):
                    return
            self._topics.popleft()
        if not self._topics and not self._standing:
            self._clear()

    def _doubt(self) -> None:
        """Send again what the broker may not have retained."""
        while self._on_their_way and self._on_their_way[0].delivery.outcome is not None:
            topic, payload, delivery = self._on_their_way.popleft()
            silent = delivery.silent_seconds
            if silent < _SILENT_SECONDS or self._repeats[topic] >= _MOST_REPEATS:
                del self._repeats[topic]
                continue
            self._repeats[topic] += 1
            LogEvent.MESSAGE_DOUBTED.log(topic=topic, seconds=silent)
            if payload is None:
                self._topics.append(topic)
            else:
                self._standing.append((topic, payload))

    def _show(self, topic: str, payload: bytes, *, stored: bool) -> bool:
        delivery = self._publish(topic, payload, retain=True)
        if delivery is not None:
            self._clearing.pop(topic, None)
            self._cleared.discard(topic)
            self._on_their_way.append(_OnItsWay(topic, None if stored else payload, delivery))
        return delivery is not None

    def _is_mirrored(self, mirror: ChunkMirror) -> bool:
        while self._unmirrored and mirror.has_room:
            message = self._retained.message(self._unmirrored[0])
            topic = self._unmirrored.popleft()
            if message is not None and is_chunk(message):
                mirror.put(topic, message)
            if not self._unmirrored:
                mirror.sweep()
        # Where the mirror fails or hangs the broker has all of it all the same.
        return bool(mirror.problem) or not (self._unmirrored or mirror.behind)

    def stop(self) -> None:
        """Write nothing more to the mirror."""
        if self._mirror is not None:
            self._mirror.stop()

    @property
    def busy(self) -> bool:
        """Whether retained messages wait for room."""
        return bool(self._standing or self._topics)

    def _clear(self) -> None:
        """Remove from the broker what is out of date, after its successor was sent."""
        if any(each.outcome is None for each in self._clearing.values()):
            return
        taken = {t: d for t, d in self._clearing.items() if d.outcome is Outcome.ACKNOWLEDGED}
        self._clearing.clear()
        if taken:
            partly = {t for t, d in taken.items() if isinstance(d, Deliveries) and d.away}
            self._cleared |= partly
            self._retained.cleared(taken.keys() - partly)
            if self._mirror is not None:
                self._mirror.drop(taken)
        elif self._idle_pumps:
            self._idle_pumps -= 1
            return
        for topic in self._retained.superseded():
            if topic in self._cleared:
                continue
            try:
                self._clearing[topic] = self._link.publish(topic, b"", retain=True)
            except LinkError:
                return
        if not self._clearing:
            self._idle_pumps = _IDLE_PUMPS

    def _publish(self, topic: str, payload: bytes, *, retain: bool) -> Delivery | None:
        try:
            delivery = self._link.publish(topic, payload, retain=retain)
        except LinkError:
            return None
        self.bytes_sent += len(payload)
        return delivery


def answer_updates(
    settled: Sequence[Settled], uplink: Uplink, outgoing: Outgoing, standings: Standings
) -> None:
    """Send each device the receipt of its update, and say its tasks anew to one whose update was of
    a task that is not for it."""
    if not settled:
        return
    answers = [uplink.receipt(each.device_id, each.receipt) for each in settled]
    outgoing.send_receipts([answer[:2] for answer in answers if answer is not None])
    standings.remind([each.device_id for each in settled if each.receipt.reason == "not-eligible"])
