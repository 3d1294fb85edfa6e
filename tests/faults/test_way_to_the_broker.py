"""Certificates, passwords and URLs are renewed under a fleet that goes on, and nobody restarts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from aggregator.home import AggregatorHome
from device_sdk import BrokerWay, Device, EnrolmentFailed, TlsFiles
from device_sdk.cli import main as device_main
from tests.brokers.authority import Authority
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import password_file
from tests.fakes.homes import Serving, invite, make_home, serving
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

ROUND = "least_deadline_seconds = 0.1\npause_seconds = 0.1"


def guarded_home(folder: Path, url: str, broker_lines: str) -> AggregatorHome:
    home = make_home(folder, url, ROUND)
    text = home.task_file.read_text().replace("[round]", f"{broker_lines}\n[round]")
    home.task_file.write_text(text)
    return home


def await_rounds(served: Serving, more: int = 2) -> None:
    ingest = served.parts.first.ingest
    wanted = ingest.counted + more
    wait_until(lambda: ingest.counted >= wanted)


def joined(url: str, home: AggregatorHome, folder: Path, way: BrokerWay) -> Device:
    device = Device.enrol(
        url,
        invite(home)[0],
        folder,
        password_file=way.password_file,
        tls=way.tls,
        client_id_prefix=way.client_id_prefix,
        timeout_seconds=PATIENCE_SECONDS,
        link_settings=QUICK,
    )
    device.record_all((f"item-{row}", "anna") for row in range(5))
    return device


def test_certificates_and_passwords_are_read_at_each_dial(
    tmp_path: Path, make_mosquitto: MakeMosquitto
) -> None:
    """The broker comes back with another authority's certificate and other passwords, for clients
    whose ids have its prefix; device and serve are there again without a restart or a command."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    trusted, server = tmp_path / "trusted.pem", tmp_path / "server.pem"
    passwords, word = tmp_path / "passwords", tmp_path / "word"
    shutil.copy(old.ca_file, trusted)

    def renew(authority: Authority, password: str) -> None:
        certificate, key = authority.issue(password)
        server.write_bytes(certificate.read_bytes() + key.read_bytes())
        password_file(passwords, {"fleet": password})
        word.write_text(f"{password}\n")

    renew(old, "one")
    broker = make_mosquitto(
        *(f"certfile {server}", f"keyfile {server}", "clientid_prefixes edge-"),
        *("allow_anonymous false", f"password_file {passwords}"),
    )
    url = f"mqtts://fleet@127.0.0.1:{broker.port}"
    home = guarded_home(
        tmp_path,
        url,
        f'password_file = "{word}"\nca_file = "{trusted}"\nclient_id_prefix = "edge-"',
    )
    way = BrokerWay.parse(url, password_file=word, tls=TlsFiles(trusted), client_id_prefix="edge-")
    for prefix, asked in (("", "for a client_id_prefix"), ("x-", "for another client_id_prefix")):
        with pytest.raises(EnrolmentFailed) as refused:
            joined(url, home, tmp_path / "other", replace(way, client_id_prefix=prefix))
        assert f"{way} was given user 'fleet' and" in str(refused.value)
        assert asked in str(refused.value)
    with (
        serving(home, link_settings=QUICK) as served,
        joined(url, home, tmp_path / "device", way) as device,
    ):
        assert b"one" not in (tmp_path / "device" / "device.sqlite").read_bytes(), "no copy is kept"
        device.start()
        await_rounds(served)
        broker.stop()
        renew(new, "two")
        broker.start()
        wait_until(lambda: "(tls)" in device.status().problem)  # not trusted yet
        shutil.copy(new.ca_file, trusted)
        await_rounds(served)
        word.unlink()
        broker.stop()
        broker.start()
        wait_until(lambda: f"the password file {word}" in device.status().problem)
        word.write_text("two")
        await_rounds(served)


def test_a_running_device_goes_where_its_owner_says(
    tmp_path: Path, make_mosquitto: MakeMosquitto, capsys: pytest.CaptureFixture[str]
) -> None:
    """The broker gets another port and a password; identity, data and outbox stay."""
    broker = make_mosquitto()
    home = make_home(tmp_path, broker.url, ROUND)
    folder, word = tmp_path / "device", tmp_path / "word"
    word.write_text("secret\n")
    with (
        serving(home, link_settings=QUICK) as served,
        joined(broker.url, home, folder, BrokerWay.parse(broker.url)) as device,
    ):
        device.start()
        await_rounds(served)
    other = make_mosquitto(
        "allow_anonymous false",
        f"password_file {password_file(tmp_path / 'passwords', {'edge': 'secret'})}",
    )
    home.task_file.write_text(
        home.task_file.read_text().replace(
            broker.url, f'{other.url}"\nuser = "edge"\npassword_file = "{word}'
        )
    )
    with Device.open(folder, link_settings=QUICK) as device:
        device.start()
        wait_until(lambda: device.status().connected)
        broker.stop()
        with serving(home, link_settings=QUICK) as served:
            command = ["broker", "set", other.url, "--home", str(folder), "--user", "edge"]
            assert device_main([*command, "--password-file", str(word)]) == 0
            assert f"broker       {other.url}\nuser         edge" in capsys.readouterr().out
            await_rounds(served)
            assert device.status().broker == other.url
    # The same by the app.
    moved = BrokerWay.parse(broker.url, client_id_prefix="x-")
    Device.open(folder, broker=moved).close()
    assert device_main(["broker", "--home", str(folder)]) == 0
    assert "client ids   begin with x-" in capsys.readouterr().out
    assert device_main(["broker", "set", "--home", str(folder), "--ca", "none.pem"]) == 1
    assert "TLS files are given, but the URL starts with mqtt://" in capsys.readouterr().err
