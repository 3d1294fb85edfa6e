"""A real browser for tests, where this machine has one that works."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from playwright.sync_api import Browser, sync_playwright

from tests.fakes.child_environment import child_environment
from tests.fakes.waiting import PATIENCE_SECONDS

PATIENCE_MS = PATIENCE_SECONDS * 1000
_PROBE = """
from tests.fakes.browsers import running_chromium
with running_chromium() as browser:
    page = browser.new_page()
    page.set_content("<title>it works</title>")
    print(page.title())
"""


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """The system's chromium, without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"], timeout=PATIENCE_MS
        )
        try:
            yield browser
        finally:
            browser.close()


@cache
def why_no_chromium() -> str:
    """Empty where there is one that starts and shows a page: tried once, and not for ever."""
    if shutil.which("chromium") is None:
        return "chromium is not installed (apt-get install chromium)"
    with subprocess.Popen(
        [sys.executable, "-c", _PROBE],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=child_environment(),
    ) as probe:
        try:
            said, _ = probe.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(probe.pid, signal.SIGKILL)
            return f"chromium showed no page in {PATIENCE_SECONDS:.0f} s"
    if said.strip() == "it works":
        return ""
    return f"chromium does not start: {said.strip()[-300:]}"
