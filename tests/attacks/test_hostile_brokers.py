"""What needs a real broker: clients that throw each other out, and retained messages that stay."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from device_sdk.link.events import Message
from device_sdk.link.link import Link
from device_sdk.wire.publish.topics import DownTopic, Topics, UpTopic
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.homes import serving
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until
from tests.faults.device_process import make_agent
from tests.faults.fleet_home import FleetHome, make_fleet
from tests.faults.known import KnownBinding
from tests.faults.oracle import judge, outbox_rows

_ROUND = "quorum = 1\nwait_for_devices = 1\npause_seconds = 0.2"


def _await_counted(fleet: FleetHome, agent: object, least: int) -> None:
    home = agent.participant._world.home  # type: ignore[attr-defined]
    counted = "WHERE verdict = 'counted'"
    wait_until(lambda: len(home.rounds._participations(counted)) >= least, "no update was counted")


def test_a_client_id_taken_over_delays_and_reveals_nothing(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    fleet = make_fleet(tmp_path, mosquitto.url, 1, _ROUND, seed=1)
    topics = Topics()
    with serving(fleet.aggregator, KnownBinding()) as served:
        agent = make_agent(fleet.devices[0], 0)
        membership = agent.participant._world.membership
        agent.start()
        _await_counted(fleet, agent, 1)
        down = topics.write(DownTopic(membership.grant.handle))
        up = topics.write(UpTopic(membership.grant.shard, membership.grant.handle))
        # The thief is thrown out again at once: what it may say again, somebody hears all the time.
        thief, listener = (
            Link(
                mosquitto.url,
                rng=np.random.default_rng(1),
                clock=time.monotonic,
                client_id=client_id,
                settings=QUICK,
            )
            for client_id in (agent._link.client_id, "listener")
        )
        for link in (thief, listener):
            link.subscribe(down)
            link.subscribe(up)
            link.start()
        heard: dict[bytes, None] = {}  # in order, each once
        stolen = thrown_out = 0
        until = time.monotonic() + 3
        while time.monotonic() < until or not (heard and stolen and thrown_out):
            assert time.monotonic() < until + 120, "the client id was not taken over"
            thrown_out += not agent._link.connected
            stolen += thief.connected
            for event in [
                *listener.events(timeout_seconds=0.03),
                *thief.events(timeout_seconds=0.02),
            ]:
                if isinstance(event, Message):
                    heard[event.payload] = None
            for payload in list(heard)[-5:]:
                thief.publish(up, payload)  # under the stolen name
        listener.stop()
        thief.stop()
        counted = served.parts.first.ingest.counted
        _await_counted(fleet, agent, counted + 2)
        # Opens, replies, updates with reports and without, receipts, standings: all of them sealed.
        # And what answers an envelope of a session before, said again: it is gone, signed.
        assert {payload[1] for payload in heard} <= {5, 6, 10, 16, 17, 18, 19}
        agent.stop(5)
        agent.participant._world.home.close()
    judge(fleet)


def test_retained_uplinks_left_at_a_real_broker(mosquitto: Mosquitto, tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, mosquitto.url, 1, _ROUND, seed=1)
    topics = Topics()
    agent = make_agent(fleet.devices[0], 0)
    grant = agent.participant._world.membership.grant
    up = topics.write(UpTopic(grant.shard, grant.handle))
    vandal = Link(mosquitto.url, rng=np.random.default_rng(1), clock=time.monotonic, settings=QUICK)
    vandal.start()
    sent = vandal.publish(up, b"\x01\x10" + os.urandom(200), retain=True)
    assert sent.wait(PATIENCE_SECONDS) is not None
    vandal.stop()
    with serving(fleet.aggregator, KnownBinding()) as served:
        agent.start()
        _await_counted(fleet, agent, 2)
        assert served.parts.refusals.counts["retained"] >= 1
        agent.stop(5)
        agent.participant._world.home.close()
    judge(fleet)
    assert outbox_rows(fleet, 0) == [] or len(outbox_rows(fleet, 0)) == 1
