"""``tessera-aggregator check``: what is wrong before ``serve`` starts, and nothing is changed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator.cli import main
from aggregator.errors import StoreError
from aggregator.home import AggregatorHome
from aggregator.operate.checking import Looking
from aggregator.operate.fleet import Fleet
from aggregator.operate.preflight import Preflight
from aggregator.operate.soundness import CheckedPart, Soundness
from device_sdk.device import Device
from device_sdk.link.events import Message, Subscribed
from tests.brokers.authority import Authority
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK, MakeLink
from tests.brokers.mosquitto import RECOMMENDED, Mosquitto, free_port, password_file
from tests.fakes.array_device import local_data
from tests.fakes.brisk import BRISK
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import WIDTH, ServeProcess, invite, make_home
from tests.fakes.killed_rounds import DEVICES
from tests.fakes.killed_rounds import make_home as fleet_home
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until
from tests.servers.fixtures import MakeDatabase

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = ROOT / "aggregator" / "acl.template"
_STEP_SECONDS = PATIENCE_SECONDS
OPEN = ("allow_anonymous true", *RECOMMENDED)


def checked(
    home: AggregatorHome, file: Path | None = None, unix_seconds: float | None = None
) -> list[CheckedPart]:
    """As the command does it, by a calendar that may be another one."""
    home = AggregatorHome.found(home.folder)
    return list(
        Preflight(
            home,
            file,
            Looking(_STEP_SECONDS),
            time.monotonic,
            time.time if unix_seconds is None else lambda: unix_seconds,
            np.random.default_rng(1),
            os.urandom,
        ).look()
    )


def wrong(found: list[CheckedPart]) -> dict[str, str]:
    """What is, by part; one a part."""
    return {each.part: each.line for each in found if each.soundness is Soundness.WRONG}


def warnings(found: list[CheckedPart]) -> dict[str, str]:
    return {each.part: each.line for each in found if each.soundness is Soundness.WARNING}


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [each for each in folder.rglob("*") if each.is_file()]
    return {str(each): (each.stat().st_mtime_ns, each.read_bytes()) for each in files}


@pytest.fixture
def broker(make_mosquitto: MakeMosquitto) -> Mosquitto:
    return make_mosquitto(*OPEN)


def with_broker(home: AggregatorHome, lines: str) -> None:
    text = home.task_file.read_text()
    home.task_file.write_text(text.replace("[broker]\n", f"[broker]\n{lines}\n"))


def test_a_home_that_is_right_is_left_as_it_is(
    tmp_path: Path, broker: Mosquitto, make_link: MakeLink, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, broker.url)
    before = content(home.folder)
    link = make_link(broker.url, subscriptions=("#",))
    step = ["--step-seconds", str(_STEP_SECONDS)]
    assert main(["check", "--home", str(home.folder), *step]) == 0
    lines = capsys.readouterr().out.splitlines()
    parts = ["file", "store", "keys", "clock", "disk", "broker", "broker", "task", "sizes"]
    assert [line.split()[:2] for line in lines] == [["ok", part] for part in parts]
    assert content(home.folder) == before
    # Nothing that came was retained, and nothing is for a device.
    heard = link.events(timeout_seconds=0.0)
    link.stop()
    after = make_link(broker.url, subscriptions=("#",))
    wait_until(lambda: any(isinstance(each, Subscribed) for each in after.events()))
    assert after.events(timeout_seconds=1.0) == []
    topics = {each.topic for each in heard if isinstance(each, Message)}
    assert topics.isdisjoint({"tessera/all/descriptor", "tessera/all/presence"})


def test_a_file_is_checked_before_there_is_a_home(
    tmp_path: Path, broker: Mosquitto, capsys: pytest.CaptureFixture[str]
) -> None:
    file, none = make_home(tmp_path, broker.url).task_file, tmp_path / "none"
    step = ["--step-seconds", str(_STEP_SECONDS)]
    assert main(["check", str(file), "--home", str(none), "--json", *step]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert not none.exists()
    assert [(each["part"], each["soundness"]) for each in found][:2] == [
        ("file", "ok"),
        ("home", "warning"),
    ]
    assert found[1]["to_do"] == f"tessera-aggregator init --home {none}"
    assert {each["soundness"] for each in found[2:]} == {"ok"}


def test_serve_goes_on_undisturbed(tmp_path: Path, broker: Mosquitto, make_link: MakeLink) -> None:
    home = make_home(tmp_path, broker.url, "wait_for_devices = 2")
    with_broker(home, 'client_id_prefix = "fleet-"')
    with home.task_file.open("a") as file:
        file.write(f"[metrics]\nport = {free_port()}\n")
    serving = ServeProcess(home)
    serving.start()
    try:
        serving.await_connections(1)
        before = serving.log.read_text()
        for _ in range(3):
            found = checked(home)
            assert wrong(found) == {}
            (serve,) = [each.what for each in found if each.part == "serve"]
            assert serve.startswith(f"runs, connected to {broker.url} for ")
            (metrics,) = [each.what for each in found if each.part == "metrics"]
            assert metrics.endswith("served now")
        assert serving.log.read_text() == before  # neither disconnected nor refused anything
    finally:
        assert serving.stop() == 0


def test_rounds_go_on_beside_it(tmp_path: Path, broker: Mosquitto) -> None:
    """With devices that train: none is refused or disconnected, and each counts in each round."""
    linear_artifact(tmp_path / "linear")
    settings = {"epochs": 1, "batch_size": 0, "learning_rate": 0.1}
    home = fleet_home(tmp_path, broker.url, 0, method="fedavg", settings=settings)
    serving = ServeProcess(home)
    serving.start()
    closed = f"closed: {DEVICES} updates made version"
    with ExitStack() as stack:
        stack.callback(serving.kill)
        for place, code in enumerate(invite(home, DEVICES)):
            device = Device.enrol(
                broker.url, code, tmp_path / f"device-{place}", data=local_data(place),
                pace=BRISK, link_settings=QUICK, timeout_seconds=PATIENCE_SECONDS,
            )  # fmt: skip
            stack.callback(device.stop)
            device.start()
        wait_until(lambda: closed in serving.log.read_text(), serving.log.read_text)
        assert wrong(checked(home)) == {}
        count = serving.log.read_text().count(closed)
        wait_until(lambda: serving.log.read_text().count(closed) > count + 1, serving.log.read_text)
        text = serving.log.read_text()
        assert "taken over" not in text.lower() and "refused" not in text, text
        assert text.count(" closed: ") == text.count(closed)


@pytest.mark.parametrize(
    "before, after",
    [("[task]\n", '[task]\nname = "other"\n'), (f"columns = {WIDTH}", f"columns = {WIDTH // 2}")],
)
def test_a_file_that_a_fleets_model_does_not_go_on_with(
    tmp_path: Path, broker: Mosquitto, before: str, after: str
) -> None:
    """What it says is what serve says."""
    home = make_home(tmp_path, broker.url)
    serve = ServeProcess(home)
    serve.start()
    serve.await_connections(1)
    assert serve.stop() == 0 and wrong(checked(home)) == {}
    text = home.task_file.read_text()
    home.task_file.write_text(text.replace(before, after))
    said = wrong(checked(home))["task"].partition(f"{home.task_file}: ")[2]
    serve.start()
    assert serve.wait() == 1 and said and said in serve.log.read_text()


def test_without_a_broker_the_rest_is_checked(tmp_path: Path) -> None:
    home = make_home(tmp_path, f"mqtt://127.0.0.1:{free_port()}")
    found = checked(home)
    assert wrong(found).keys() == {"broker"}
    assert "nobody listens there" in wrong(found)["broker"]
    assert "is it running" in wrong(found)["broker"]
    assert [each.soundness for each in found if each.part == "task"] == [Soundness.OK]


@pytest.mark.parametrize(
    ("password", "rules", "said"),
    [
        ("server", TEMPLATE.read_text(), ""),
        ("other", TEMPLATE.read_text(), "Not authorized"),
        (
            "server",
            TEMPLATE.read_text().replace("topic write tessera/down/#\n", ""),
            "nothing can be published to tessera/down/# (Not authorized): give tessera-aggregator "
            "the rights of aggregator/acl.template",
        ),
        (
            "server",
            TEMPLATE.read_text().replace("topic write tessera/all/#\n", ""),
            "nothing can be published to tessera/all/",
        ),
    ],
    ids=["right", "another password", "no answers", "no publications"],
)
def test_what_the_broker_forbids_is_said(
    tmp_path: Path, make_mosquitto: MakeMosquitto, password: str, rules: str, said: str
) -> None:
    users = password_file(tmp_path / "users", {"tessera-aggregator": "server"})
    (tmp_path / "acl").write_text(rules)
    broker = make_mosquitto(
        "allow_anonymous false",
        f"password_file {users}",
        f"acl_file {tmp_path / 'acl'}",
        *RECOMMENDED,
    )
    home = make_home(tmp_path, broker.url)
    (home.folder / "password").write_text(f"{password}\n")
    with_broker(home, 'user = "tessera-aggregator"\npassword_file = "password"')
    found = checked(home)
    if said:
        assert any(said in each.line for each in found if each.soundness is Soundness.WRONG)
        assert wrong(found).keys() == {"broker"}
    else:
        assert wrong(found) == {}
        assert any(each.what == "serve may subscribe and publish there" for each in found)


def test_a_broker_of_small_packets(tmp_path: Path, make_mosquitto: MakeMosquitto) -> None:
    broker = make_mosquitto(*OPEN, "max_packet_size 4096")
    found = wrong(checked(make_home(tmp_path, broker.url)))
    assert found.keys() == {"task"}
    assert "takes packets of at most 4,096 bytes" in found["task"]
    assert "max_packet_size" in found["task"]


class Encrypted:
    """A broker behind TLS, and a home that trusts an authority."""

    def __init__(
        self, folder: Path, make_mosquitto: MakeMosquitto, days: float, trusted: str = ""
    ) -> None:
        authority = Authority(folder, days=365)
        certificate, key = authority.issue("broker", days=days)
        self.broker = make_mosquitto(*OPEN, f"certfile {certificate}", f"keyfile {key}")
        trusts = Authority(folder, "another one", days=365) if trusted == "other" else authority
        home = make_home(folder, f"mqtts://127.0.0.1:{self.broker.port}")
        with_broker(home, f'ca_file = "{trusts.ca_file}"')
        self.home = home


def test_certificates_that_hold(tmp_path: Path, make_mosquitto: MakeMosquitto) -> None:
    found = checked(Encrypted(tmp_path, make_mosquitto, 90).home)
    assert wrong(found) == {} and "tls" not in warnings(found)
    (tls,) = [each.what for each in found if each.part == "tls"]
    assert tls.startswith("the certificate of mqtts://127.0.0.1:") and "holds until" in tls


def test_a_certificate_that_ends_soon(tmp_path: Path, make_mosquitto: MakeMosquitto) -> None:
    found = checked(Encrypted(tmp_path, make_mosquitto, 3).home)
    assert wrong(found) == {} and warnings(found)["tls"].endswith(": renew it")


def test_an_authority_that_has_ended_beside_one_that_holds(
    tmp_path: Path, make_mosquitto: MakeMosquitto
) -> None:
    """As in a bundle, or where the next authority is trusted already."""
    made = Encrypted(tmp_path, make_mosquitto, 90)
    ended = Authority(tmp_path, "one of before", days=-1e-3).ca_file.read_bytes()
    trusts = tmp_path / "test-authority.pem"
    trusts.write_bytes(ended + trusts.read_bytes())
    found = checked(made.home)
    assert wrong(found) == {} and "tls" not in warnings(found)


def test_a_certificate_in_a_form_that_openssl_alone_reads(
    tmp_path: Path, make_mosquitto: MakeMosquitto
) -> None:
    made = Encrypted(tmp_path, make_mosquitto, 90)
    trusts = tmp_path / "test-authority.pem"
    trusts.write_text(trusts.read_text().replace(" CERTIFICATE", " TRUSTED CERTIFICATE"))
    found = checked(made.home)
    assert wrong(found) == {}
    assert "openssl x509 -in" in warnings(found)["tls"] and str(trusts) in warnings(found)["tls"]


@pytest.mark.parametrize(
    ("days", "trusted", "said"),
    [(-1e-3, "", "certificate has expired"), (90, "other", "unable to get local issuer")],
    ids=["expired", "another authority"],
)
def test_certificates_that_nobody_trusts(
    tmp_path: Path, make_mosquitto: MakeMosquitto, days: float, trusted: str, said: str
) -> None:
    found = wrong(checked(Encrypted(tmp_path, make_mosquitto, days, trusted).home))
    assert found.keys() == {"tls", "broker"}
    assert said in found["tls"] and "broker.ca_file" in found["tls"]


def test_a_certificate_file_that_is_none(tmp_path: Path, make_mosquitto: MakeMosquitto) -> None:
    made = Encrypted(tmp_path, make_mosquitto, 90)
    (made.home.folder / "nonsense.pem").write_text("nonsense\n")
    text = made.home.task_file.read_text()
    line = next(each for each in text.splitlines() if each.startswith("ca_file"))
    made.home.task_file.write_text(text.replace(line, 'ca_file = "nonsense.pem"'))
    found = wrong(checked(made.home))
    assert found.keys() == {"tls", "broker"} and "nonsense.pem" in found["tls"]


# What lies in the home.


def test_a_clock_before_what_the_store_has_seen(tmp_path: Path, broker: Mosquitto) -> None:
    home = make_home(tmp_path, broker.url)
    store = home.open_store()
    with store.database.transaction():
        store.facts.started_unix_seconds = int(time.time())
    store.database.close()
    found = checked(home, unix_seconds=time.time() - 86_400)
    assert "set it right" in warnings(found)["clock"]
    assert wrong(found).keys() == set()
    later = checked(home, unix_seconds=time.time() + 400 * 86_400)
    assert "rotate keys" in wrong(later)["keys"]


def test_a_home_from_a_backup_that_serve_would_not_go_on_with(
    tmp_path: Path, broker: Mosquitto, make_link: MakeLink
) -> None:
    home = make_home(tmp_path, broker.url)
    copy = AggregatorHome(tmp_path / "copy" / home.folder.name)
    device = make_link(broker.url, subscriptions=("tessera/all/presence",))
    wait_until(lambda: any(isinstance(each, Subscribed) for each in device.events()))
    heard: set[bytes] = set()
    serving = ServeProcess(home)
    for life in (1, 2):  # the copy knows nothing of the second
        serving.start()

        def is_announced(lives: int = life) -> bool:
            heard.update(each.payload for each in device.events() if isinstance(each, Message))
            return len(heard) == lives

        wait_until(is_announced, serving.log.read_text)
        assert serving.stop() == 0
        if life == 1:
            shutil.copytree(home.folder, copy.folder)
    assert wrong(checked(home)) == {}
    ended = ServeProcess(copy)
    ended.start()
    wait_until(lambda: "this home is a copy" in ended.log.read_text(), ended.log.read_text)
    ended.kill()
    found = wrong(checked(copy))
    assert found.keys() == {"home"} and "this home is a copy, or was restored" in found["home"]
    with Fleet.open(copy.folder) as fleet:
        fleet.restored(after=int(time.time()))
    assert wrong(checked(copy)) == {}


def test_a_console_that_lets_nobody_in(tmp_path: Path, broker: Mosquitto) -> None:
    pytest.importorskip("argon2")
    home = make_home(tmp_path, broker.url)
    with home.task_file.open("a") as file:
        file.write(f'[console]\naddress = "127.0.0.1:{free_port()}"\n')
    found = warnings(checked(home))["console"]
    assert "nobody" in found and "tessera-aggregator console user add" in found
    password = tmp_path / "password"
    password.write_text("correct horse battery\n")
    adding = ("user", "add", "anna", "--password-file", str(password))
    assert main(["console", *adding, "--home", str(home.folder)]) == 0
    assert "console" not in warnings(checked(home))


@pytest.mark.parametrize("part", ["metrics", "console"])
def test_a_port_that_is_taken(tmp_path: Path, broker: Mosquitto, part: str) -> None:
    home = make_home(tmp_path, broker.url)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with home.task_file.open("a") as file:
            asked = f"port = {port}" if part == "metrics" else f'address = "127.0.0.1:{port}"'
            file.write(f"[{part}]\n{asked}\n")
        found = wrong(checked(home))
    assert found.keys() == {part} and f"port {port}: " in found[part]


def test_keys_that_are_gone(tmp_path: Path, broker: Mosquitto) -> None:
    home = make_home(tmp_path, broker.url)
    (key,) = home.keys.glob("signing-*.key")
    key.unlink()
    found = wrong(checked(home))
    assert found.keys() == {"keys"} and str(home.keys) in found["keys"]


@pytest.mark.parametrize("kind", ["nonsense", "newer", "older"])
def test_stores_that_are_none(tmp_path: Path, broker: Mosquitto, kind: str) -> None:
    home = make_home(tmp_path, broker.url)
    if kind == "nonsense":
        home.database.write_bytes(b"nonsense" * 1000)
    else:
        with sqlite3.connect(home.database) as file:
            if kind == "newer":
                file.execute("PRAGMA user_version = 99")
            else:
                file.execute("ALTER TABLE devices DROP COLUMN name")
        file.close()
    before = content(home.folder)
    found = checked(home)
    assert content(home.folder) == before
    said = (warnings if kind == "older" else wrong)(found)["store"]
    meant = {"nonsense": "cannot be used", "newer": "store format 99", "older": "up to date"}
    assert meant[kind] in said
    assert [each.soundness for each in found if each.part == "task"] == [Soundness.OK]


_AS_ANOTHER = """
import os, sys, time
from pathlib import Path
import numpy as np
from aggregator.home import AggregatorHome
from aggregator.operate.checking import Looking
from aggregator.operate.fleet import Fleet
from aggregator.operate.preflight import Preflight

