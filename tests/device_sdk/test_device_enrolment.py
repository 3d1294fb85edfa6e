"""Joining a fleet: once, with errors that say what to do."""

from __future__ import annotations

import re
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from device_sdk.device import Device
from device_sdk.errors import (
    AlreadyEnrolled,
    EnrolmentFailed,
    EnrolmentRefused,
    HomeBroken,
    HomeError,
    NotEnrolled,
)
from device_sdk.link.broker_url import TlsFiles
from device_sdk.link.link import Link
from device_sdk.wire.publish.topics import (
    EnrolRequestTopic,
    ManifestTopic,
    PresenceTopic,
    TasksTopic,
)
from device_sdk.wire.seal.announcement import ServedTasks, announce
from device_sdk.wire.seal.enrolment_message import new_code
from tests.brokers.authority import Authority
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK, MakeLink
from tests.brokers.mosquitto import Mosquitto, free_port, password_file
from tests.brokers.scripted import ScriptedBroker
from tests.brokers.subscription_rules import SubscriptionRules
from tests.fakes.homes import invite, make_home, serving
from tests.fakes.small_aggregator import SmallAggregator
from tests.fakes.waiting import PATIENCE_SECONDS, fails_in_the_end


def join(
    url: str,
    code: str,
    home: Path,
    *,
    seconds: float = PATIENCE_SECONDS,
    prefix: str = "tessera",
    task: str = "default",
    cohort: str = "all",
) -> Device:
    return Device.enrol(
        url,
        code,
        home,
        timeout_seconds=seconds,
        prefix=prefix,
        task=task,
        cohort=cohort,
        link_settings=QUICK,
    )


def test_an_enrolled_home_is_private_and_never_enrolled_again(
    device: Device, aggregator: SmallAggregator, mosquitto: Mosquitto
) -> None:
    device.close()
    assert stat.S_IMODE(device.home.stat().st_mode) == 0o700
    for path in device.home.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    with pytest.raises(AlreadyEnrolled, match="another home"):
        join(mosquitto.url, aggregator.code(), device.home)
    with Device.open(device.home) as again:
        assert again.device_id == device.device_id and again.status().interactions == 6


