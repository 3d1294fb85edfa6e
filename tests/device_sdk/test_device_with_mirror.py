"""A device fetches chunks from a web server, and from the broker when that fails or lies."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from aggregator.home import AggregatorHome
from device_sdk.device import Device
from tests.brokers.mosquitto import Mosquitto
from tests.device_sdk.test_device_with_aggregator import _TASK, Operator, await_status, enrolled
from tests.fakes.homes import command, invite, make_home, serving
from tests.fakes.small_folder import SmallFolder
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until


class Pages(SimpleHTTPRequestHandler):
    """Python's own web server, with the answers counted."""

    protocol_version = "HTTP/1.1"
    answers: ClassVar[Counter[int]] = Counter()

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        self.answers[int(code)] += 1

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextmanager
def pages(folder: Path) -> Iterator[str]:
    Pages.answers.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=str(folder)))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def problem(home: AggregatorHome, capsys: pytest.CaptureFixture[str]) -> str:
    """With the chunk store, as ``status`` says."""
    capsys.readouterr()
    assert command(home, "status", "--json") == 0
    found = json.loads(capsys.readouterr().out)["problems"]
    return " ".join(each["what"] for each in found if each["code"] == "chunk-store")


def started(home: AggregatorHome, url: str, folder: Path) -> Device:
    device = enrolled(url, invite(home)[0], folder, 0)
    device.record_all([(f"item-{row}", "anna") for row in range(8)])
    device.start()
    return device


def test_rounds_go_on_while_the_mirror_is_full_and_it_is_filled_again_by_itself(
    mosquitto: Mosquitto,
    tmp_path: Path,
    small_folder: SmallFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("aggregator.publish.mirror._LONGEST_REST_SECONDS", 0.5)
    monkeypatch.setattr("aggregator.publish.mirror._REST_SECONDS", 0.05)
    monkeypatch.setattr("aggregator.serve.housekeeping._SWEEP_SECONDS", 0.1)
    monkeypatch.setattr("device_sdk.link.mirror._LONGEST_REST_SECONDS", 0.5)
    monkeypatch.setattr("device_sdk.link.mirror._REST_SECONDS", 0.1)
    small_folder.fill()
    with pages(small_folder.path) as url:
        table = f'[cluster]\nchunks = "{url}"\nchunk_store = "{small_folder.path}"\n'
        lines = "quorum = 1\nwait_for_devices = 1\npause_seconds = 0.2"
        home = make_home(tmp_path, mosquitto.url, lines, table)

        with serving(home) as served:
            device = started(home, mosquitto.url, tmp_path / "device")
            wait_until(lambda: (device.status().version or 0) >= 2)
            wait_until(lambda: "No space left" in problem(home, capsys))
            assert command(home, "status") == 0
            assert "cluster.chunk_store cannot be written to" in capsys.readouterr().out
            assert Pages.answers[200] == 0
            small_folder.make_room()
            wait_until(lambda: not problem(home, capsys) and Pages.answers[200] > 0)
            small_folder.set_read_only(True)
            wait_until(lambda: "Read-only" in problem(home, capsys))
            before = device.status().version or 0
            wait_until(lambda: (device.status().version or 0) >= before + 2)
            device.close()
            counted = served.parts.first.ingest.counted
        assert counted >= before + 2


def test_rounds_go_on_while_the_chunk_store_hangs(
    mosquitto: Mosquitto,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("aggregator.publish.mirror._PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr("aggregator.publish.mirror._MOST_BYTES", 10_000)
    monkeypatch.setattr("aggregator.serve.housekeeping._SWEEP_SECONDS", 0.1)
    goes_on = threading.Event()

    class Hangs(LocalFileSystem):  # type: ignore[misc]
        protocol = "hangs"

        def pipe_file(self, path: str, value: bytes, **settings: object) -> None:
            goes_on.wait(PATIENCE_SECONDS)
            super().pipe_file(path, value, **settings)

    fsspec.register_implementation("hangs", Hangs, clobber=True)
    folder = tmp_path / "www"
    table = f'[cluster]\nchunks = "http://127.0.0.1:9"\nchunk_store = "hangs://{folder}"\n'
    lines = "quorum = 1\nwait_for_devices = 1\npause_seconds = 0.2"
    home = make_home(tmp_path, mosquitto.url, lines, table)

    with serving(home):
        device = started(home, mosquitto.url, tmp_path / "device")
        wait_until(lambda: (device.status().version or 0) >= 3)
        wait_until(lambda: "hangs" in problem(home, capsys))
        assert not any(folder.iterdir())
        goes_on.set()
        wait_until(lambda: not problem(home, capsys) and any(folder.iterdir()))
        device.close()


def test_rounds_come_from_the_mirror_and_go_on_without_it(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    folder = tmp_path / "fleet" / "www"
    folder.mkdir(parents=True)
    with pages(folder) as url:
        table = f'[cluster]\nchunks = "{url}"\nchunk_store = "www"\n'
        task = _TASK.replace("pause_seconds = 0.1", "pause_seconds = 0.5") + table
        operator = Operator(tmp_path, mosquitto.url, rounds=9, wait=1, task=task)
        with operator.serving():
            device = enrolled(mosquitto.url, operator.codes(1)[0], tmp_path / "home", 0)
            device.start()
            # The session tells of it; what is fetched from then on comes from there.
            await_status(device, 3)
            wait_until(lambda: Pages.answers[200] > 0)
            assert len(list(folder.iterdir())) >= 1
            before = device.status().version
            for file in folder.iterdir():
                file.unlink()  # what is written from now on is something else
            folder.rmdir()
            folder.write_text("no folder")
            wait_until(lambda: (device.status().version or 0) >= (before or 0) + 2)
            device.close()