home = AggregatorHome(Path(sys.argv[1]))
clocks, rng = (time.monotonic, time.time), np.random.default_rng()
look = Preflight(home, None, Looking(), *clocks, rng, os.urandom)

def lines():
    parts = look.look()
    return [next(parts).line for _ in range(2)]

lines()  # Python's own files may be root's alone: all that is needed is loaded now
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
print(*lines(), sep="\\n")
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Which another user reaches, too."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_store_that_cannot_be_written_to(open_folder: Path, broker: Mosquitto) -> None:
    """Root writes to any folder, so it is another user who looks."""
    home = make_home(open_folder, broker.url)
    for each in (home.folder, *home.folder.rglob("*")):
        each.chmod(0o555 if each.is_dir() else 0o444)
        if os.getuid() == 0:
            os.chown(each, 65534, 65534)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _AS_ANOTHER, str(home.folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    for each in (home.folder, *home.folder.rglob("*")):
        each.chmod(0o755)
    assert done.returncode == 0, done.stderr
    _, store = done.stdout.splitlines()
    assert store.startswith("wrong    store ") and str(home.database) in store


@pytest.mark.parametrize("text", [None, "nonsense [", "[task]\nnonsense = 1\n"])
def test_task_files_that_are_none(
    tmp_path: Path, broker: Mosquitto, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    home, file = make_home(tmp_path, broker.url), tmp_path / "task.toml"
    if text is not None:
        file.write_text(text)
    assert main(["check", str(file), "--home", str(home.folder)]) == 1
    captured = capsys.readouterr()
    assert f"{file}" in captured.out and "Traceback" not in captured.out + captured.err
    assert any(line.startswith("wrong    task ") for line in captured.out.splitlines())


def test_a_store_in_postgresql_is_only_read(
    tmp_path: Path, broker: Mosquitto, make_database: MakeDatabase
) -> None:
    import psycopg

    url = make_database()
    home = make_home(tmp_path, broker.url, store_url=url)
    with home.task_file.open("a") as file:
        file.write(f'[cluster]\nstore = "{url}"\n')

    def writers() -> list[Any]:
        with psycopg.connect(url) as database:
            return database.execute("SELECT * FROM tessera_commits ORDER BY writer").fetchall()

    before = writers()
    found = checked(home)
    assert wrong(found) == {} and writers() == before
    assert any(each.part == "store" and each.soundness is Soundness.OK for each in found)
    store = AggregatorHome.found(home.folder).open_store(read_only=True)
    with pytest.raises(StoreError, match="read-only"), store.database.transaction():
        store.facts.started_unix_seconds = 1
    store.database.close()
