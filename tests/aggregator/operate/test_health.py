"""Each kind of problem shows where it stands, and nowhere else; the port tells the same."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator import Fleet
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.keys.enrolment import make_codes
from aggregator.operate.health import Arrivals, FleetHealth, ProblemWatch, TaskStanding
from aggregator.operate.problems import KINDS, FleetProblem
from aggregator.serve.metrics import Told, serve_metrics
from aggregator.serve.reach import Reach
from aggregator.store import Store
from aggregator.store.rows import DeviceRow, RoundRow, StoredReport
from aggregator.store.versions import MethodCheckpoint
from aggregator.task.file import MetricsSettings, read_task
from device_sdk.system.lock import LiveFile
from tests.brokers.fixtures import MakeMosquitto
from tests.fakes.homes import ServeProcess, command, make_home
from tests.fakes.outputs import output_of
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until
from tests.vectors.generate_problem_table import PAGE, page

NOW = 1_800_000_000.0


def device(index: int) -> DeviceRow:
    name = bytes([index]) * 16
    return DeviceRow(name, name * 2, name, name * 2, 0, name[:8], int(NOW), 1)


def serves(home: AggregatorHome, **reach: object) -> LiveFile:
    """As a serve does that runs there."""
    said = Reach(broker="mqtt://here", connected=True, broker_since_unix_seconds=int(NOW) - 60)
    live = LiveFile(home.live_file)
    live.tell({**asdict(said), **reach})
    return live


def rounds(store: Store, participants: list[int], *, versions: bool) -> None:
    """Closed ones, of one device each, all settings of the task in force."""
    store.tasks.change(1, served='[broker]\nurl = "mqtt://here"\n[round]\nquorum = 2\n')
    for number, count in enumerate(participants, 1):
        opened = NOW - 600 + 10 * number
        made = number if versions else None
        row = RoundRow(number, 1, 0, opened, opened + 9, bytes(32), 2**64 - 1, 1, 2)
        store.first.rounds.add(
            replace(row, closed_unix_seconds=opened + 9, participants=count, next_version=made)
        )


def code_tried_by_another(store: Store) -> None:
    store.tokens.add(
        code := make_codes(store, 1, int(NOW), os.urandom)[0], int(NOW), int(NOW) + 9, None
    )
    store.tokens.note_stranger(code.token_id, bytes(32))


def fails(store: Store, outcomes: list[str]) -> None:
    rounds(store, [2], versions=True)
    rows = [
        StoredReport(1, 1, bytes([at]) * 16, outcome, "", *[None] * (len(StoredReport._fields) - 5))
        for at, outcome in enumerate(outcomes)
    ]
    store.first.reports.add(rows)


def clash(store: Store, seconds_ago: float) -> None:
    store.devices.add(device(1))
    store.devices.note_clashes({bytes([1]) * 16: int(NOW - seconds_ago)})


def workers(store: Store, *, coordinated: bool) -> None:
    if coordinated:
        store.lease.take("here", "program", 60)
    else:
        term = store.lease.take("here", "program", 60)
        assert term is not None
        store.lease.release(term)
    store.workers.start(0, "", "all", "program")
    store.workers.beat(0, connected=not coordinated)


def unevaluated(store: Store) -> None:
    served = '[broker]\nurl = "mqtt://here"\n[evaluation]\nmetrics = ["hr10"]\n'
    store.tasks.change(1, served=served)
    store.first.checkpoints.put(MethodCheckpoint("version", 10, 0, 10, {}))


def clock_was_set(home: AggregatorHome, store: Store) -> LiveFile:
    store.facts.clock_problem = "the clock was set"
    return serves(home)


Arrange = Callable[[AggregatorHome, Store], object]
ARRANGED: dict[str, Arrange] = {
    "clock": clock_was_set,
    "keys": lambda home, store: setattr(store.facts, "keys_problem", "they end"),
    "chunk-store": lambda home, store: setattr(store.facts, "mirror_problem", "no room"),
    "two-machines": lambda home, store: clash(store, 3600),
    "code-leaked": lambda home, store: code_tried_by_another(store),
    "task-refused": lambda home, store: store.tasks.change(1, problem="its file is none"),
    "no-room": lambda home, store: setattr(store.first.facts, "no_room", "it takes 100 bytes"),
    "round-held": lambda home, store: setattr(store.first.facts, "unpublished", "no artifact"),
    "rollback-dropped": lambda home, store: setattr(
        store.first.facts, "dropped_rollback", "version 3's model did not become the next version"
    ),
    "no-device-fits": lambda home, store: store.tasks.change(
        1, served='[broker]\nurl = "mqtt://here"\n[task]\nonly = {site = "north"}\n'
    ),
    "too-few-devices": lambda home, store: store.tasks.change(
        1, served='[broker]\nurl = "mqtt://here"\n[round]\nquorum = 2\n'
    ),
    "shut-out": lambda home, store: rounds(store, [0] * 5, versions=False),
    "no-quorum": lambda home, store: rounds(store, [1] * 3, versions=False),
    "unevaluated": lambda home, store: unevaluated(store),
    "devices-fail": lambda home, store: fails(store, ["failed", "failed", "trained"]),
    "broker-away": lambda home, store: serves(home, connected=False, broker_problem="refused"),
    "store-away": lambda home, store: serves(home, store_problem="no route"),
    "topics-refused": lambda home, store: serves(home, refused_topics=["tessera/up/+/+"]),
    "broker-drops": lambda home, store: serves(home, broker_losses=2),
    "console-away": lambda home, store: serves(home, console_problem="the port is taken"),
    "no-coordinator": lambda home, store: workers(store, coordinated=False),
    "worker-away": lambda home, store: workers(store, coordinated=True),
}
ELSEWHERE = {"devices-silent", "serve-stopped", "disk-full", "health-unread"}
"""Each has a test of its own below."""


def found(home: AggregatorHome, now: float = NOW) -> dict[str, FleetProblem]:
    store = home.open_store()
    try:
        return {each.code: each for each in FleetHealth(home, store, now).problems}
    finally:
        store.database.close()


def test_each_kind_of_problem_is_arranged_here() -> None:
    assert set(ARRANGED) | ELSEWHERE == set(KINDS)


@pytest.mark.parametrize("code", ARRANGED)
def test_a_problem_shows_with_what_to_do(
    code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    assert set(found(home)) == {"serve-stopped"}, "a home that was just made has no other"
    store = home.open_store()
    with store.database.transaction():
        kept = ARRANGED[code](home, store)  # what says that a serve runs, as long as it is there
    store.database.close()
    lease = code in ("no-coordinator", "worker-away")  # which the store's own clock judges
    seen = found(home, time.time() if lease else NOW)
    assert code in seen
    # A task with a quorum and no devices is short of these, too.
    assert set(seen) - {code} <= {"serve-stopped", "too-few-devices"}
    told = json.loads(output_of(capsys, home, "status", "--json"))["problems"]
    assert all(each["to_do"] and each["what"] for each in told)
    shown = output_of(capsys, home, "status")
    for each in told:
        assert f"{each['what'][:30]}" in shown
    del kept


def test_a_fleet_tells_of_its_health(tmp_path: Path) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    with Fleet.open(home.folder, clock=lambda: NOW) as fleet:
        health = fleet.health()
        assert [each.code for each in health.problems] == ["serve-stopped"]
        assert not health.is_ready and health.tasks[0].version == 0


def test_the_page_has_each_kind() -> None:
    """Else: PYTHONPATH=. python tests/vectors/generate_problem_table.py."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text)


