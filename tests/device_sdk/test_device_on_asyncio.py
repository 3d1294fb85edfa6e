"""The page's app on asyncio, as printed: it learns, and gives the home back however it ends."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from device_sdk import Device, NotEnrolled
from tests.brokers.mosquitto import Mosquitto
from tests.device_sdk.test_device_with_aggregator import Operator
from tests.fakes.quick import joined
from tests.fakes.small_aggregator import SmallAggregator
from tests.fakes.waiting import PATIENCE_SECONDS

PAGE = Path(__file__).parents[2] / "docs/asyncio.md"


@pytest.fixture
def app() -> Any:
    """The page's program as a module."""
    found = re.search(r"<!-- run: app -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    module = ModuleType("app")
    exec(compile(found[1], str(PAGE), "exec"), module.__dict__)
    return module


def quickly(home: str, url: str, code: str) -> Device:
    """As the page does, with short waits."""
    try:
        return Device.open(home)
    except NotEnrolled:
        return joined(url, code, home)


def test_the_app_learns_beside_its_loop_and_ends_when_it_is_cancelled(
    mosquitto: Mosquitto, tmp_path: Path, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, threads = str(tmp_path / "home"), dict[str, set[str]]()
    others = set(threading.enumerate())

    def noted(name: str) -> None:
        work: Callable[..., Any] = getattr(Device, name)

        def call(*given: Any, **more: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return work(*given, **more)

        monkeypatch.setattr(Device, name, call)

    for name in ("record_all", "recommend", "close"):
        noted(name)
    app.open_or_enrol = quickly

    async def run(url: str, code: str) -> list[str]:
        said, learnt = list[str](), asyncio.Event()

        def show(text: str) -> None:
            said.append(text)
            if re.fullmatch(r"(film-\d+(, )?)+", text):
                learnt.set()

        items = [f"film-{number}" for number in range(8)]
        task = asyncio.create_task(app.main(home, url, code, items, show))
        await asyncio.wait_for(learnt.wait(), PATIENCE_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return said

    operator = Operator(tmp_path, mosquitto.url, rounds=2, wait=1)
    (code,) = operator.codes(1)
    with operator.serving():
        said = asyncio.run(run(mosquitto.url, code))
    assert any("trained" in each for each in said)
    # Of the five best none is one that anna has.
    best = next(each for each in said if each.startswith("film-")).split(", ")
    assert len(best) == 5 and not set(best) & {f"film-{number}" for number in range(8)}
    assert threads.keys() == {"record_all", "recommend", "close"}
    assert not any(threading.main_thread().name in names for names in threads.values())
    later = set(threading.enumerate()) - others
    assert not [each for each in later if each.name.startswith("tessera")]
    with Device.open(home) as again:
        assert len(again.recommend(3, user="anna")) == 3


def test_an_enrolment_that_is_cancelled_gives_the_home_back(
    mosquitto: Mosquitto, tmp_path: Path, app: Any
) -> None:
    home = tmp_path / "home"
    with SmallAggregator(mosquitto.url) as aggregator:
        quickly(str(home), mosquitto.url, aggregator.code()).close()
    asked, answered = threading.Event(), threading.Event()

    def slowly(*given: str) -> Device:
        asked.set()
        assert answered.wait(PATIENCE_SECONDS)
        return Device.open(home)

    app.open_or_enrol = slowly

    async def run() -> None:
        task = asyncio.create_task(app.main(str(home), "", "", []))
        assert await asyncio.to_thread(asked.wait, PATIENCE_SECONDS)
        task.cancel()
        asyncio.get_running_loop().call_soon(answered.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        Device.open(home).close()

    asyncio.run(run())