def test_a_used_code_is_refused_and_the_same_device_gets_its_answer_again(
    aggregator: SmallAggregator, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    code = aggregator.code()
    first = join(mosquitto.url, code, tmp_path / "a")
    first.close()
    with pytest.raises(EnrolmentRefused, match="used by another device") as refused:
        join(mosquitto.url, code, tmp_path / "b")
    assert refused.value.reason == "code-used"
    # As after a crash between the answer and the commit: the identity is there, the grant is not.
    for path in first.home.glob("device.sqlite*"):
        path.unlink()
    with join(mosquitto.url, code, tmp_path / "a") as again:
        assert again.device_id == first.device_id


def test_a_code_may_be_tried_again_when_nobody_answered(
    aggregator: SmallAggregator, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    def fails(why: str, url: str, code: str, prefix: str = "tessera") -> None:
        fails_in_the_end(
            lambda seconds: join(url, code, tmp_path, seconds=seconds, prefix=prefix),
            EnrolmentFailed, why, 0.5,
        )  # fmt: skip

    fails("prefix 'else'", mosquitto.url, aggregator.code(), "else")
    stranger = new_code(aggregator.descriptor.digest[:16], 1, 0).to_text()
    fails("another one than the enrolment code", mosquitto.url, stranger)
    closed = f"mqtt://127.0.0.1:{free_port()}"
    fails(f"the broker at {closed} cannot be reached", closed, aggregator.code())
    with pytest.raises(NotEnrolled, match="has not joined"):
        Device.open(tmp_path)
    join(mosquitto.url, aggregator.code(), tmp_path).close()


@pytest.mark.parametrize("names", [{"task": "films"}, {"cohort": "phones"}])
def test_a_name_that_nobody_serves_is_refused_before_the_first_round(
    mosquitto: Mosquitto, tmp_path: Path, names: dict[str, str]
) -> None:
    home = make_home(tmp_path, mosquitto.url, "quorum = 1\nwait_for_devices = 5")
    (code,) = invite(home)
    expected = f"no {next(iter(names))} .*is served .*task 'default' with cohort 'all'"
    with serving(home):
        with pytest.raises(EnrolmentRefused, match=expected) as refused:
            join(mosquitto.url, code, tmp_path / "a", **names)
        assert refused.value.reason == "not-served"
        with pytest.raises(NotEnrolled):
            Device.open(tmp_path / "a")
        # Nothing was sent: this device can use the code, or another.
        join(mosquitto.url, code, tmp_path / "b").close()


def test_the_same_home_and_code_join_with_the_right_name(
    aggregator: SmallAggregator, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    code = aggregator.code()
    for _ in range(2):
        with pytest.raises(EnrolmentRefused, match="there is task 'default' with cohort 'all'"):
            join(mosquitto.url, code, tmp_path, task="films")
    join(mosquitto.url, code, tmp_path).close()


def test_a_stale_manifest_of_a_fleet_that_is_gone_refuses_nobody(
    aggregator: SmallAggregator, mosquitto: Mosquitto, make_link: MakeLink, tmp_path: Path
) -> None:
    link = make_link(mosquitto.url)
    gone = ManifestTopic("films", "phones")
    assert link.publish(aggregator.topics.write(gone), b"\x01\x07 gone", retain=True).wait(5)
    join(mosquitto.url, aggregator.code(), tmp_path / "a").close()
    aggregator.served = None  # no broker lets it through: there is nothing to hold names against
    aggregator._link.publish(aggregator.topics.write(TasksTopic()), b"", retain=True)
    join(mosquitto.url, aggregator.code(), tmp_path / "b").close()
    join(mosquitto.url, aggregator.code(), tmp_path / "c", task="any").close()


@pytest.mark.parametrize(
    "rule", ["topic deny tessera/all/tasks", "topic read tessera/all/presence"], ids=["no", "few"]
)
def test_rules_that_do_not_let_the_list_through_keep_nobody_from_joining(
    make_mosquitto: MakeMosquitto, tmp_path: Path, rule: str
) -> None:
    """Mosquitto grants the subscription all the same, and then keeps the messages."""
    lines = [rule, "topic write tessera/#", "topic read tessera/all/descriptor"]
    lines += ["topic read tessera/all/presence", "topic read tessera/up/#"]
    lines += ["topic read tessera/down/#", "topic read tessera/enrol/#"]
    acl = tmp_path / "acl"
    acl.write_text("\n".join(lines) + "\n")
    broker = make_mosquitto("allow_anonymous true", f"acl_file {acl}")
    with SmallAggregator(broker.url) as aggregator:
        join(broker.url, aggregator.code(), tmp_path / "a", task="films").close()


def test_a_list_that_the_broker_refuses_to_show_keeps_no_device_from_joining_and_running(
    make_mosquitto: MakeMosquitto, tmp_path: Path
) -> None:
    rules = SubscriptionRules(tmp_path, "tessera/all/tasks")
    broker = make_mosquitto(*rules.lines)
    with SmallAggregator(broker.url) as aggregator:
        began, most = time.monotonic(), 10 * PATIENCE_SECONDS
        with join(broker.url, aggregator.code(), tmp_path / "a", seconds=most) as device:
            # It waits a second for the list, and not for as long as it may take to enrol.
            assert time.monotonic() - began < PATIENCE_SECONDS
            device.start()
            aggregator.await_(lambda: device.status().session)
            assert device.status().problem == ""


def test_a_broker_that_hangs_up_on_the_list_is_asked_for_the_rest_without_it(
    tmp_path: Path,
) -> None:
    with ScriptedBroker(hangs_up_on="tessera/all/tasks") as broker:
        code = new_code(bytes(16), 1, 0).to_text()
        with pytest.raises(EnrolmentFailed, match="no aggregator is known"):
            join(broker.url, code, tmp_path, seconds=5.0)
        rest = ["tessera/all/descriptor", "tessera/all/presence"]
        first, second = broker.asked[:4], broker.asked[4:]
        assert first[:3] == ["tessera/all/tasks", *rest] and second[:2] == rest
        assert first[3] == second[2] and first[3].startswith("tessera/enrol/answer/")
        assert "tessera/all/tasks" not in second


def test_a_list_that_comes_after_the_presence_is_waited_for(
    aggregator: SmallAggregator, mosquitto: Mosquitto, make_link: MakeLink, tmp_path: Path
) -> None:
    aggregator.served = None
    topic = aggregator.topics.write(TasksTopic())
    aggregator._link.publish(topic, b"", retain=True)
    aggregator.served = (("default", "all"),)
    timer = threading.Timer(0.5, aggregator.publish_standing)
    timer.start()
    with pytest.raises(EnrolmentRefused, match="there is task 'default'"):
        join(mosquitto.url, aggregator.code(), tmp_path, task="films")
    timer.join()


def test_a_list_that_nobody_signed_or_of_another_life_refuses_nobody(
    aggregator: SmallAggregator, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    topic, signing = aggregator.topics.write(TasksTopic()), Ed25519PrivateKey.generate()
    served = ServedTasks(aggregator.presence.incarnation, 9, (("films", "all"),))
    forged = announce(served, aggregator.descriptor, signing)
    earlier = replace(served, incarnation=bytes(16))
    old = announce(earlier, aggregator.descriptor, aggregator._signing)
    for number, message in enumerate((forged, old, b"", b"\x01\x09")):
        aggregator._link.publish(topic, message, retain=True)
        join(mosquitto.url, aggregator.code(), tmp_path / str(number)).close()


def test_a_request_lost_on_the_way_is_sent_again(
    aggregator: SmallAggregator, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    code = aggregator.code()
    aggregator._link.unsubscribe(aggregator.topics.write(EnrolRequestTopic()))
    timer = threading.Timer(
        1.0, aggregator._link.subscribe, [aggregator.topics.write(EnrolRequestTopic())]
    )
    timer.start()
    join(mosquitto.url, code, tmp_path).close()
    timer.join()


def test_nothing_is_sent_before_the_aggregator_has_shown_which_life_it_is(
    aggregator: SmallAggregator, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    presence = aggregator.topics.write(PresenceTopic())
    code, shown = aggregator.code(), aggregator.presence
    aggregator._link.publish(presence, b"", retain=True)
    fails_in_the_end(
        lambda seconds: join(mosquitto.url, code, tmp_path, seconds=seconds),
        EnrolmentFailed, "has not shown itself", 1.5,
    )  # fmt: skip
    # One of an earlier life, shown in its place: asked in vain, until the right one comes.
    aggregator.offset_seconds = 5
    aggregator.forget_sessions()
    old = announce(shown, aggregator.descriptor, aggregator._signing)
    aggregator._link.publish(presence, old, retain=True)
    timer = threading.Timer(2.0, aggregator.publish_standing)
    timer.start()
    join(mosquitto.url, code, tmp_path).close()
    timer.join()
    assert "old-incarnation" in aggregator.seen.refused


@pytest.mark.parametrize("code", ["", "AAAA", "A" * 72, "é" * 72])
def test_a_mistyped_code_is_refused_before_anything_is_sent(tmp_path: Path, code: str) -> None:
    with pytest.raises(EnrolmentRefused, match="mistyped"):
        join("mqtt://127.0.0.1:1", code, tmp_path)


def test_rubbish_on_every_topic_does_not_keep_a_device_from_joining(
    aggregator: SmallAggregator, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    stranger = Link(mosquitto.url, rng=np.random.default_rng(), clock=time.monotonic)
    stranger.start()
    code, stop = aggregator.code(), threading.Event()

    def shout() -> None:
        while not stop.wait(0.01):
            stranger.publish("tessera/all/descriptor", b"\x01\x01" + bytes(200))

    thread = threading.Thread(target=shout)
    thread.start()
    try:
        join(mosquitto.url, code, tmp_path).close()
    finally:
        stop.set()
        thread.join()
        stranger.stop()


def test_tls_and_passwords_are_kept_for_later(
    make_mosquitto: MakeMosquitto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("broker")
    passwords = password_file(tmp_path / "passwords", {"edge": "p@ss:w/rd"})
    broker = make_mosquitto(
        f"certfile {certificate}",
        f"keyfile {key}",
        f"password_file {passwords}",
        "allow_anonymous false",
        f"listener {free_port()} 127.0.0.1",
        "allow_anonymous true",
    )
    plain = broker.configuration.read_text().splitlines()[-2].split()[1]
    secret = tmp_path / "secret"
    secret.write_text("p@ss:w/rd\n")
    url = f"mqtts://127.0.0.1:{broker.port}"
    with SmallAggregator(f"mqtt://127.0.0.1:{plain}") as aggregator:
        command = [
            *(sys.executable, "-m", "device_sdk.cli", "join", url, aggregator.code()),
            *("--home", str(tmp_path / "home"), "--ca-file", str(authority.ca_file)),
            *("--user", "edge", "--password-file", str(secret)),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "joined as device" in done.stdout
        with Device.open(tmp_path / "home", link_settings=QUICK) as device:
            device.record("film-1")
            device.start()
            aggregator.open_round()
            aggregator.await_(lambda: device.status().receipted_round == 1)
            assert device.status().broker == url
        fails_in_the_end(
            lambda seconds: join(url, aggregator.code(), tmp_path / "other", seconds=seconds),
            EnrolmentFailed, "TLS", 5.0,
        )  # fmt: skip
        # Files may be named by strings; one that cannot be used is told before the code is.
        code = aggregator.code()
        monkeypatch.chdir(authority.ca_file.parent)
        for nowhere in ("nowhere.pem", tmp_path, str(secret)):
            with pytest.raises(ValueError, match="cannot use the TLS files"):
                Device.enrol(
                    url, code, tmp_path / "text", tls=TlsFiles(nowhere),
                    timeout_seconds=PATIENCE_SECONDS,
                )  # fmt: skip
        login = f"mqtts://edge:p%40ss%3Aw%2Frd@127.0.0.1:{broker.port}"
        named = TlsFiles(ca_file=authority.ca_file.name)
        Device.enrol(
            login, code, str(tmp_path / "text"), tls=named, link_settings=QUICK,
            timeout_seconds=PATIENCE_SECONDS,
        ).close()  # fmt: skip
        monkeypatch.chdir("/")
        with Device.open(str(tmp_path / "text"), link_settings=QUICK) as device:
            device.start()
            aggregator.await_(lambda: device.status().connected)
        with pytest.raises(EnrolmentFailed, match="user and password"):
            Device.enrol(
                f"mqtts://edge:wrong@127.0.0.1:{broker.port}",
                aggregator.code(),
                tmp_path / "third",
                tls=TlsFiles(authority.ca_file),
                link_settings=QUICK,
                timeout_seconds=PATIENCE_SECONDS,
            )


def test_what_cannot_be_opened_says_why(device: Device, tmp_path: Path) -> None:
    with pytest.raises(NotEnrolled, match="no device's home"):
        Device.open(tmp_path / "nowhere")
    device.close()
    with pytest.raises(HomeError, match="was closed"):
        device.record("film-1")
    with Device.open(device.home, read_only=True) as reader:
        with pytest.raises(HomeError, match="read_only"):
            reader.start()
        with pytest.raises(HomeError, match="read_only"):
            reader.record("film-1")
    (device.home / "identity.key").chmod(0o644)
    opened = Device.open(device.home)
    with pytest.raises(
        HomeBroken, match=r"`chmod 600 .*identity.key`, and go on\. Nothing is lost"
    ):
        opened.start()
    (device.home / "identity.key").chmod(0o600)
    opened.start()
    opened.close()
    (device.home / "device.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(HomeBroken):
        Device.open(device.home)


def test_what_is_no_pair_is_not_recorded(device: Device) -> None:
    before = device.status().interactions
    for wrong in (["film-1"], ["ab"], [("film-1",)], [("film-1", "anna", 5)], [7]):
        with pytest.raises(ValueError, match=r"is no \(item, user\) pair; expected such as"):
            device.record_all([("film-90", "anna"), *wrong])  # type: ignore[list-item]
    assert device.status().interactions == before
    assert device.record_all([["film-90", "anna"]]) == 1  # type: ignore[list-item]


def test_whoever_waits_for_a_broker_that_is_not_there_is_told_soon(
    aggregator: SmallAggregator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = aggregator.code()
    listening = socket.create_server(("127.0.0.1", 0))  # accepts, and never says a word
    urls = {
        f"mqtt://127.0.0.1:{free_port()}": "nobody listens there",
        "mqtt://no-such-host.invalid": "name does not resolve|no answer yet from the broker",
        f"mqtt://127.0.0.1:{listening.getsockname()[1]}": "no answer yet from the broker",
    }

    def refused(url: str, why: str, home: Path) -> None:
        began, seconds = time.monotonic(), 5.5
        with pytest.raises(EnrolmentFailed, match=why):
            Device.enrol(url, code, home, timeout_seconds=seconds)
        assert time.monotonic() - began > 5.4  # it went on trying

    homes = [tmp_path / f"home-{place}" for place in range(len(urls))]
    with ThreadPoolExecutor() as pool:
        list(pool.map(refused, urls, urls.values(), homes))
    for url, why in urls.items():
        told = [text for each in caplog.records if url in (text := each.getMessage())]
        assert re.search(f"({why}).*; trying for [0-6] s more", told[0])  # long before the end
        assert len(told) <= 2  # once for each cause
    listening.close()


def test_join_prints_what_it_waits_for(aggregator: SmallAggregator, tmp_path: Path) -> None:
    url = f"mqtt://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "device_sdk.cli", "join", url, "--timeout", "1"]
    done = subprocess.run(
        [*command, "--home", str(tmp_path / "home")],
        input=aggregator.code(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    told, failed = done.stderr.splitlines()
    assert told.startswith(f"the broker at {url} cannot be reached (nobody listens there: ")
    assert told.endswith("; trying for 1 s more")
    assert failed.startswith(f"tessera-device: the broker at {url} cannot be reached")
    assert done.returncode == 1