def test_what_is_over_is_not_told(tmp_path: Path) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    store = home.open_store()
    with store.database.transaction():
        clash(store, 2 * 86_400)
        code_tried_by_another(store)
        rounds(store, [0, 0, 0, 0, 2], versions=True)
    store.database.close()
    assert not {"two-machines", "shut-out", "no-quorum"} & set(found(home))
    assert "code-leaked" in found(home)
    assert "code-leaked" not in found(home, NOW + 2 * 86_400)


def test_a_fleet_of_which_more_than_half_was_not_heard_of_for_a_day(tmp_path: Path) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    store = home.open_store()
    one, two, three, gone = (device(at) for at in (1, 2, 3, 4))
    with store.database.transaction():
        for each in (one, two, three, gone):
            store.devices.add(each)
        store.devices.revoke(gone.device_id, int(NOW))
    store.database.close()
    day = NOW + 86_400
    with Fleet.open(home.folder, clock=lambda: day) as fleet:
        store = fleet.health().store
        assert [str(each.state) for each in fleet.devices()] == ["silent"] * 3 + ["revoked"]
        store.devices.note_seen({one.device_id: int(day) - 60})
        problem = next(each for each in fleet.health().problems if each.code == "devices-silent")
        assert problem.what == "2 of 3 devices were not heard of for a day"
        assert problem.device_ids == (two.device_id, three.device_id)
        store.devices.note_seen({two.device_id: int(day) - 60})
        assert "devices-silent" not in {each.code for each in fleet.health().problems}
        assert [str(each.state) for each in fleet.devices()][:3] == ["active", "active", "silent"]


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_as_many_updates_have_come_by_then_as_is_said(seconds: list[float]) -> None:
    found = Arrivals.of(seconds)
    assert found is not None
    for share, within in ((0.5, found.half), (0.9, found.nine_tenths), (1.0, found.longest)):
        assert within in seconds
        assert sum(each <= within for each in seconds) >= share * len(seconds)
        assert sum(each < within for each in seconds) < share * len(seconds)


