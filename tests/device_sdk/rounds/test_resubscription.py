"""What a broker lost while a subscription settled is asked for again, by no two devices at once."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from device_sdk.link.events import Event
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.receipts import RecordType
from tests.fakes.in_memory import Bench

UPDATE = int(RecordType.CONTRIBUTION)
MANIFEST = "tessera/all/manifest/default/all"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "home")


def asks(bench: Bench) -> list[tuple[float, str]]:
    """When the device subscribed to what, from now on."""
    found: list[tuple[float, str]] = []
    subscribe = bench.broker.subscribe

    def subscribed(topic_filter: str) -> None:
        found.append((bench.now_seconds, topic_filter))
        subscribe(topic_filter)

    bench.broker.subscribe = subscribed  # type: ignore[method-assign]
    return found


def lose_subscriptions(bench: Bench) -> None:
    """They were granted, and what is published now does not come."""
    bench.broker.filters.clear()


def test_a_round_that_was_published_meanwhile_is_heard_of_soon(bench: Bench) -> None:
    bench.run(1)
    lose_subscriptions(bench)
    bench.aggregator.open_round(deadline_seconds=600)
    bench.run(30)
    assert len(bench.jobs) == 1 and bench.sent(UPDATE)
    # Its own topic is lost too, so that no receipt comes: it looks for another session.
    bench.run(600)
    assert bench.home.rounds.outbox_size()[0] == 0


def test_a_life_that_began_meanwhile_is_heard_of_before_long(bench: Bench) -> None:
    bench.run(1)
    lose_subscriptions(bench)
    take = bench.aggregator._take

    def refuse(event: Event) -> None:
        with suppress(WireError):
            take(event)

    bench.aggregator._take = refuse  # type: ignore[method-assign]
    bench.aggregator.forget_sessions()
    bench.aggregator.publish_standing()
    bench.aggregator.open_round(deadline_seconds=3600)
    bench.run(3000)
    assert len(bench.jobs) == 1 and bench.home.rounds.outbox_size()[0] == 0


def test_an_aggregator_that_came_while_a_new_device_subscribed_is_found(bench: Bench) -> None:
    shown = dict(bench.broker.retained)
    bench.broker.retained.clear()
    bench.run(1)
    lose_subscriptions(bench)
    bench.broker.retained.update(shown)
    bench.run(45)
    assert bench.participant.sessions.is_open


def test_a_device_that_waits_for_days_asks_seldom(bench: Bench) -> None:
    bench.aggregator.open_round(deadline_seconds=600)
    bench.run(600)
    found = asks(bench)
    bench.run(2 * 86_400)
    assert {topic for _, topic in found} == {MANIFEST}
    an_hour = len(found) / 48
    assert 9 < an_hour < 12
    # SUBSCRIBE, SUBACK and PUBLISH of MQTT 5, each with its head and packet id.
    topic, payload = len(MANIFEST), len(bench.broker.retained[MANIFEST])
    assert an_hour * ((9 + topic) + 6 + (9 + topic + payload)) < 7_000
    # What it was shown again is no news, and nothing to count either.
    assert bench.participant.refusals.counts() == {} and len(bench.jobs) == 1


def test_no_two_devices_ask_at_once(tmp_path: Path) -> None:
    """All of them connected at the same moment, and heard of the same round since."""
    first = []
    for seed in range(20):
        bench = Bench(tmp_path / str(seed), seed=seed)
        found = asks(bench)
        bench.run(0.5)
        found.clear()
        bench.aggregator.open_round(deadline_seconds=600)
        bench.run(60)
        first.append(min(at - 1_000_000.0 for at, topic in found if topic == MANIFEST))
        bench.home.close()
    assert min(first) > 15 and max(first) <= 30
    assert np.ptp(first) > 8 and min(np.diff(sorted(first))) > 0


def test_a_device_with_a_round_in_hand_does_not_ask(bench: Bench) -> None:
    bench.run(1)
    topics = bench.broker.retained
    bench.aggregator.open_round(deadline_seconds=86_400)
    for name in [each for each in topics if "/chunk/" in each]:
        del topics[name]  # so it stays in hand
    bench.broker.to_device.clear()
    bench.participant.message(MANIFEST, topics[MANIFEST], retained=False)
    found = asks(bench)
    bench.run(3600)
    assert found and MANIFEST not in {topic for _, topic in found}
