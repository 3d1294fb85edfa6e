"""A device whose broker refuses a subscription says so, and goes on once the rules are mended."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_sdk.device import Device
from device_sdk.link.link import Link
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import MakeLink
from tests.brokers.mosquitto import Mosquitto
from tests.brokers.subscription_rules import SubscriptionRules
from tests.fakes.small_aggregator import SmallAggregator


@pytest.fixture
def rules(tmp_path: Path) -> SubscriptionRules:
    return SubscriptionRules(tmp_path)


@pytest.fixture
def mosquitto(make_mosquitto: MakeMosquitto, rules: SubscriptionRules) -> Mosquitto:
    """In the place of the one that lets everybody in."""
    return make_mosquitto(*rules.lines)


@pytest.fixture
def operator(make_link: MakeLink, mosquitto: Mosquitto) -> Link:
    """Who may change the broker's rules."""
    return make_link(mosquitto.url)


@pytest.fixture
def refused(
    device: Device, aggregator: SmallAggregator, operator: Link, rules: SubscriptionRules
) -> Device:
    """A device that runs and says that a subscription is refused."""
    rules.change(operator, "tessera/all/manifest/#")
    device.start()
    aggregator.await_(lambda: "refused the subscription" in device.status().problem)
    return device


def test_a_refused_subscription_is_a_problem_until_the_rules_are_mended(
    refused: Device, aggregator: SmallAggregator, operator: Link, rules: SubscriptionRules
) -> None:
    rules.change(operator)
    aggregator.await_(lambda: refused.status().problem == "")  # though nothing else happens
    assert refused.status().connected
    aggregator.open_round()
    aggregator.await_(lambda: refused.status().receipted_round == 1)
