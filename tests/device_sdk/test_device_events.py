"""What an app is told while its device runs, and when the device trains."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from device_sdk import ConnectedEvent, ModelEvent, ProblemEvent, RoundEvent
from device_sdk.cli import main
from device_sdk.device import Device
from device_sdk.errors import HomeError
from device_sdk.events import LIVE_FILE, Callbacks, Live, read_live
from device_sdk.fields import plain
from device_sdk.home.home import Home, forget
from device_sdk.home.task_store import KnownTask
from device_sdk.local_data import LocalData
from device_sdk.system.lock import LiveFile
from device_sdk.train.job import TrainedRound, TrainingJob
from device_sdk.train.scatter import ScatterTrainer
from device_sdk.wire.publish.report import ReportedOutcome
from device_sdk.world import DeviceWorld, TrainingOptions
from tests.brokers.links import QUICK
from tests.brokers.mosquitto import Mosquitto
from tests.device_sdk.conftest import MakeDevice
from tests.device_sdk.rounds.test_device_round import await_receipt
from tests.fakes.brisk import BRISK
from tests.fakes.quick import joined, opened
from tests.fakes.small_aggregator import SmallAggregator, small_catalogue
from tests.fakes.waiting import NEVER_SECONDS, PATIENCE_SECONDS

_OTHER_FILMS = replace(small_catalogue(), titles=small_catalogue().titles[::-1])
MakeReluctant = Callable[[Callable[[], bool]], Device]


@pytest.fixture
def make_reluctant(make_device: MakeDevice) -> MakeReluctant:
    """A device that trains only when it may, and asks every fifth of a second."""

    def make(only_when: Callable[[], bool]) -> Device:
        device = make_device()
        device.close()
        options = TrainingOptions(k=4, only_when=only_when)
        return Device.open(
            device.home,
            options=options,
            pace=replace(BRISK, ask_seconds=0.2),
            link_settings=QUICK,
        )

    return make


# Events.


def test_an_app_is_told_of_connections_rounds_models_and_problems(
    device: Device, aggregator: SmallAggregator, mosquitto: Mosquitto
) -> None:
    told: list[object] = []
    device.on("connected", told.append)
    device.on("round", told.append)
    device.on("model", told.append)
    end = device.on("problem", told.append)
    device.start()
    aggregator.await_(lambda: len(told) > 0 and device.status().session)
    aggregator.open_round()
    await_receipt(aggregator, device, 1)
    aggregator.open_round(threshold=0)  # the task rests
    aggregator.await_(lambda: sum(isinstance(each, ModelEvent) for each in told) == 2)
    assert told == [  # and no problem, though there is none of a descriptor for a moment
        ConnectedEvent(mosquitto.url),
        RoundEvent("default", 1, 0, "trained", ""),
        ModelEvent("default", 0, 1),
        RoundEvent("default", 2, 0, "read", ""),
        ModelEvent("default", 0, 2),
    ]
    told.clear()
    mosquitto.kill()
    aggregator.await_(lambda: any(isinstance(each, ProblemEvent) and each.text for each in told))
    mosquitto.start()
    aggregator.await_(lambda: ConnectedEvent(mosquitto.url) in told)
    aggregator.await_(lambda: ProblemEvent("") in told)
    end()
    told.clear()
    mosquitto.kill()
    aggregator.await_(lambda: "no connection" in device.status().problem)
    time.sleep(0.1)
    assert told == []
    mosquitto.start()


def test_a_callback_that_raises_or_hangs_harms_neither_training_nor_closing(
    device: Device, aggregator: SmallAggregator, caplog: pytest.LogCaptureFixture
) -> None:
    heard, hangs, go_on, ended = [], threading.Event(), threading.Event(), threading.Event()

    def fails(event: RoundEvent) -> None:
        heard.append(event.round)
        raise SystemExit(f"of the app's own, round {event.round}")

    def hang(event: RoundEvent) -> None:
        if event.round == 2:
            hangs.set()
            go_on.wait(PATIENCE_SECONDS)
            ended.set()

    device.on("round", fails)
    device.on("round", hang)
    device.start()
    for number in (1, 2, 3, 4):
        aggregator.open_round()
        await_receipt(aggregator, device, number)
    assert hangs.is_set() and heard == [1, 2]
    assert "the app's callback failed" in caplog.text and "of the app's own" in caplog.text
    assert aggregator.rounds_seen() == [1, 2, 3, 4] and device.status().problem == ""
    device.close(timeout_seconds=10 * PATIENCE_SECONDS)
    assert not ended.is_set()  # closing did not wait for it
    go_on.set()


def test_a_callback_may_close_the_device(device: Device, aggregator: SmallAggregator) -> None:
    device.on("round", lambda event: device.close())
    device.start()
    aggregator.open_round()
    aggregator.await_(lambda: device._closed)
    with pytest.raises(HomeError, match="was closed"):
        device.on("round", print)


def test_of_events_that_nobody_takes_the_oldest_are_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    callbacks, go_on, heard = Callbacks(), threading.Event(), []
    callbacks.tell(ProblemEvent("nobody listens yet"))

    def take(event: ProblemEvent) -> None:
        go_on.wait(PATIENCE_SECONDS)
        heard.append(event.text)

    callbacks.on("problem", take)
    for number in range(400):
        callbacks.tell(ProblemEvent(str(number)))
    go_on.set()
    callbacks.close()
    assert 256 <= len(heard) <= 257 and heard[-256:] == [str(n) for n in range(144, 400)]
    assert caplog.text.count("oldest events are dropped") == 1


def test_an_event_that_there_is_not_is_refused_by_name(device: Device) -> None:
    with pytest.raises(ValueError, match="'rounds' is no event; expected one of connected, round"):
        device.on("rounds", print)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="cannot be called"):
        device.on("round", None)  # type: ignore[call-overload]
    with Device.open(device.home, read_only=True) as looks, pytest.raises(HomeError, match="read"):
        looks.on("round", print)


def test_an_app_waits_for_its_first_model(device: Device, aggregator: SmallAggregator) -> None:
    assert device.wait_for_model(0.05) is False
    device.start()
    found: list[bool] = []
    waits = threading.Thread(target=lambda: found.append(device.wait_for_model()))
    waits.start()
    aggregator.open_round()
    waits.join(PATIENCE_SECONDS)
    assert found == [True] and device.recommend(1, user="anna")
    device.close()
    with Device.open(device.home) as again:  # it is here before anything runs
        assert again.wait_for_model(0.0) is True


def test_closing_wakes_whoever_waits_for_a_model(device: Device) -> None:
    found: list[bool] = []
    waits = threading.Thread(target=lambda: found.append(device.wait_for_model()))
    waits.start()
    time.sleep(0.1)
    device.close()
    waits.join(PATIENCE_SECONDS)
    assert found == [False]


# When to train.


def test_a_round_waits_until_the_app_says_yes(
    make_reluctant: MakeReluctant, aggregator: SmallAggregator
) -> None:
    yes, asked = threading.Event(), []

    def only_when() -> bool:
        asked.append(time.monotonic())
        return yes.is_set()

    with make_reluctant(only_when) as device:
        device.start()
        aggregator.open_round()
        aggregator.await_(lambda: len(asked) >= 3)
        assert device.status().working_on == 1 and not aggregator.seen.bodies
        between = [later - earlier for earlier, later in pairwise(asked)]
        assert min(between) >= 0.19  # by the clock, whatever messages come
        yes.set()
        await_receipt(aggregator, device, 1)
        aggregator.open_round()
        await_receipt(aggregator, device, 2)


def test_a_round_that_waited_too_long_is_declined_and_the_next_one_is_not(
    make_reluctant: MakeReluctant, aggregator: SmallAggregator
) -> None:
    yes = threading.Event()
    with make_reluctant(yes.is_set) as device:
        device.start()
        aggregator.open_round(train_seconds=NEVER_SECONDS - 1.5)
        aggregator.await_(lambda: device.status().outcome == "declined")
        assert device.status().detail.startswith("not-now: only_when said no")
        assert device.status().problem == "" and not aggregator.seen.bodies
        aggregator.await_(lambda: len(aggregator.seen.reports) == 1)
        [(_, report)] = aggregator.seen.reports
        assert (report.outcome, report.reason) == (ReportedOutcome.DECLINED, "not-now")
        yes.set()
        aggregator.open_round()
        await_receipt(aggregator, device, 2)


def test_a_newer_round_takes_the_place_of_one_that_waits(
    make_reluctant: MakeReluctant, aggregator: SmallAggregator
) -> None:
    yes, asked = threading.Event(), threading.Event()

    def may() -> bool:
        asked.set()
        return yes.is_set()

    with make_reluctant(may) as device:
        device.start()
        aggregator.open_round()
        aggregator.await_(asked.is_set)
        aggregator.open_round()
        aggregator.await_(lambda: device.status().working_on == 2)
        assert (device.status().round, device.status().outcome) == (1, "declined")
        assert device.status().detail == "not-now: only_when said no until the next round opened"
        yes.set()
        await_receipt(aggregator, device, 2)


def test_of_two_tasks_an_app_sees_each_one_s_round(
    make_reluctant: MakeReluctant, aggregator: SmallAggregator
) -> None:
    aggregator.served, aggregator.revision = (("air", "all"), ("default", "all")), 1
    aggregator.publish_standing()
    aggregator.catalogues["air"] = _OTHER_FILMS
    with make_reluctant(lambda: False) as device:
        device.record("film-1", task="air")
        device.start()
        aggregator.open_round()
        aggregator.open_round()
        aggregator.open_round(task="air")
        aggregator.await_(lambda: [each.working_on for each in device.tasks()] == [1, 2])
        with Device.open(device.home, read_only=True) as beside:
            for each in (device, beside):
                rounds = {name: each.status(task=name).working_on for name in ("air", "default")}
                assert rounds == {"air": 1, "default": 2}
                assert [one.working_on for one in each.tasks()] == [1, 2]


def test_data_for_one_task_more_wake_the_device_at_once(
    aggregator: SmallAggregator, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    aggregator.served, aggregator.revision = (("air", "all"), ("default", "all")), 1
    aggregator.catalogues["air"] = _OTHER_FILMS
    aggregator.publish_standing()
    with joined(
        mosquitto.url,
        aggregator.code(),
        tmp_path / "home",
        task="default",
        options=TrainingOptions(k=4),
    ) as device:
        for task in ("air", "default"):
            device.record_all([("film-1", "anna"), ("film-2", "anna")], task=task)
            aggregator.open_round(task=task)
        device.start()
        aggregator.await_(lambda: device.status(task="default").verdict == "counted")
        # Nothing comes any more that would wake it.
        device.provide(LocalData({}), task="air")
        aggregator.await_(lambda: device.status(task="air").verdict == "counted")


def test_an_only_when_that_raises_counts_as_no_and_is_told(
    make_reluctant: MakeReluctant, aggregator: SmallAggregator, caplog: pytest.LogCaptureFixture
) -> None:
    broken = True

    def only_when() -> bool:
        if broken:
            raise OSError("no such sensor")
        return True

    with make_reluctant(only_when) as device:
        device.start()
        aggregator.open_round()
        aggregator.await_(lambda: "only_when" in device.status().problem)
        assert device.status().problem == "only_when failed: OSError: no such sensor"
        time.sleep(0.5)
        assert not aggregator.seen.bodies and caplog.text.count("counts as False") == 1
        broken = False
        await_receipt(aggregator, device, 1)
        assert device.status().problem == ""


def test_only_when_has_to_be_a_function() -> None:
    with pytest.raises(ValueError, match="only_when is True; expected a function"):
        TrainingOptions(only_when=True)  # type: ignore[arg-type]


# What only the running process knows.


def test_a_home_that_cannot_be_looked_at_for_a_while_ends_no_round(
    device: Device, aggregator: SmallAggregator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def full(world: DeviceWorld) -> list[KnownTask]:
        tried.set()
        raise OSError("no space is left")

    with monkeypatch.context() as patched:
        patched.setattr("device_sdk.status._known", full)
        device.start()
        assert tried.wait(PATIENCE_SECONDS)
    aggregator.open_round()
    await_receipt(aggregator, device, 1)


def test_status_shows_what_the_running_process_knows(
    device: Device, aggregator: SmallAggregator, capsys: pytest.CaptureFixture[str]
) -> None:
    aggregator.served = ()
    aggregator.revision += 1
    device.start()
    aggregator.publish_standing()
    aggregator.await_(lambda: "serves no task for this device" in device.status().problem)
    aggregator.await_(lambda: (read_live(device.home) or Live()).problem != "")
    assert main(["status", "--home", str(device.home)]) == 0
    assert "the aggregator serves no task for this device" in capsys.readouterr().out
    assert main(["status", "--home", str(device.home), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["running"], told["connected"], told["session"]) == (True, True, True)
    assert told["problem"].endswith("there is none")
    assert (device.home / "running.json").stat().st_mode & 0o777 == 0o600
    device.stop()
    main(["status", "--home", str(device.home), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["running"], told["connected"], told["problem"]) == (False, False, "")
    main(["status", "--home", str(device.home)])
    assert "no process runs it" in capsys.readouterr().out


_HOLDER = """
import sys, time
from pathlib import Path
from device_sdk.events import LIVE_FILE, Live
from device_sdk.fields import plain
from device_sdk.system.lock import LiveFile
live = Live(True, False, {"air": 7}, "something", {"air": "else"}, unix_seconds=1234)
LiveFile(Path(sys.argv[1]) / LIVE_FILE).tell(plain(live))
print("told", flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_left_behind_is_known_for_what_it_is(tmp_path: Path) -> None:
    assert read_live(tmp_path) is None and list(tmp_path.iterdir()) == []
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "told\n"
        assert read_live(tmp_path) == Live(
            True, False, {"air": 7}, "something", {"air": "else"}, process.pid, 1234
        )
        process.kill()
        process.wait(PATIENCE_SECONDS)
    assert (tmp_path / "running.json").stat().st_size > 0
    assert read_live(tmp_path) is None
    again = LiveFile(tmp_path / LIVE_FILE)
    again.tell(plain(Live()))
    found = read_live(tmp_path)
    assert found is not None and found.problem == ""
    again.close()
    assert read_live(tmp_path) is None


def test_a_running_process_s_file_that_holds_anything_else_says_nothing(tmp_path: Path) -> None:
    file = LiveFile(tmp_path / LIVE_FILE)
    file.tell(plain(Live(True, True)))
    for content in (b"", b"{", b"[1]", b"\xff", b'{"connected": 1}', b"[" * 100_000):
        (tmp_path / "running.json").write_bytes(content)
        assert read_live(tmp_path) is None
    file.close()


def test_a_device_that_could_not_forget_in_time_goes_on_and_a_start_while_it_stops_holds(
    device: Device, aggregator: SmallAggregator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("device_sdk.device._FORGET_SECONDS", 0.2)
    inside, go_on = threading.Event(), threading.Event()
    train = ScatterTrainer.train

    def slow(trainer: ScatterTrainer, job: TrainingJob) -> TrainedRound:
        inside.set()
        assert go_on.wait(60)
        return train(trainer, job)

    monkeypatch.setattr(ScatterTrainer, "train", slow)
    device.start()
    aggregator.open_round()
    assert inside.wait(60)
    with pytest.raises(HomeError, match="call forget"):
        device.forget(item="film-1")
    assert not device.stop(0.2)
    device.start()  # the app changed its mind before the training ended
    go_on.set()
    await_receipt(aggregator, device, 1)
    aggregator.open_round()
    await_receipt(aggregator, device, 2)
    assert device.forget(item="film-1") and device.status().running
    assert device.stop(30) and not device.status().running


def test_nothing_is_trained_while_something_is_forgotten(
    device: Device, aggregator: SmallAggregator, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.start()

    def started_meanwhile(home: Home, user: str | None, item: str | None) -> int:
        device.start()
        running.append(device.status().running)
        return forget(home, user, item)

    running: list[bool] = []
    monkeypatch.setattr("device_sdk.device.forget", started_meanwhile)
    assert device.forget(item="film-1")
    device.stop()
    assert device.forget(item="film-2")
    assert running == [False, False] and device.status().running, "it was wanted meanwhile"
    aggregator.open_round()
    await_receipt(aggregator, device, 1)


def test_what_waits_for_the_devices_thread_is_refused_on_it_and_does_nothing(
    make_device: MakeDevice, aggregator: SmallAggregator, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def only_when() -> bool:
        for call in (device.stop, device.close, device.leave, lambda: device.forget(item="film-1")):
            with pytest.raises(RuntimeError, match="on another thread") as raised:
                call()
            said.append(str(raised.value))
        return True

    made = make_device()
    made.close()
    options = TrainingOptions(k=4, only_when=only_when)
    with opened(made.home, options=options) as device:
        device.start()
        aggregator.open_round()
        await_receipt(aggregator, device, 1)
        assert len(said) == 4 and device.status().problem == ""