def test_what_is_wrong_with_very_many_devices_is_one_problem_of_a_kind(tmp_path: Path) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    store, now = home.open_store(), int(NOW) + 86_400
    with store.database.transaction():
        codes = make_codes(store, 300, int(NOW), os.urandom)
        for at, code in enumerate(codes):
            name = at.to_bytes(16, "big")
            token = code.token_id
            store.devices.add(DeviceRow(name, name * 2, name, name * 2, 0, token, int(NOW), 1))
            store.tokens.add(code, int(NOW), now, None)
            if at < 20:
                store.tokens.bind(token, name)
            store.tokens.note_stranger(token, bytes(32))
        store.devices.note_clashes({at.to_bytes(16, "big"): now for at in range(120)})
    problems = FleetHealth(home, store, now).own_problems
    found = {each.code: each for each in problems}
    assert len(problems) == len(found)
    for code, count in (("two-machines", 120), ("devices-silent", 180), ("code-leaked", 20)):
        said = found[code].as_json()
        assert said["devices"] == count and len(found[code].device_ids) == min(count, 100)
        assert len(json.dumps(said)) < 5000 and len(found[code].what) < 300
    assert "each of 120 devices, 000000000000, " in found["two-machines"].what
    assert "and 112 more" in found["two-machines"].what
    assert "000000000000 and 12 more, were tried 300 times" in found["code-leaked"].what
    store.database.close()


def test_a_disk_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10 << 20))
    assert "10" in found(home)["disk-full"].what


def test_standings(tmp_path: Path) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    store = home.open_store()

    def standing() -> TaskStanding:
        (task,) = FleetHealth(home, store, NOW).tasks
        return task.standing

    assert standing() is TaskStanding.NOT_SERVED
    with store.database.transaction():
        store.first.facts.label = "default scatter"
        rounds(store, [2, 2, 2], versions=True)
    assert standing() is TaskStanding.WAITING
    with store.database.transaction():
        for at in (1, 2):
            store.devices.add(device(at))
    assert standing() is TaskStanding.LEARNING
    with store.database.transaction():
        store.tasks.change(1, state="paused")
    assert standing() is TaskStanding.PAUSED
    with store.database.transaction():
        store.first.facts.unpublished = "no artifact"
    assert standing() is TaskStanding.HELD
    store.database.close()


def test_asked_often_it_reads_the_store_for_a_hundredth_of_the_time(tmp_path: Path) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    now, looks = [0.0], [0]

    def clock() -> float:
        return now[0]

    class Slow(ProblemWatch):
        def _look(self) -> tuple[FleetProblem, ...]:
            looks[0] += 1
            now[0] += 0.5
            return super()._look()

    watch = Slow(home, clock, lambda: NOW, clock)
    for _ in range(1000):
        assert {each.code for each in watch()} == {"serve-stopped"}
        now[0] += 0.1
    assert looks[0] <= 4, "half a second each, in a hundred seconds"
    home.database.rename(home.database.with_suffix(".away"))
    now[0] += 1000
    wait_until(lambda: {each.code for each in watch()} == {"store-away"})


def test_after_a_look_that_took_long_the_next_one_is_not_hours_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, now = make_home(tmp_path, "mqtt://127.0.0.1:1"), [0.0]
    watch = ProblemWatch(home, lambda: now[0], lambda: NOW)

    def away(self: AggregatorHome) -> Store:
        now[0] += 15.0  # as PostgreSQL behind a network that drops everything
        raise OSError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(AggregatorHome, "open_store", away)
        wait_until(lambda: {each.code for each in watch()} == {"store-away"})
    now[0] += 60.0
    wait_until(lambda: {each.code for each in watch()} == {"serve-stopped"})


def test_a_look_that_could_not_begin_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    watch = ProblemWatch(home, unix_clock=lambda: NOW)

    def full(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError):
            watch()
    wait_until(lambda: {each.code for each in watch()} == {"serve-stopped"})


@pytest.mark.parametrize(
    "error, code",
    [
        (AggregatorError("it lacks a table"), "store-away"),
        (OSError("a disk"), "store-away"),
        (RuntimeError("a mistake"), "health-unread"),
    ],
)
def test_a_look_that_fails_is_a_problem_and_takes_no_other_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")

    def fails(self: FleetHealth) -> list[FleetProblem]:
        raise error

    monkeypatch.setattr(FleetHealth, "problems", property(fails))
    live = serves(home, connected=False)
    with serve_metrics(MetricsSettings(), Told(lambda: None, ProblemWatch(home))) as port:
        said = answer(port, "/metrics")[1]
        assert f'tessera_problem{{code="{code}",severity="error",task=""}} 1.0' in said
        assert 'code="broker-away"' in said
        status, lines = answer(port, "/readyz")
        assert status == 503 and f"{code}: " in lines and str(error) in lines
    live.close()


