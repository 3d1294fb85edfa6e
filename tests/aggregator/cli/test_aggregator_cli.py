"""The operator's commands, as an operator meets them."""

from __future__ import annotations

import json
import sqlite3
import stat
import time
from pathlib import Path

import pytest

from aggregator.cli import main
from aggregator.home import AggregatorHome, serve_lock
from aggregator.store.reports import KEPT_ROUNDS
from aggregator.store.rows import DeviceRow, LastParticipation, RoundRow, StoredReport
from device_sdk.wire.seal.enrolment_message import parse_code
from tests.fakes.homes import command, make_home, open_store
from tests.fakes.outputs import error_of, output_of

COMMANDS = (
    "init", "invite", "serve", "status", "devices", "models", "model", "rollback", "revoke",
    "rotate", "release", "restored", "evaluations", "task", "audit",
)  # fmt: skip


def device(index: int) -> DeviceRow:
    name = bytes([index]) * 16
    return DeviceRow(name, name * 2, name, name * 2, 0, name[:8], int(time.time()), 1)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_teaches(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert "--home DIR" in shown and "\nexamples:\n  tessera-aggregator" in shown


def test_init_keeps_secrets_to_the_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "fleet"
    assert main(["init", "--home", str(home)]) == 0
    said = capsys.readouterr().out
    assert "catalogue" not in said
    check = f"tessera-aggregator check --home {home}\n"
    steps = (
        "task.toml",
        check,
        f"tessera-aggregator invite --home {home}\n",
        "tessera-aggregator serve",
    )
    assert sorted(steps, key=said.index) == list(steps)
    secret = [*(home / "keys").iterdir(), home / "aggregator.sqlite"]
    assert len(secret) == 6
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secret)
    assert stat.S_IMODE((home / "keys").stat().st_mode) == 0o700
    assert main(["init", "--home", str(home)]) == 1
    assert "holds an aggregator already" in capsys.readouterr().err


def test_init_writes_the_task_file_of_a_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "fleet"
    assert main(["init", "--home", str(home), "--method", "fedaverage"]) == 1
    assert "there are attention, fedavg, mutual, prototypes, scatter" in capsys.readouterr().err
    assert not home.exists(), "nothing was made"
    assert main(["init", "--home", str(home), "--method", "fedavg"]) == 0
    assert main(["task", "check", "--home", str(home)]) == 1
    assert f"task.artifact names {home / 'model'}, which does not exist" in capsys.readouterr().out


def test_commands_without_a_home_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = tmp_path / "none"
    for name in ("invite", "serve", "status", "devices", "release", "restored"):
        assert main([name, "--home", str(none)]) == 1
        assert f"tessera-aggregator init --home {none}" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["1", "2"])
def test_who_looks_at_a_home_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    """Of this version or another, which is refused in words."""
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    with sqlite3.connect(home.database) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("PRAGMA journal_mode = WAL")
    connection.close()

    def files() -> dict[str, bytes]:
        found = [each for each in home.folder.rglob("*") if each.is_file()]
        return {each.name: each.read_bytes() for each in found if each.suffix != ".lock"}

    before = files()
    for words in (["status"], ["devices"], ["task", "check"]):
        assert command(home, *words) == int(version != "1")
        said = capsys.readouterr().err
        assert version == "1" or "install the newer version that made it" in said
        assert files() == before
    assert before["task.toml"]


def test_a_fleet_without_devices_is_told_how_to_get_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--home", str(tmp_path / "fleet")]) == 0
    capsys.readouterr()
    assert main(["devices", "--home", str(tmp_path / "fleet")]) == 0
    assert "tessera-aggregator invite" in capsys.readouterr().out


def test_invite_prints_codes_and_replaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    store = home.open_store()
    with store.database.transaction():
        store.devices.add(device(1))
        store.devices.add(device(2))
    assert command(home, "invite", "--count", "3", "--expires", "2h") == 0
    codes = [parse_code(line) for line in capsys.readouterr().out.splitlines()]
    assert len({code.token_id for code in codes}) == 3
    row = store.tokens.find(codes[0].token_id)
    assert row is not None and abs(row.expires_unix_seconds - time.time() - 7200) < 600
    assert command(home, "invite", "--replaces", "01") == 0
    (first, second) = store.devices.all()
    assert first.revoked_unix_seconds is not None and second.revoked_unix_seconds is None
    assert store.facts.rotation_due
    assert command(home, "invite", "--count", "2", "--replaces", "02") == 1
    assert "no device named 'ff', or with an id that begins so" in error_of(
        capsys, home, "invite", "--replaces", "ff"
    )
    with pytest.raises(SystemExit):
        command(home, "invite", "--expires", "soon")
    store.database.close()


