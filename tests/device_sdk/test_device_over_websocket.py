"""Rounds over WebSockets, with TLS and through a proxy, as processes, while the broker dies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from device_sdk.cli import main
from device_sdk.device import Device
from device_sdk.link.broker_url import TlsFiles
from device_sdk.world import TrainingOptions
from tests.brokers.authority import Authority
from tests.brokers.connect_proxy import ConnectProxy
from tests.brokers.fixtures import MakeMosquitto
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import Mosquitto, free_port, websocket_lines
from tests.device_sdk.test_device_with_aggregator import _TASK, Operator, await_status
from tests.fakes.brisk import BRISK
from tests.fakes.quick import run_python
from tests.fakes.small_aggregator import SmallAggregator
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until


def test_each_command_that_reaches_the_broker_takes_the_way_through_a_proxy(
    mosquitto: Mosquitto,
    aggregator: SmallAggregator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = str(tmp_path / "home")
    with ConnectProxy("edge:secret") as proxy:
        way = ["--proxy", proxy.url.replace("//", "//edge:secret@"), "--timeout", "100"]
        assert main(["join", mosquitto.url, aggregator.code(), "--home", home, *way]) == 0
        told = capsys.readouterr().out
        again = f"run --home {home} --proxy {proxy.url} (and its user and password)\n"
        assert told.endswith(again) and "secret" not in told
        assert main(["leave", "--home", home, *way]) == 0
        assert len(proxy.targets) == 2 and aggregator.seen.farewells


@pytest.mark.slow
def test_a_broker_that_dies_in_the_middle_of_a_round_is_found_again_through_the_proxy(
    make_mosquitto: MakeMosquitto, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    port = free_port()
    broker = make_mosquitto(*websocket_lines(port), f"certfile {certificate}", f"keyfile {key}")
    url = f"wss://127.0.0.1:{port}/mqtt"
    with ConnectProxy("edge:secret") as proxy:
        login = proxy.url.replace("//", "//edge:secret@")
        task = _TASK.replace(
            'url = "{url}"', f'url = "{{url}}"\nca_file = "{authority.ca_file}"\nproxy = "{login}"'
        )
        operator = Operator(tmp_path, url, rounds=3, wait=1, task=task)
        (code,) = operator.codes(1)
        with (
            operator.serving(),
            Device.enrol(
                url,
                code,
                tmp_path / "home",
                tls=TlsFiles(authority.ca_file),
                options=TrainingOptions(k=8),
                pace=BRISK,
                link_settings=replace(QUICK, stall_seconds=5.0, proxy=login),
                timeout_seconds=PATIENCE_SECONDS,
            ) as device,
        ):
            device.record_all([(f"film-{n}", "anna") for n in range(8)])
            device.start()
            wait_until(lambda: device.status().working_on is not None)
            broker.kill()
            wait_until(lambda: not device.status().connected)
            broker.start()
            await_status(device, 3)
            assert device.status().verdict == "counted"
            assert len(proxy.targets) >= 4  # both ends, each more than once
        told = run_python(
            "-m",
            "device_sdk.cli",
            "run",
            "--home",
            str(tmp_path / "home"),
            "--proxy",
            login,
            "--for",
            "5",
            check=True,
        )
        assert f"at wss://127.0.0.1:{port}/mqtt" in told.stdout, told.stderr
        assert "secret" not in told.stdout + told.stderr