def test_nobody_waits_for_a_store_that_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    now, goes_on, opened = [0.0], threading.Event(), AggregatorHome.open_store
    watch = ProblemWatch(home, lambda: now[0], lambda: NOW)
    wait_until(lambda: {each.code for each in watch()} == {"serve-stopped"})

    def slow(self: AggregatorHome) -> Store:
        assert goes_on.wait(PATIENCE_SECONDS)
        return opened(self)

    with serve_metrics(MetricsSettings(), Told(lambda: None, watch)) as port:
        monkeypatch.setattr(AggregatorHome, "open_store", slow)
        now[0] += 1000.0
        asked = [threading.Thread(target=answer, args=(port, "/metrics")) for _ in range(8)]
        began = time.monotonic()
        for each in asked:
            each.start()
        for each in asked:
            each.join(PATIENCE_SECONDS)
        assert time.monotonic() - began < PATIENCE_SECONDS / 2 and not goes_on.is_set()
        assert [each.code for each in watch()] == ["serve-stopped"], "as it was found last"
        now[0] += 100.0
        assert [each.code for each in watch()] == ["store-away", "serve-stopped"]
        goes_on.set()
        wait_until(lambda: [each.code for each in watch()] == ["serve-stopped"])


def test_a_store_that_is_slow_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, goes_on = make_home(tmp_path, "mqtt://127.0.0.1:1"), threading.Event()

    def slow(self: FleetHealth) -> list[FleetProblem]:
        assert goes_on.wait(PATIENCE_SECONDS)
        return []

    monkeypatch.setattr(FleetHealth, "problems", property(slow))
    monkeypatch.setattr("aggregator.operate.health._FIRST_WAIT_SECONDS", 0.1)
    watch = ProblemWatch(home)
    assert [each.code for each in watch()] == ["store-away"], "not known is not well"
    goes_on.set()
    wait_until(lambda: not watch())


def answer(port: int, path: str, token: str = "") -> tuple[int, str]:
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if token:
        asked.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE_SECONDS) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_port_asks_for_its_token_and_tells_probes_what_they_need(tmp_path: Path) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", more='[metrics]\ntoken_file = "token"')
    problems: list[FleetProblem] = [FleetProblem("clock", "it was set")]
    works = [True]
    told = Told(lambda: None, lambda: problems, lambda: works[0])
    settings = read_task(home.task_file).fleet.metrics
    with pytest.raises(AggregatorError, match=r"metrics\.token_file .* cannot be read"):
        settings.token()
    (home.folder / "token").write_text("\n")
    with pytest.raises(AggregatorError, match="holds no token"):
        settings.token()
    (home.folder / "token").write_text("s3cret\n")
    with serve_metrics(settings, told) as port:
        for path in ("/metrics", "/readyz", "/nothing"):
            assert answer(port, path)[0] == answer(port, path, "s3cre")[0] == 401
        assert answer(port, "/healthz") == (200, "works\n")
        assert (
            'tessera_problem{code="clock",severity="warning",task=""} 1.0'
            in answer(port, "/metrics", "s3cret")[1]
        )
        assert answer(port, "/readyz", "s3cret") == (503, "not yet\n")
        problems.append(FleetProblem("broker-away", "serve runs, not connected"))
        status, lines = answer(port, "/readyz", "s3cret")
        assert status == 503 and lines.startswith("broker-away: serve runs, not connected")
        works[0] = False
        assert answer(port, "/healthz")[0] == 503
        assert answer(port, "/nothing", "s3cret")[0] == 404


def test_a_serve_that_loses_its_broker_says_so_by_its_port(
    tmp_path: Path, make_mosquitto: MakeMosquitto
) -> None:
    broker = make_mosquitto()
    with serve_metrics(MetricsSettings(), Told(lambda: None)) as port:
        pass  # free now
    home = make_home(tmp_path, broker.url, more=f"[metrics]\nport = {port}")
    serve = ServeProcess(home)
    serve.start()

    def ready(path: str = "/readyz") -> tuple[int, str]:
        try:
            return answer(port, path)
        except OSError:
            return 0, ""

    try:
        wait_until(lambda: ready()[0] == 200 or "too-few" in ready()[1], serve.log.read_text)
        broker.stop()
        wait_until(lambda: ready()[1].startswith("broker-away"), lambda: ready()[1])
        assert ready("/healthz") == (200, "works\n")
        assert 'code="broker-away",severity="error"' in ready("/metrics")[1]
        assert command(home, "status") == 0
    finally:
        assert serve.stop() == 0
