"""`tessera-device broker`: shows each place where a device looks, and sets the way or nothing."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from device_sdk.cli import main
from device_sdk.home.home import Home
from device_sdk.link.broker_url import BrokerWay
from device_sdk.wire.seal.announcement import Successor
from device_sdk.wire.seal.placement import Placement
from tests.attacks.small_disk import FileLimit
from tests.brokers.authority import Authority
from tests.fakes.in_memory import Bench

UNTIL = 2**63 - 1


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Of a device that joined at mqtt://unused."""
    bench = Bench(tmp_path / "home")
    bench.run(1)
    return bench.home


def said(home: Home, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = main(["broker", *arguments, "--home", str(home.folder)])
    out, err = capsys.readouterr()
    assert (status == 0) == (not err) and "Traceback" not in err
    return out + err


def test_every_place_is_shown_in_the_order_in_which_it_is_tried(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "mqtt://unused:1883: this device's own: it joined there, or was set to it since"
    assert "tried first" not in said(home, capsys), "where there is one place alone"
    store = home.membership
    store.announced(Successor(1, "mqtts://b", UNTIL), 1)
    first = "mqtts://b:8883: the fleet is there, or goes there; this device found it not there yet"
    assert f"tried first  {own}\nthen         {first}\n" in said(home, capsys)
    store.reached("mqtts://b")
    store.announced(Successor(2, "mqtt://c", UNTIL), 1)
    before = "mqtts://b:8883: announced before, and this device found the fleet there"
    then = "mqtt://c:1883: the fleet is there, or goes there; this device found it not there yet"
    shown = said(home, capsys)
    assert f"tried first  {before}\nthen         {own}\nthen         {then}\n" in shown
    membership = store.load()
    assert membership is not None
    store.place(replace(Placement(0), cell="cell.example:9"))
    cell = (
        "mqtt://cell.example:9: the cell of the fleet that the aggregator assigned to this device"
    )
    assert f"tried first  {cell}\nthen         {then}\n" in said(home, capsys)


def test_what_cannot_be_used_is_named_and_changes_nothing(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    word, folder, pipe = tmp_path / "word", tmp_path / "folder", tmp_path / "pipe"
    word.write_text("not a certificate\n")
    (tmp_path / "empty").touch()
    folder.mkdir()
    os.mkfifo(pipe)
    certificate, key = Authority(tmp_path, "own").issue("device")
    locked = tmp_path / "locked.key"
    subprocess.run(
        shlex.split(f"openssl pkey -in {key} -aes128 -passout pass:x -out {locked}"), check=True
    )
    before = home.membership.load()
    user = "mqtts://edge@b --password-file"
    for given, why in (
        (f"mqtts://b --ca {word}", "cannot use the TLS files"),
        (f"mqtts://b --ca {folder}", f"{folder} is a folder"),
        (f"mqtts://b --ca {tmp_path}/none", "cannot use the TLS files"),
        (f"mqtts://b --ca {pipe}", f"{pipe} is no file"),
        (f"mqtts://b --certificate-file {certificate} --key-file {locked}", str(locked)),
        (f"{user} {folder}", f"the password file {folder}"),
        (f"{user} {pipe}", f"the password file {pipe}"),
        (f"{user} {tmp_path}/none", "No such file"),
        (f"{user} {tmp_path}/empty", "it is empty"),
        (f"mqtt://b --ca {word}", "starts with mqtt://; use mqtts://"),
        (f"mqtt://b --password-file {word}", "a password file is given without a user"),
        ("http://b", "a broker URL starts with"),
    ):
        assert why in said(home, capsys, "set", *shlex.split(given)), given
        assert home.membership.load() == before


def test_a_full_disk_changes_nothing_and_is_named(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    before = home.membership.load()
    disk = FileLimit(home.folder)
    disk.fill(0)
    try:
        assert "the home's database cannot be" in said(home, capsys, "set", "mqtt://other")
    finally:
        disk.free()
    assert home.membership.load() == before
    assert "broker       mqtt://other:1883" in said(home, capsys, "set", "mqtt://other")


def test_what_is_not_given_stays_and_an_empty_text_takes_it_away(tmp_path: Path) -> None:
    way = BrokerWay.parse("mqtts://u@a:1", password_file=tmp_path / "p", client_id_prefix="x-")
    assert way.changed("mqtts://b") == way.at(replace(way.url, host="b", port=8883))
    assert way.changed("mqtts://v:w@b").password() == "w", "a file is of the user that it was for"
    assert way.changed(user="", client_id_prefix="") == BrokerWay.parse("mqtts://a:1")
    assert way.changed(ca_file=str(tmp_path)).changed("mqtt://b").tls is None
    for each in (way, way.changed(ca_file=str(tmp_path / "ca"), certificate_file="c")):
        kept = BrokerWay.from_text(each.text)
        assert kept.text == each.text and kept.url == each.url and bool(kept.tls) == bool(each.tls)
