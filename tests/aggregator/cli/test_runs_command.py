"""``runs``: what ``simulate`` left in a folder, sound and damaged records beside each other."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aggregator.cli import main
from aggregator.operate.runs import DAMAGED, runs_in


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three real runs in runs/."""
    folder = tmp_path_factory.mktemp("played")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["simulate", "--example", "films"]) == 0
        command = ["simulate", "films/task.toml", "--data", "films/data.py:devices"]
        command += ["--devices", "20", "--rounds", "2", "--seeds", "2"]
        runs = ["--run", "base", "--run", "narrow", "scatter.columns=8", "dropout=0.25"]
        assert main([*command, *runs]) == 0
        early = ["evaluation.early_stopping=1", "evaluation.least_improvement=9", "rounds=5"]
        assert main([*command, "--run", "early", *early]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def folder(played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Those records, for the test alone."""
    (tmp_path / "runs").mkdir()
    for path in (played / "runs").glob("*.json"):
        (tmp_path / "runs" / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def listed(capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["runs", "list", "--json", *more]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_runs_are_listed_with_what_they_reached_and_by_what_they_differ(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "early", "narrow", "base"]
    assert re.search(r"stopped early +evaluation.early_stopping=1", lines[1])
    assert re.search(r"finished +scatter.columns=8 dropout=0.25$", lines[2])
    assert re.search(r"base +20\d\d-.* UTC +scatter +20 +2 +2 +hr10_all .*finished +-$", lines[3])
    by_name = {each["name"]: each for each in listed(capsys)}
    base = by_name["base"]
    record = json.loads((folder / "base.json").read_text())
    best = []
    for run in record["runs"]:
        held = [*run["rounds"], run["newest"]]
        values = {
            figure["value"]: each["version"]
            for each in reversed(held)
            for figure in each["figures"]
            if (figure["stage"], figure["metric"]) == ("global", "hr10_all")
            and figure["part"] in ("", None)
        }
        best.append(values[max(values)])
    assert base["best_versions"] == best
    assert base["seeds"] == [0, 1] and base["rounds"] == [2, 2] and base["fault"] == ""
    assert base["unix_seconds"] == record["began_unix_seconds"]
    assert by_name["narrow"]["changed"] == {"scatter.columns": 8, "dropout": 0.25}


def test_a_list_is_a_table_for_others_too(folder: Path, tmp_path: Path) -> None:
    assert main(["runs", "--csv", "all.csv"]) == 0
    with (tmp_path / "all.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [each["name"] for each in lines] == ["early", "narrow", "base"]
    assert json.loads(lines[1]["changed"]) == {"scatter.columns": 8, "dropout": 0.25}


def test_a_run_is_shown_with_the_settings_in_force(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "show", "narrow", "--csv", "narrow.csv"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("round") and "popular" in out
    assert re.search(r"^scatter.columns +8$", out, re.MULTILINE)
    assert re.search(
        r"^round.deadline_margin +2.0$", out, re.MULTILINE
    )  # which the file leaves out
    assert len(Path("narrow.csv").read_text().splitlines()) == 1 + 2 * 4
    assert main(["runs", "show", str(folder / "narrow.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["scatter.columns"] == 8
    assert [each["after"] for each in found["figures"]["hr10_all"]["1"]] == [0, 1, 2]


def test_runs_are_compared_with_the_settings_that_differ(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "compare", "base", "narrow"]) == 0
    out = capsys.readouterr().out
    table, differ = out.split("\n\n")
    assert [line.split()[0] for line in table.splitlines()] == ["run", "base", "narrow"]
    assert [line.split() for line in differ.splitlines()] == [
        ["what", "differs", "base", "narrow"],
        ["scatter.columns", "32", "8"],
        ["dropout", "0.0", "0.25"],
    ]
    assert main(["runs", "compare", "base", "narrow", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differ"] == {"scatter.columns": [32, 8], "dropout": [0.0, 0.25]}
    assert [each["name"] for each in found["runs"]] == ["base", "narrow"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["show", "bse"], "there is no run bse in runs, and no such file; there is base"),
        (["show"], "runs show needs one RUN"),
        (["show", "base", "narrow"], "runs show needs one RUN"),
        (["compare"], "runs compare needs RUNs"),
        (["list", "base"], "runs list takes no RUN"),
        (["--folder", "nowhere"], "nowhere cannot be listed: No such file or directory"),
        (["show", "half"], "runs/half.json is no record that can be read"),
        (["compare", "base", "half"], "runs/half.json is no record that can be read"),
        (["show", "base", "--picture", "base.nonsense"], "--picture base.nonsense"),
    ],
)
def test_what_cannot_be_shown_is_said(
    folder: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "half.json").write_bytes((folder / "base.json").read_bytes()[:500])
    assert main(["runs", *more]) == 1
    assert said in capsys.readouterr().err


def test_what_is_damaged_is_listed_with_the_reason_and_hides_nobody(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = (folder / "base.json").read_text()
    (folder / "empty.json").write_bytes(b"")
    (folder / "half.json").write_text(sound[: len(sound) // 2])
    (folder / "bytes.json").write_bytes(b"\xff\xfe{}")
    (folder / "foreign.json").write_text('{"name": "left-pad"}')
    (folder / "newer.json").write_text(sound.replace('"format_version": 1', '"format_version": 2'))
    (folder / "changed.json").write_text(sound.replace('"seed": 1', '"seed": "one"'))
    (folder / "less.json").write_text(sound.replace('"value"', '"values"', 1))
    (folder / "nowhere.json").symlink_to(folder / "absent.json")
    (folder / "folder.json").mkdir()
    (folder / "notes.txt").write_text("not of ours")
    os.mkfifo(folder / "pipe.json")
    with (folder / "huge.json").open("wb") as file:
        file.truncate(1 << 33)
    faults = {each["name"]: each["fault"] for each in listed(capsys) if each["state"] == DAMAGED}
    expected = {
        "empty": "is no record that can be read",
        "half": "is no record that can be read",
        "bytes": "is no record that can be read",
        "foreign": "is no record of tessera-aggregator simulate",
        "newer": "is of format version 2",
        "changed": "is not as simulate writes a record: runs[1].seed",
        "less": "is not as simulate writes a record: runs[0].newest.figures[0].value is missing",
        "nowhere": "cannot be read: No such file",
        "folder": "it is not a regular file",
        "pipe": "it is not a regular file",
        "huge": "expected at most",
    }
    assert faults.keys() == expected.keys()
    assert [name for name, said in expected.items() if said not in str(faults[name])] == []
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    assert {"base", "narrow", "early", *faults} <= {line.split(" ")[0] for line in out.splitlines()}
    assert "A damaged file is no run any more" in out


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_whatever_a_record_becomes_the_others_are_listed(folder: Path, data: st.DataObject) -> None:
    sound = (folder / "base.json").read_bytes()
    place = data.draw(st.integers(0, len(sound)))
    cut = data.draw(st.integers(0, 40))
    put = data.draw(st.binary(max_size=5) | st.sampled_from([b"null", b"NaN", b"1e999", b"[]"]))
    (folder / "hurt.json").write_bytes(sound[:place] + put + sound[place + cut :])
    found = {each.name: each for each in runs_in(folder)}
    assert {name for name, each in found.items() if each.state != DAMAGED} >= {"base", "narrow"}
    damaged = found["hurt"].state == DAMAGED
    assert bool(found["hurt"].fault) is damaged
    assert main(["runs"]) == 0
    for more in (["show", "hurt"], ["show", "hurt", "--json"], ["compare", "base", "hurt"]):
        assert main(["runs", *more, "--csv", "hurt.csv"]) == int(damaged)