def test_invite_writes_codes_to_a_new_file_for_its_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    out = tmp_path / "codes"
    assert command(home, "invite", "--count", "2", "--out", str(out)) == 0
    assert capsys.readouterr().out == ""
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    before = out.read_text()
    codes = [parse_code(line) for line in before.splitlines()]
    store = home.open_store()
    assert [store.tokens.find(code.token_id) is not None for code in codes] == [True, True]

    # Neither written over, nor is a device revoked for codes that are nowhere.
    with store.database.transaction():
        store.devices.add(device(1))
    for unusable in (out, tmp_path / "nowhere" / "codes"):
        assert command(home, "invite", "--replaces", "01", "--out", str(unusable)) == 1
        assert str(unusable) in capsys.readouterr().err
    assert out.read_text() == before
    (kept,) = store.devices.all()
    assert kept.revoked_unix_seconds is None
    store.database.close()


def test_status_and_devices_show_what_matters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    store = home.open_store()
    with store.database.transaction():
        store.devices.add(device(1))
        seen = {bytes([1]) * 16: LastParticipation(int(time.time()) - 300, 16)}
        store.first.participations.note(seen)
        row = RoundRow(1, 1, 0, time.time() - 9, time.time() + 60, bytes(32), 2**64 - 1, 1, 20)
        store.first.rounds.add(row)
        store.first.rounds.hold(1, "update 4 is in quarantine")
        store.refusals.add({"bad-tag": 2})
    store.database.close()
    shown = output_of(capsys, home, "status")
    assert "round 1 is held: update 4 is in quarantine" in shown and "bad-tag 2" in shown
    status = json.loads(output_of(capsys, home, "status", "--json"))
    assert status["rounds"][0]["held"] and status["refusals"] == {"bad-tag": 2}
    assert command(home, "devices") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("010101010101 ")
    (shown,) = json.loads(output_of(capsys, home, "devices", "--json"))
    assert shown["device_id"] == "01" * 16 and shown["tasks"][0]["option"] == "k=16"
    assert command(home, "release") == 0
    assert "no round is held" in error_of(capsys, home, "release")


def test_devices_has_a_line_for_each_task_that_a_device_is_meant_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    store = home.open_store()
    north = '[task]\nonly = {site = "north"}\n'
    one, two, gone, moved = (bytes([index]) * 16 for index in (1, 2, 3, 4))
    with store.database.transaction():
        store.tasks.change(1, name="clicks")
        number = store.tasks.add("air", "tasks/air.toml", north)
        store.tasks.change(number, served=north)
        for index in (1, 2, 3, 4):
            store.devices.add(device(index))
        store.devices.set_labels(one, {"site": "north"})
        store.devices.revoke(gone, 1)
        # One that took part before its label was changed is shown there all the same.
        store.task(number).participations.note({moved: LastParticipation(int(time.time()))})
    store.database.close()

    def lines(*arguments: str) -> list[tuple[str, str]]:
        assert command(home, "devices", *arguments) == 0
        heading, *rows = capsys.readouterr().out.splitlines()
        at = heading.index("task")
        return [(row[:2], row[at:].split()[0]) for row in rows]

    assert sorted(lines()) == [
        ("01", "air"), ("01", "clicks"), ("02", "clicks"), ("03", "-"), ("04", "air"),
        ("04", "clicks"),
    ]  # fmt: skip
    assert sorted(lines("--task", "air")) == [("01", "air"), ("04", "air")]
    assert lines("--task", "air", "--label", "site=north") == [("01", "air")]
    assert command(home, "devices", "--json") == 0
    shown = {each["device_id"]: each for each in json.loads(capsys.readouterr().out)}
    assert [each["task"] for each in shown[two.hex()]["tasks"]] == ["clicks"]
    assert shown[gone.hex()]["tasks"] == []
    assert "no task 'water'; it has clicks, air" in error_of(
        capsys, home, "devices", "--task", "water"
    )
    assert "are for the list" in error_of(capsys, home, "devices", "--json", "label", "01", "a=b")
    assert command(home, "devices", "label", "02", "--name", "hall-3") == 0
    assert capsys.readouterr().out == f"{two.hex()} is named hall-3 and has no labels\n"


