"""A device fetches chunks from a web server, and from the broker when that fails or lies."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from tests.brokers.mosquitto import Mosquitto
from tests.device_sdk.test_device_with_aggregator import _TASK, Operator, await_status, enrolled
from tests.fakes.waiting import wait_until


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
