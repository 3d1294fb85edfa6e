"""A process that was forked off after a device, a store or a trainer was opened: it is refused in
words, and whatever it does, or how it ends, is nothing to its parent."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.fakes.child_environment import child_environment
from tests.fakes.quick import run_python
from tests.faults.fleet_home import make_fleet

ROUND = "quorum = 1"
SECONDS = 60
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")

HEAD = """
import atexit, gc, json, multiprocessing, os, sys, time
from pathlib import Path
from device_sdk import Device
from device_sdk.errors import HomeError, HomeLocked

home = Path(sys.argv[1])

def said(call):
    try:
        return f"did {call()!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

def in_a_fork(work, end=os._exit):
    # What a forked child says; it ends by itself.
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.write(writing, json.dumps(work()).encode())
        os.close(writing)
        end(0)
        return None
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        found = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(found)
"""


def run(home: Path, script: str) -> object:
    """What a process of its own prints last, as JSON."""
    done = run_python("-c", HEAD + script, str(home), env=child_environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_fleet(tmp_path, "mqtt://127.0.0.1:1", 1, ROUND, 5).devices[0]


CALLS = """
device = Device.open(home)
device.record("film-1")
device.on("round", print)
device.start()
CALLS = {
    "start": lambda: device.start(),
    "status": lambda: device.status(),
    "tasks": lambda: device.tasks(),
    "record": lambda: device.record("film-2"),
    "recommend": lambda: device.recommend(),
    "predict": lambda: device.predict({}),
    "provide": lambda: device.provide(lambda: None),
    "forget": lambda: device.forget(item="film-1"),
    "leave": lambda: device.leave(1.0),
    "on": lambda: device.on("round", print),
    "wait_for_model": lambda: device.wait_for_model(),
}
children = [in_a_fork(lambda: {name: said(call) for name, call in CALLS.items()}) for _ in range(3)]
parent = [device.record("film-3"), device.status().running]
device.close()
print(json.dumps([children, parent]))
"""


def test_every_call_of_a_forked_device_is_refused_in_words(home: Path) -> None:
    children, parent = run(home, CALLS)  # type: ignore[misc]
    for each in children:
        for name, words in each.items():
            assert words.startswith("HomeError: the device of "), (name, words)
            assert "a fork of it. Open it here, after the fork" in words
    assert parent == [True, True], "the parent goes on"


ENDS = """
device = Device.open(home)
device.record("film-1")
device.start()
atexit.register(device.close)

def nothing():
    return [said(device.stop), said(device.close), said(lambda: (gc.collect(), None)[1])]

def collect(status):
    global device
    device.__exit__(None, None, None)
    atexit.unregister(device.close)
    device = None
    gc.collect()
    os._exit(status)

said_in_children = [in_a_fork(nothing)]
if in_a_fork(nothing, end=lambda status: None) is None:
    sys.exit(0)  # as any program ends: atexit, and all that is left is collected
if in_a_fork(nothing, end=collect) is None:
    sys.exit(1)
locked = said(lambda: Device.open(home))
whole = [device.record("film-2"), device.status().running]
device.close()
again = Device.open(home)
whole.append(again.record("film-2"))
print(json.dumps([said_in_children, locked, whole]))
"""


def test_however_a_fork_ends_the_parent_has_its_home(home: Path) -> None:
    children, locked, whole = run(home, ENDS)  # type: ignore[misc]
    assert children == [["did True", "did None", "did None"]]
    assert locked.startswith("HomeLocked"), "the lock is the parent's still"
    assert whole == [True, True, False], "nothing that it wrote is gone"


OPENED = """
def opened():
    with Device.open(home) as device:
        return device.record("of-the-child")

def other():
    return [said(opened), said(lambda: Device.open(home, read_only=True).status())]

before = in_a_fork(opened)
device = Device.open(home)
reading, writing = os.pipe()
beside = in_a_fork(other)
child = os.fork()
if child == 0:
    os.close(writing)
    os.read(reading, 1)  # as long as the parent wants, and lives
    os._exit(0)
device.close()
after = opened()  # though a fork of then lives on
os.write(writing, b"x")
os.waitpid(child, 0)
print(json.dumps([before, beside, after]))
"""


def test_a_home_is_opened_in_the_child_where_the_parent_has_not(home: Path) -> None:
    before, beside, after = run(home, OPENED)  # type: ignore[misc]
    assert before is True and after is False
    assert beside[0].startswith("HomeLocked: ")
    assert "HomeError" in beside[1] and "was open when this process was forked" in beside[1]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_multiprocessing(home: Path, tmp_path: Path, method: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        HEAD
        + """
device = None

def work(folder, found):
    calls = (lambda: device.status(), lambda: Device.open(folder))
    found.put([said(call) for call in calls])

if __name__ == "__main__":
    device = Device.open(home)
    context = multiprocessing.get_context(sys.argv[2])
    found = context.Queue()
    child = context.Process(target=work, args=(home, found))
    child.start()
    told = found.get(timeout=300)
    child.join(30)
    assert child.exitcode == 0
    spawned = multiprocessing.get_context("spawn").Process(target=id, args=(device,))
    handed = said(spawned.start)
    whole = device.record("film-1")
    device.close()
    print(json.dumps([told, handed, whole]))
"""
    )
    done = run_python(str(script), str(home), method, env=child_environment())
    assert done.returncode == 0, done.stderr
    (status, opened), handed, whole = json.loads(done.stdout.splitlines()[-1])
    assert status.startswith("HomeError" if method == "fork" else "AttributeError")
    assert opened.startswith("HomeLocked")
    assert "hand over its home folder" in handed and whole is True


STORE = """
from aggregator.home import AggregatorHome, is_served, serve_lock
at = AggregatorHome(home)
store = at.open_store()
with serve_lock(at):
    child = in_a_fork(lambda: [
        said(lambda: store.facts.seed),
        said(lambda: store.facts.__setattr__("openings", 9)),
        said(store.database.erase_deleted),
        said(store.database.close),
        said(at.open_store),
        is_served(at),
    ])
    ended = in_a_fork(lambda: 1, end=lambda status: None)
    if ended is None:
        sys.exit(0)
    held = is_served(AggregatorHome(home))
    store.facts.openings = 3
print(json.dumps([child, held, store.facts.openings]))
store.database.close()
"""


def test_a_store_is_its_process_s_too(tmp_path: Path) -> None:
    home = make_fleet(tmp_path, "mqtt://127.0.0.1:1", 1, ROUND, 5).aggregator.folder
    (read, write, erase, close, opened, served), held, openings = run(home, STORE)  # type: ignore[misc]
    for each in (read, write, erase):
        assert each.startswith("ForkedError: ") and "a fork of it" in each
    assert close == "did None" and "was open when this process was forked" in opened
    assert served is True and held is True and openings == 3


TRAINER = """
import numpy as np
from device_sdk.trainer import Trainer
from device_sdk.factorisation import packaged_artifact
trainer = Trainer(packaged_artifact(), providers="cpu")
calls = (lambda: trainer.step({}), lambda: trainer.predict({}))
print(json.dumps(in_a_fork(lambda: [said(call) for call in calls])))
"""


def test_a_trainer_is_refused_in_a_fork(home: Path) -> None:
    for words in run(home, TRAINER):  # type: ignore[attr-defined]
        assert words.startswith("ForkedError: the Trainer of ")
