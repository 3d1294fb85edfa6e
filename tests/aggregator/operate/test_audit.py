"""The audit log: who did what, whatever becomes of its file."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import stat
import time
from pathlib import Path

import pytest

from aggregator import Fleet
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.operate import audit
from aggregator.operate.audit import DONE, AuditEntry, AuditLog, system_user
from tests.fakes.homes import command, make_home
from tests.fakes.outputs import output_of


def entry(action: str, actor: str = "anna") -> AuditEntry:
    return AuditEntry(1.5, actor, action, {"device": "3f"}, DONE)


@pytest.mark.parametrize("before", ["\n", "\u2345", "\x1ff"])
def test_a_code_is_taken_out_of_a_text_whatever_stands_before_it(before: str) -> None:
    code = "ABCDEFGH" * 11
    said = AuditEntry(1.5, "anna", "withdraw", {"codes": [f"{before}{code}"]}, f"no {code}")
    found = AuditEntry.read(said.write())
    assert found is not None and found.outcome == "no (an enrolment code)"
    assert "(an enrolment code)" in found.arguments["codes"][0]
    assert found.arguments["codes"][0].startswith(before[:1])


@pytest.fixture
def home(tmp_path: Path) -> AggregatorHome:
    return make_home(tmp_path, "mqtt://127.0.0.1:1")


def test_what_is_done_and_what_fails_is_noted_without_secrets(home: AggregatorHome) -> None:
    now = time.time() + 100
    with Fleet.open(home.folder, actor="anna", clock=lambda: now) as fleet:
        (code,) = fleet.invite(name="hall-3", labels={"site": "north"})
        with pytest.raises(AggregatorError, match="no device named 'nobody'"):
            fleet.revoke("nobody")
        invited, failed = fleet.audit()
        assert fleet.audit(1) == [failed] and fleet.audit(0) == []
    assert (invited.actor, invited.action, invited.outcome) == ("anna", "invite", DONE)
    assert invited.unix_seconds == now
    assert invited.arguments == {
        "count": 1,
        "expires_seconds": 86_400,
        "name": "hall-3",
        "labels": {"site": "north"},
    }
    assert failed.arguments == {"device": "nobody"} and "no device" in failed.outcome
    written = home.audit_file.read_text()
    assert code not in written and code.replace("-", "") not in written
    assert stat.S_IMODE(home.audit_file.stat().st_mode) == 0o600


def test_version_0_is_named(home: AggregatorHome) -> None:
    with Fleet.open(home.folder, actor="anna") as fleet:
        with pytest.raises(AggregatorError):
            fleet.pin(0)
        (pinned,) = fleet.audit()
    assert pinned.arguments == {"version": 0}


def test_the_command_shows_it_and_commands_are_their_users(
    home: AggregatorHome, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output_of(capsys, home, "audit") == "nothing was done yet\n"
    assert command(home, "rotate", "group") == 0
    capsys.readouterr()
    shown = output_of(capsys, home, "audit")
    assert f" {system_user()} " in shown and "rotate group" in shown and DONE in shown
    (said,) = json.loads(output_of(capsys, home, "audit", "--json"))
    assert said["actor"] == system_user() and said["arguments"] == {}


def test_damaged_lines_are_passed_over_and_one_cut_short_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.add(entry("first"))
    with path.open("ab") as file:
        file.write(b'\xff\n[]\nnull\n{"action": "odd"}\n' + b"[" * 100_000 + b"\n")
        file.write(json.dumps({**json.loads(entry("x").write()), "actor": 3}).encode() + b"\n")
        file.write(b'{"unix_seconds": 1.5, "act')  # the disk was full
    log.add(entry("last"))
    assert [each.action for each in log.newest(10)] == ["first", "last"]


def test_the_newest_are_read_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 33)  # more than anybody reads, of damage
    log = AuditLog(path)
    for number in range(3):
        log.add(entry(str(number)))
    assert [each.action for each in log.newest(2)] == ["1", "2"]
    assert [each.action for each in log.newest(9)] == ["0", "1", "2"]
    assert log.newest(0) == log.newest(-1) == []


@pytest.mark.parametrize("said", ["NaN", "Infinity", "-Infinity", "1e300", "1" + "0" * 400, "-1"])
def test_a_moment_that_no_calendar_has_is_damage(tmp_path: Path, said: str) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    (tmp_path / "audit.jsonl").write_bytes(entry("odd").write().replace(b"1.5", said.encode()))
    log.add(entry("sound"))
    assert [each.action for each in log.newest(9)] == ["sound"]


def test_a_pipe_in_its_place_is_waited_for_by_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    os.mkfifo(tmp_path / "audit.jsonl")
    log.add(entry("lost"))
    assert "not a regular file" in caplog.text
    with pytest.raises(OSError, match="not a regular file"):
        log.newest(1)


def test_what_cannot_be_noted_stays_done(
    home: AggregatorHome, caplog: pytest.LogCaptureFixture
) -> None:
    home.audit_file.mkdir()  # nobody can write to it, not even root
    with Fleet.open(home.folder, actor="anna") as fleet, caplog.at_level(logging.WARNING):
        fleet.invite(2)
        assert len(fleet.unused_codes()) == 2
        assert "invite by anna (done) is not in" in caplog.text
        with pytest.raises(AggregatorError, match="cannot be read"):
            fleet.audit()


def test_a_full_disk_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    write = audit.os.write
    monkeypatch.setattr(audit.os, "write", lambda file, data: write(file, data[:9]))
    log.add(entry("cut"))
    assert "only 9 of" in caplog.text
    monkeypatch.undo()
    log.add(entry("whole"))
    assert [each.action for each in log.newest(9)] == ["whole"]


def _add(path: Path, actor: str) -> None:
    for number in range(200):
        AuditLog(path).add(entry(str(number), actor))


def test_processes_interleave_whole_lines(tmp_path: Path) -> None:
    path, spawn = tmp_path / "audit.jsonl", multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_add, args=(path, name)) for name in ("a", "b")]
    for each in writers:
        each.start()
    for each in writers:
        each.join(120)
    found = AuditLog(path).newest(1000)
    for name in ("a", "b"):
        assert [each.action for each in found if each.actor == name] == [*map(str, range(200))]
    assert len(found) == 400


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 4321")

    monkeypatch.setattr(audit.getpass, "getuser", nameless)
    assert system_user().startswith("user ")
