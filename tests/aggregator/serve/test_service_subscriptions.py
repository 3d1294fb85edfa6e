"""A broker that refuses a subscription: a clear end for a wrong ACL, patience for all else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from aggregator.serve.metrics import Told, registry_of
from device_sdk.wire.publish.receipts import Verdict
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK, MakeLink
from tests.brokers.scripted import ScriptedBroker
from tests.brokers.subscription_rules import SubscriptionRules
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import ServeProcess, Serving, command, invite, make_home, serving
from tests.fakes.waiting import wait_until

ROUND = "quorum = 1"
UPDATES, ENROLMENTS = "tessera/up/+/+", "tessera/enrol/request"
DESCRIPTOR, PRESENCE = "tessera/all/descriptor", "tessera/all/presence"
PROBES = "tessera/all/probe"
NOT_AUTHORISED = 0x87


def refused(served: Serving) -> tuple[str, ...]:
    seen = served.service.last_snapshot()
    return () if seen is None else seen.refused_subscriptions


def metric(served: Serving) -> float | None:
    registry = registry_of(Told(served.service.last_snapshot))
    return registry.get_sample_value("tessera_subscriptions_refused")


def test_a_refusal_or_two_at_the_start_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    grants = {UPDATES: [NOT_AUTHORISED, NOT_AUTHORISED, 1], ENROLMENTS: [NOT_AUTHORISED, 1]}
    with ScriptedBroker(grants=grants) as broker:
        home = make_home(tmp_path, broker.url, ROUND)
        with serving(home, link_settings=QUICK) as served:
            wait_until(lambda: caplog.text.count("has granted the subscription") == 2)
            assert served.service.snapshot().refused_subscriptions == ()
        assert (broker.asked.count(UPDATES), broker.asked.count(ENROLMENTS)) == (3, 2)
    assert caplog.text.count(f"refused the subscription to {UPDATES} (Not authorized)") == 2


def test_a_new_broker_s_rules_end_no_serve_that_waits_for_the_one_before(
    tmp_path: Path, make_mosquitto: MakeMosquitto
) -> None:
    """It starts while the broker of before is away for a moment, where the devices are."""
    old = make_mosquitto()
    old.stop()
    with ScriptedBroker(grants={UPDATES: [NOT_AUTHORISED]}) as new:
        home = make_home(tmp_path, old.url, ROUND)
        assert command(home, "broker", "move", new.url) == 0
        with serving(home, link_settings=QUICK) as served:
            wait_until(lambda: new.asked.count(UPDATES) > 4)
            wait_until(lambda: refused(served) == (UPDATES,))
            old.start()
            with ScriptedDevice(old.url, invite(home)[0]) as device:
                device.enrol().join()


def test_what_was_granted_once_is_asked_for_for_ever(tmp_path: Path) -> None:
    every = [DESCRIPTOR, PRESENCE, PROBES, ENROLMENTS, UPDATES]
    with ScriptedBroker(grants={UPDATES: [1, NOT_AUTHORISED]}) as broker:
        home = make_home(tmp_path, broker.url, ROUND)
        with serving(home, link_settings=QUICK) as served:
            wait_until(lambda: sorted(broker.asked) == every)
            broker.cut()
            wait_until(lambda: broker.asked.count(UPDATES) >= 8)
            wait_until(lambda: refused(served) == (UPDATES,))
            assert metric(served) == 1
            broker.grant(UPDATES)
            wait_until(lambda: refused(served) == ())
            assert metric(served) == 0


def test_mosquitto_with_wrong_rules_ends_serve_with_a_message(
    make_mosquitto: MakeMosquitto, tmp_path: Path
) -> None:
    broker = make_mosquitto(*SubscriptionRules(tmp_path, "tessera/up/#").lines)
    process = ServeProcess(make_home(tmp_path, broker.url, ROUND))
    process.start()
    try:
        assert process.wait() == 1
    finally:
        process.kill()
    last = process.log.read_text().splitlines()[-1]
    assert "the broker refused the subscription to tessera/up/+/+ 3 times" in last
    assert "acl.template" in last


def test_rules_mended_while_the_aggregator_retries_let_it_begin(
    make_mosquitto: MakeMosquitto,
    make_link: MakeLink,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Real time must not decide whether the third refusal comes before the operator.
    monkeypatch.setattr("aggregator.serve.service._MOST_REFUSALS_AT_THE_START", 10_000)
    rules = SubscriptionRules(tmp_path, "tessera/#")
    broker = make_mosquitto(*rules.lines)
    operator = make_link(broker.url)
    home = make_home(tmp_path, broker.url, ROUND)
    with serving(home, link_settings=QUICK) as served:
        wait_until(lambda: refused(served) == (DESCRIPTOR, PRESENCE, ENROLMENTS, UPDATES))
        rules.change(operator)
        with ScriptedDevice(broker.url, invite(home)[0]) as anna:
            wait_until(lambda: refused(served) == ())
            assert anna.enrol().join().take_part(1).verdict is Verdict.COUNTED


def test_rules_that_go_wrong_and_are_mended_under_a_running_fleet(
    make_mosquitto: MakeMosquitto, make_link: MakeLink, tmp_path: Path
) -> None:
    rules = SubscriptionRules(tmp_path)
    broker = make_mosquitto(*rules.lines)
    operator = make_link(broker.url)
    home = make_home(tmp_path, broker.url, ROUND)
    with (
        serving(home, link_settings=QUICK) as served,
        ScriptedDevice(broker.url, invite(home)[0]) as anna,
    ):
        anna.enrol().join()
        assert anna.take_part(1).verdict is Verdict.COUNTED
        broker.kill()
        rules.write("tessera/up/#")
        broker.start()
        wait_until(lambda: refused(served) == (UPDATES,))
        rules.change(operator)
        wait_until(lambda: refused(served) == ())
        assert anna.take_part(2).verdict is Verdict.COUNTED
