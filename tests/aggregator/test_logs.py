"""What is logged: one event a line, declared in one place, as text or as JSON."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aggregator.events import LogEvent, about
from aggregator.logs import JsonFormatter, add_task
from device_sdk.system.version import __version__
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.homes import make_home
from tests.fakes.tasks import add_task as add_task_to
from tests.fakes.tasks import task_text
from tests.fakes.waiting import PATIENCE_SECONDS
from tests.vectors.generate_event_table import PAGE, page

ROOT = Path(__file__).resolve().parents[2]
_FILES = sorted((ROOT / "aggregator").rglob("*.py"))
# The mechanism, and a library's level set.
_MAY_NAME_A_LOGGER = {"aggregator/events.py", "aggregator/cluster/joined_ray.py"}
_LOG_CALLS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def _calls() -> Iterator[tuple[str, ast.Call, str, str]]:
    """File, call, of what, and which of its methods: ``what.method(...)``."""
    for path in _FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                place = str(path.relative_to(ROOT))
                yield place, node, ast.unparse(node.func.value), node.func.attr


def test_the_page_lists_the_events_of_now() -> None:
    """Else: PYTHONPATH=. python tests/vectors/generate_event_table.py."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text


def test_nothing_is_logged_but_declared_events() -> None:
    loggers = ("logging", "_log", "log", "logger")
    past = [
        f"{place}:{call.lineno} {of}.{method}"
        for place, call, of, method in _calls()
        if place not in _MAY_NAME_A_LOGGER
        and (method == "getLogger" or (method in _LOG_CALLS and of.lower() in loggers))
    ]
    assert past == []


def test_each_event_is_logged_somewhere_with_its_fields() -> None:
    seen, wrong = {"SESSIONS_UNKNOWN"}, []
    for place, call, of, method in _calls():
        if method == "log" and of.startswith("LogEvent."):
            event = LogEvent[of.removeprefix("LogEvent.")]
            seen.add(event.name)
            if {each.arg for each in call.keywords} != set(event.fields):
                wrong.append(f"{place}:{call.lineno} {event.name} takes {event.fields}")
    assert wrong == []
    assert {each.name for each in LogEvent} - seen == set()
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", each.code) for each in LogEvent)
    assert not {"ts", "level", "event", "task", "message", "traceback"} & {
        field for each in LogEvent for field in each.fields
    }


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What is logged meanwhile."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter({"worker": 3}))
    handler.addFilter(add_task)
    logger = logging.getLogger()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield text
    logger.removeHandler(handler)
    logger.setLevel(before)


def _objects(written: io.StringIO) -> list[dict[str, Any]]:
    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = written.getvalue().splitlines()
    return [json.loads(each, parse_constant=refused) for each in lines]


def test_a_line_of_json_has_what_the_text_says(written: io.StringIO) -> None:
    with about("air"):
        LogEvent.STORE_BACK.log(seconds=600.0)
    LogEvent.ENROLLED.log(device=b"\x01\xab")
    LogEvent.MESSAGE_REFUSED.log(topic="a", problem="no\n\x1b]0;owned\u202e")
    LogEvent.REFUSED.log(sender="nobody", problem="bad tag", reason="bad-tag")
    logging.getLogger("uvicorn.error").warning("port %d", 80)
    back, enrolled, refused, input_refused, other = _objects(written)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", back.pop("ts"))
    message = "the store is there again, after 10 min"
    assert back == {
        "level": "info",
        "event": "store-back",
        "task": "air",
        "worker": 3,
        "seconds": 600.0,
        "message": message,
    }
    assert enrolled["device"] == "01ab" and "task" not in enrolled
    assert refused["problem"] == "no\\n\\x1b]0;owned\\u202e"
    assert refused["message"].endswith("to a: no\\n\\x1b]0;owned\\u202e")
    assert input_refused["reason"] == "bad-tag"
    assert input_refused["message"] == "refused from nobody: bad tag (logged once)"
    assert (other["event"], other["logger"], other["message"]) == (
        "other",
        "uvicorn.error",
        "port 80",
    )


