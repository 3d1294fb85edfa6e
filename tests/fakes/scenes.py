"""A fleet whose console somebody looks at in a browser: serve, console and broker are processes,
and devices take part as in the field."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from aggregator.home import AggregatorHome
from aggregator.operate.fleet import Fleet
from device_sdk.device import Device
from device_sdk.world import TrainingOptions
from tests.brokers.mosquitto import Mosquitto, running
from tests.fakes.browsers import PATIENCE_MS
from tests.fakes.consoles import PASSWORD, add_users, running_console
from tests.fakes.full_fleets import full_home
from tests.fakes.homes import ServeProcess
from tests.fakes.quick import joined
from tests.fakes.tasks import add_task, task_text

WIDE, PHONE = 1200, 390
CREW = {"crew": "live"}
"""The label of devices that are real, of whom the task ``live`` makes a version each second."""


@dataclass
class Scene:
    """A fleet that is served, its console, and a browser."""

    folder: Path
    broker: Mosquitto
    home: AggregatorHome
    serve: ServeProcess
    url: str
    browser: Browser

    @contextmanager
    def page(
        self, name: str = "anna", width: int = WIDE, scheme: Any = "light", **more: Any
    ) -> Iterator[Page]:
        """A window of somebody who has logged in."""
        with new_page(self.browser, self.url, width=width, color_scheme=scheme, **more) as page:
            log_in(page, name)
            yield page

    def live_device(self, name: str) -> Device:
        """One of the crew, that was invited by a command and takes part in rounds."""
        with Fleet.open(self.home.folder) as fleet:
            (code,) = fleet.invite(1, name=name, labels=CREW)
        device = self.joined(code)
        device.record_all([(f"live-{n}", "anna") for n in range(5)], task="live")
        device.start()
        return device

    def joined(self, code: str) -> Device:
        """A real one, with a code."""
        folder = self.folder / f"device-{time.monotonic_ns()}"
        return joined(self.broker.url, code, folder, options=TrainingOptions(k=8))


@contextmanager
def new_page(
    browser: Browser, url: str, width: int = WIDE, height: int = 900, **more: Any
) -> Iterator[Page]:
    """A window with cookies of its own. Errors of the page's script come out here."""
    context = browser.new_context(base_url=url, viewport={"width": width, "height": height}, **more)
    context.set_default_timeout(PATIENCE_MS)
    page, errors = context.new_page(), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        yield page
    finally:
        context.close()
    assert errors == []


def enter(page: Page, name: str, password: str = PASSWORD) -> None:
    """Fill in the form that lets in, and send it."""
    page.get_by_label("Name").fill(name)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()


def log_in(page: Page, name: str) -> None:
    page.goto("/login")
    enter(page, name)
    page.wait_for_url("**/now")


@contextmanager
def running_scene(folder: Path, browser: Browser) -> Iterator[Scene]:
    """A full home that is served, with a second task, ``live``, for a device that is real."""
    with ExitStack() as stack:
        broker = stack.enter_context(running(Mosquitto(folder)))
        home = full_home(folder, time.time(), url=broker.url, counted=0)
        more = 'only = {crew = "live"}\n[models]\nkeep_last = 500'
        add_task(home, "live", task_text(home, "live", "quorum = 1\npause_seconds = 1.0", more))
        add_users(home)
        serve = ServeProcess(home)
        stack.callback(serve.kill)
        serve.start()
        console = stack.enter_context(running_console(home))
        serve.await_connections(1)
        scene = Scene(folder, broker, home, serve, f"http://127.0.0.1:{console.port}", browser)
        stack.enter_context(scene.live_device("Live-1"))
        yield scene