def test_status_names_the_devices_on_which_rounds_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    store = home.open_store()
    last = KEPT_ROUNDS + 2
    failing = [(1, bytes([index]) * 16) for index in range(1, 12)]  # of a round long ago
    failing += [(number, bytes([9]) * 16) for number in range(2, last + 1)]
    with store.database.transaction():
        for index in range(1, 13):
            store.devices.add(device(index))
        # Nothing that looks like a number is written as another one.
        store.devices.set_name(bytes([9]) * 16, "1e3")
        for number, device_id in failing:
            why = ("failed", "not-finite", *(None,) * 6)
            store.first.reports.add([StoredReport(1, number, device_id, *why)])
        trained = ("trained", "", *(None,) * 6)
        store.first.reports.add([StoredReport(1, last, bytes([12]) * 16, *trained)])
    store.database.close()
    assert command(home, "status") == 0
    shown = capsys.readouterr().out.splitlines()
    heading, failed, good = shown[shown.index("") + 1 :]
    assert heading.split("  ")[0] == "told" and f"round {last}" in heading
    ids = ", ".join(f"{index:02x}" * 6 for index in range(1, 8))
    assert failed.split(maxsplit=4) == [
        "failed:", "not-finite", "1", str(KEPT_ROUNDS), f"1e3, {ids} and 3 more",
    ]  # fmt: skip
    assert good.split() == ["trained", "1", "1"]
    assert command(home, "status", "--json") == 0
    (why,) = json.loads(capsys.readouterr().out)["tasks"][0]["not_trained"]
    assert (why["outcome"], why["reason"], len(why["devices"])) == ("failed", "not-finite", 11)
    assert why["devices"][0] == {"device_id": "09" * 16, "name": "1e3"}


def test_status_counts_the_items_that_the_catalogue_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By each device's newest report that tells of items."""
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    store = home.open_store()
    unsaid = (None,) * 6
    told = [(1, 1, (6, 6)), (2, 1, (6, 5)), (3, 1, ()), (2, 2, (4, 0)), (2, 3, ())]
    with store.database.transaction():
        for index in range(1, 4):
            store.devices.add(device(index))
        store.first.reports.add(
            StoredReport(1, number, bytes([index]) * 16, "trained", "", *unsaid, *items)
            for number, index, items in told
        )
    assert store.first.reports.unknown_items() == (1, 2, 5, 10)
    store.database.close()
    assert command(home, "status") == 0
    said = "items        5 of 10 items unknown to the catalogue, on 1 of 2 devices"
    assert said in capsys.readouterr().out.splitlines()
    assert command(home, "status", "--json") == 0
    counted = json.loads(capsys.readouterr().out)["tasks"][0]["unknown_items"]
    assert counted == {"devices": 1, "told": 2, "unknown": 5, "recorded": 10}


def test_rotation_needs_the_root_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    assert "can renew it until" in output_of(capsys, home, "rotate", "keys")
    home.root_key.rename(tmp_path / "drawer")
    for what in ("keys", "root"):
        assert "bring the root key back" in error_of(capsys, home, "rotate", what)
    assert command(home, "rotate", "group") == 0
    store = home.open_store()
    assert store.facts.rotation_due
    assert len(store.secrets.descriptors()) == 2
    store.database.close()


def test_serve_says_what_is_wrong_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    (home.folder / "items.tsv").write_text("a\na\n")
    assert "row 1 repeats the item id of row 0" in error_of(capsys, home, "serve")
    home.task_file.write_text("[task]\n")
    assert "task.catalogue is missing" in error_of(capsys, home, "serve")


def generation_of(home: AggregatorHome) -> int:
    store = open_store(home)
    generation = store.facts.generation
    store.database.close()
    return generation


@pytest.mark.parametrize("seconds_since", [0, 5])
def test_a_restored_backup_begins_a_new_generation_even_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_since: int
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    before = generation_of(home)
    monkeypatch.setattr("time.time", lambda: float(before + seconds_since))
    assert command(home, "restored") == 0
    assert generation_of(home) == before + max(seconds_since, 1)


def test_no_generation_begins_under_a_running_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    before = generation_of(home)
    with serve_lock(home):
        assert command(home, "restored") == 1
    assert "serve is running" in capsys.readouterr().err
    assert generation_of(home) == before
    assert command(home, "restored") == 0


@pytest.mark.parametrize("option", ["--grace", "--descriptor-expires", "--delegation-expires"])
def test_rotate_group_refuses_what_it_could_not_heed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    assert f"{option} is for rotate keys and rotate root" in error_of(
        capsys, home, "rotate", "group", option, "3d"
    )
    store = open_store(home)
    assert not store.facts.rotation_due
    store.database.close()


def test_a_clock_behind_the_backup_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    before = generation_of(home)
    monkeypatch.setattr("time.time", lambda: float(before - 1))
    assert "clock is behind the backup's" in error_of(capsys, home, "restored")