def test_errors_and_odd_numbers_are_json_too(written: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        LogEvent.ROUND_HELD.log(error, round=3, why=error)
    LogEvent.ROUND_CLOSED.log(
        round=1,
        participants=2,
        version=1,
        metrics={"loss": float("nan")},
        in_vain=[],
        more_in_vain=0,
    )
    LogEvent.EARLY_STOPPED.log(metric="loss", version=1, value=float("inf"), rounds=3, best=None)
    held, closed, stopped = _objects(written)
    assert held["why"] == "two\\nlines" and held["message"] == "round 3 is held: two\\nlines"
    assert held["traceback"].startswith("  | Traceback") and "ValueError: two" in held["traceback"]
    assert closed["metrics"] == {"loss": "nan"} and closed["message"].endswith(", loss nan")
    assert stopped["value"] == "inf" and stopped["message"].endswith("(evaluation.early_stopping)")


def test_warnings_of_python_are_lines_too_and_readable_in_any_encoding() -> None:
    code = (
        "import logging, sys, warnings\n"
        "from aggregator.events import LogEvent\n"
        "from aggregator.logs import LogForm, LogSettings\n"
        "LogSettings(LogForm.JSON).start(logging.StreamHandler(sys.stderr), '%(message)s')\n"
        "warnings.warn('two\\nlines')\n"
        "LogEvent.TASK_NOTED.log(note='caf\\xe9 \\u20ac')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"},
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    warned, found = map(json.loads, done.stderr.splitlines())
    assert (warned["event"], warned["logger"], warned["level"]) == (
        "other",
        "py.warnings",
        "warning",
    )
    assert "UserWarning: two\\nlines" in warned["message"]
    assert found["note"] == "caf\xe9 \u20ac"


def _serve(home: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "aggregator.cli", "serve", "--home", str(home), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_serve_writes_json_and_nothing_else(tmp_path: Path, mosquitto: Mosquitto) -> None:
    home = make_home(tmp_path, mosquitto.url, "wait_for_devices = 2\nquorum = 1")
    add_task_to(home, "air", task_text(home, "air", "wait_for_devices = 2\nquorum = 1"))
    serving = _serve(home.folder, "--log", "json")
    said: list[dict[str, Any]] = []
    try:
        assert serving.stderr is not None
        for line in serving.stderr:
            said.append(json.loads(line))
            if said[-1]["event"] == "connected":
                break
        second = _serve(home.folder, "--log", "json", "--log-level", "error")
        out, told = second.communicate(timeout=PATIENCE_SECONDS)
        serving.send_signal(signal.SIGTERM)
        _, rest = serving.communicate(timeout=PATIENCE_SECONDS)
    finally:
        serving.kill()
    said += [json.loads(line) for line in rest.splitlines()]
    lacking = [each for each in said if each["event"] == "devices-lacking"]
    assert {each["task"] for each in lacking} == {"default", "air"}
    assert {(each["wanted"], each["enrolled"]) for each in lacking} == {(2, 0)}
    assert [each["broker"] for each in said if each["event"] == "connected"] == [mosquitto.url]
    (started,) = [each for each in said if each["event"] == "started"]
    assert started["release"] == __version__ and started["tasks"] == ["default", "air"]
    assert (started["home"], started["broker"]) == (str(home.folder), mosquitto.url)
    assert said[-1]["event"] == "stopped"
    failed, text = told.splitlines()
    assert out == "" and json.loads(failed)["event"] == "failed"
    assert json.loads(failed)["message"] in text and text.startswith("tessera-aggregator: ")


def test_a_level_leaves_out_what_lies_below(tmp_path: Path, mosquitto: Mosquitto) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    serving = _serve(home.folder, "--log", "text", "--log-level", "warning")
    try:
        assert serving.stderr is not None
        first = serving.stderr.readline()
        serving.send_signal(signal.SIGTERM)
        _, rest = serving.communicate(timeout=PATIENCE_SECONDS)
    finally:
        serving.kill()
    assert " WARNING no connection to mqtt://127.0.0.1:1 (" in first
    assert " INFO " not in rest and "stopped" not in rest
