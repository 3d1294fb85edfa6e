"""A page in headless Chromium, spoken to through two pipes by the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_SWITCHES = """
--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --disable-dev-shm-usage
--remote-debugging-pipe
"""


class ChromiumError(Exception):
    """It does not start, ends, or does not answer in time."""


class PageError(Exception):
    """The page is not there, or its code throws."""


class Page:
    """Chromium with one page, in a folder of its own; ended with its children by ``close``.

    ``seconds``: what each call may take.
    """

    def __init__(self, program: str, *, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._home = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._number, self._unread = 0, b""
        its_input, self._write = os.pipe()
        self._read, its_output = os.pipe()
        command = [program, *_SWITCHES.split(), f"--user-data-dir={self._home.name}"]
        # It reads commands from descriptor 3, and writes answers to 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{its_input} 4>&{its_output}', "bash", *command],
            pass_fds=(its_input, its_output),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._home.name},
        )
        os.close(its_input)
        os.close(its_output)
        self._session = ""
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for descriptor in (self._write, self._read):
            os.close(descriptor)
        self._home.cleanup()

    def open(self, url: str) -> None:
        """Go to a page."""
        failed = self._call("Page.navigate", url=url).get("errorText")
        if failed:
            raise PageError(f"{url}: {failed}")

    def evaluate(self, expression: str) -> Any:
        """An expression's value, awaited; what JSON has."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def picture(self, path: Path, width: int, height: int) -> None:
        """Write what the page looks like, as PNG."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        end = time.monotonic() + self._seconds
        try:
            os.write(self._write, json.dumps(message).encode() + b"\0")
            while True:
                answer = json.loads(self._message(end))
                if answer.get("id") == self._number:
                    break
        except BrokenPipeError:
            raise ChromiumError("it ended by itself") from None
        if "error" in answer:
            raise ChromiumError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _message(self, end: float) -> bytes:
        while b"\0" not in self._unread:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise ChromiumError(f"no answer within {self._seconds:g} s")
            part = os.read(self._read, 1 << 16)
            if not part:
                raise ChromiumError("it ended by itself")
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return message
