"""``tessera-aggregator task``, while ``serve`` runs and while it does not."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator.home import AggregatorHome
from aggregator.keys.folder import USUAL_LIVES, initialise
from aggregator.store.tasks import FIRST
from aggregator.task.check import taken_in
from device_sdk.artifact import MANIFEST_FILE
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.scatter.contract import encode_scatter_update
from device_sdk.wire.arrays.exchange import Update
from device_sdk.wire.publish.receipts import Verdict
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.homes import Serving, command, invite, make_home, serving
from tests.fakes.mutual_artifact import CLASSES, write_mutual_artifact
from tests.fakes.outputs import error_of, output_of
from tests.fakes.parts import parts_of
from tests.fakes.scatter_updates import of_triples
from tests.fakes.tasks import task_text
from tests.fakes.waiting import wait_until

NOWHERE = "mqtt://127.0.0.1:1"
ROUND = "quorum = 1"


def listed(home: AggregatorHome, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    capsys.readouterr()
    assert command(home, "task", "list", "--json") == 0
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)}


def names(served: Serving) -> list[str]:
    return [task.task.name for task in served.parts.tasks.served]


def test_a_task_file_is_checked_before_there_is_a_home(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = AggregatorHome(tmp_path / "nowhere")
    (tmp_path / "items.tsv").write_text("f1\tOne\nf2\tTwo\n")
    file = tmp_path / "films.toml"
    file.write_text(
        '[task]\ncatalogue = "items.tsv"\n[round]\nquorum = 1\n[scatter]\ncolumns = 4\n'
    )
    said = output_of(capsys, nowhere, "task", "check", str(file))
    assert "right" in said and "2 items" in said and "holds no fleet (--home)" in said
    file.write_text(file.read_text().replace("quorum", "quorm"))
    assert command(nowhere, "task", "check", str(file)) == 1
    assert "quorm" in capsys.readouterr().out
    assert command(nowhere, "task", "check", str(file), "--replace", "films") == 1
    assert "of a task that there is" in capsys.readouterr().out
    assert "tessera-aggregator init" in error_of(capsys, nowhere, "task", "check")
    assert not nowhere.folder.exists()


def test_a_task_comes_and_goes_while_serve_runs(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND)
    file = tmp_path / "air.toml"
    file.write_text(task_text(home, "air", ROUND))
    (code,) = invite(home)
    with serving(home) as served, ScriptedDevice(mosquitto.url, code, task="air") as anna:
        assert "task air is served" in output_of(
            capsys, home, "task", "add", "air", "--from", str(file)
        )
        anna.enrol().join()
        assert anna.take_part(1).verdict is Verdict.COUNTED
        assert (home.folder / "tasks" / "air.toml").is_file()
        # Paused, the open round ends as usual and no other opens.
        assert anna.await_round(2).version == 1
        ends = "opens no further round; round 2 ends as usual\n"
        assert output_of(capsys, home, "task", "pause", "air") == f"task air {ends}"
        said = output_of(capsys, home, "task", "pause", "air")
        assert said == f"task air is paused already: it {ends}"
        assert anna.take_part(2).verdict is Verdict.COUNTED
        air = served.parts.tasks.served[1]
        wait_until(lambda: air.aggregation.version == 2 and air.rounds.current is None)
        assert listed(home, capsys)["air"]["state"] == "paused"
        time.sleep(0.5)
        assert air.rounds.current is None
        assert output_of(capsys, home, "task", "resume", "air") == "task air opens rounds\n"
        said = output_of(capsys, home, "task", "resume", "air")
        assert said == "task air is not paused: it opens rounds\n"
        manifest = anna.await_round(3)
        assert manifest.version == 2
        # Retired, it is gone from the broker and the home; its name may be used again.
        generation = manifest.generation
        assert command(home, "task", "retire", "air") == 0
        assert names(served) == ["default"]
        store = served.parts.store
        for table in ("rounds", "updates", "verdicts", "checkpoints"):
            assert store.database.row(f"SELECT count(*) FROM {table} WHERE task != 1") == (0,)
        wait_until(lambda: not store.retained.superseded())
        (count,) = store.database.row("SELECT count(*) FROM publications WHERE task > 1") or ()
        assert count == 0
        assert {each.tasks for each in store.contents.all().values()} == {(1,)}
        receipt = anna.send_and_wait(manifest, anna.body())
        assert (receipt.verdict, receipt.reason) == (Verdict.REFUSED, "wrong-task")
        assert "air" not in listed(home, capsys)
        assert command(home, "task", "add", "air") == 0, "from the file that stayed"
        anna.wait_for(lambda: anna.manifest is not None and anna.manifest.round == 1)
        assert anna.manifest is not None and anna.manifest.generation > generation
        assert anna.send_and_wait(anna.manifest, anna.body()).verdict is Verdict.COUNTED


def test_a_task_is_replaced_and_its_devices_stay(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND)
    first, wider = tmp_path / "air.toml", tmp_path / "wider.toml"
    first.write_text(task_text(home, "air", ROUND))
    wider.write_text(task_text(home, "air", ROUND, width=12))
    slower = tmp_path / "slower.toml"
    slower.write_text(task_text(home, "air", ROUND) + '[scatter.optimizer]\nname = "plain"\n')
    (code,) = invite(home)
    with serving(home) as served, ScriptedDevice(mosquitto.url, code, task="air") as anna:
        assert command(home, "task", "add", "air", "--from", str(first)) == 0
        anna.enrol().join()
        assert anna.take_part(1).verdict is Verdict.COUNTED
        generation = anna.await_round(2).generation
        air = served.parts.tasks.served[1]
        before = dict(air.aggregation.state())["items"]
        # Nothing fits: said at once, and nothing has changed.
        capsys.readouterr()
        arguments = ("task", "replace", "air", "--from")
        assert command(home, *arguments, str(wider), "--warm-start") == 1
        said = capsys.readouterr().err
        assert "items [20, 8]" in said and "items [20, 12]" in said
        # Another optimizer of the server, which begins with the model that there is.
        assert "is replaced when round 2 has ended" in output_of(
            capsys, home, *arguments, str(slower), "--warm-start"
        )
        assert listed(home, capsys)["air"]["state"] == "waits to be replaced"
        assert anna.take_part(2).verdict is Verdict.COUNTED
        manifest = anna.await_round(3)
        assert manifest.generation > generation
        air = served.parts.tasks.served[1]
        assert manifest.version == air.aggregation.version == 3
        assert air.task.binding.settings.optimizer.name == "plain"
        after = dict(air.aggregation.state())["items"]
        assert not np.array_equal(before, after), "round 2 was part of the version before"
        _, broadcast = anna.fetch(manifest)
        found = broadcast.tensors["items"].astype(np.float32) * broadcast.tensors["strengths"]
        np.testing.assert_allclose(found, after, atol=1e-3)
        assert anna.send_and_wait(manifest, anna.body()).verdict is Verdict.COUNTED
        # Another width, at once: the open round is given up.
        assert anna.await_round(4).version == 4
        assert "task air is replaced" in output_of(capsys, home, *arguments, str(wider), "--now")
        manifest = anna.await_round(5)
        _, broadcast = anna.fetch(manifest)
        assert broadcast.tensors["items"].shape == (20, 12)
        receipt = anna.send_and_wait(manifest, anna.body(width=12))
        assert receipt.verdict is Verdict.COUNTED
        assert "columns = 12" in (home.folder / "tasks" / "air.toml").read_text()
    with serving(home) as served:
        assert served.parts.tasks.served[1].aggregation.version == 6


@pytest.mark.exhaustive
def test_what_all_rungs_have_in_common_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "digits.toml"
    file.write_text(
        f'[task]\nmethod = "fedavg"\nartifact = "{packaged_artifact().with_name("digits")}"\n'
        "[round]\nquorum = 1\n"
    )
    said = output_of(capsys, AggregatorHome(tmp_path / "nowhere"), "task", "check", str(file))
    assert said.count("rehearsed fedavg with") == said.count("the loss goes down") == 4
    assert said.count("leave such samples out") == 2  # of two kinds
    assert said.count("else as those before") == 3


def test_a_file_for_the_first_task_is_checked_and_replaces_it(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leaves the fleet's tables out, and the names that devices know the task by."""
    home = make_home(tmp_path, mosquitto.url, ROUND)
    text = home.task_file.read_text()
    text = text.replace("[task]", '[task]\nname = "films"')
    text = text.replace("[broker]", "[broker]\n# ours")
    home.task_file.write_text(text.replace("columns = 8", "columns = 8\nspread = 0.02"))
    plain = tmp_path / "plain.toml"
    plain.write_text(
        task_text(home, "air", f"{ROUND}\nmost_rounds = 20").replace("air.tsv", "items.tsv")
        + 'loss = "bpr"\n'
    )
    broker = tmp_path / "broker.toml"
    broker.write_text(plain.read_text() + '[broker]\nurl = "mqtt://elsewhere"\n')
    misspelt = tmp_path / "misspelt.toml"
    misspelt.write_text(plain.read_text().replace("quorum", "quorun"))
    wider = tmp_path / "wider.toml"
    wider.write_text(plain.read_text().replace("columns = 8", "columns = 12"))

    def checked(file: Path, *more: str) -> dict[str, Any]:
        (found,) = json.loads(output_of(capsys, home, "task", "check", str(file), *more, "--json"))
        assert isinstance(found, dict)
        return found

    def refused(file: Path, *more: str) -> str:
        capsys.readouterr()
        assert command(home, "task", "check", str(file), *more) == 1
        return capsys.readouterr().out

    (code,) = invite(home)
    with serving(home) as served, ScriptedDevice(mosquitto.url, code, task="films") as anna:
        anna.enrol().join()
        anna.await_round(1)
        same = home.folder / "same.toml"
        same.write_text(home.task_file.read_text())
        assert "as it is served" in output_of(
            capsys, home, "task", "check", str(same), "--replace", "films"
        )
        # With its tables a file can only be the first task's.
        for more in ((), ("--replace", "films")):
            assert "are the fleet's, and cannot be replaced" in refused(broker, *more)
        assert f"{misspelt}: round.quorun is unknown" in refused(misspelt, "--replace", "films")
        found = checked(plain, "--replace", "films")
        assert {each["key"]: each["takes"] for each in found["changes"]} == {
            "round.most_rounds": "takes effect between two rounds, by itself",
            "scatter.spread": "takes effect between two rounds, by itself",
            "scatter.loss": "needs tessera-aggregator task replace",
        }
        assert found["replacement"] == {
            "version": 1,
            "warm_start": "latest",
            "problem": None,
            "kept": {"items": [20, 8]},
            "anew": {},
            "dropped": {},
        }
        found = checked(wider, "--replace", "films")
        assert "nothing of it fits: it has items [20, 8]" in found["replacement"]["problem"]
        for asked in ("latest", "nosuch@best"):  # what task replace would refuse
            said = refused(wider, "--replace", "films", "--warm-start", asked)
            assert f"--warm-start {asked}" in said
        command(home, "task", "check", str(plain), "--replace", "films")
        said = capsys.readouterr().out
        assert "no device enrols again" in said and "kept     items [20, 8]" in said
        assert "two rounds, by itself (left out -> 20)" in said
        # What was checked is what replaces it.
        generation = anna.await_round(1).generation
        arguments = ("task", "replace", "films", "--from", str(plain), "--now", "--warm-start")
        assert command(home, *arguments) == 0
        anna.wait_for(lambda: anna.manifest is not None and anna.manifest.generation > generation)
        assert served.parts.first.aggregation.version == 1
        assert served.parts.first.task.binding.settings.loss == "bpr"
        body = encode_scatter_update(Update(2, of_triples(range(3), range(8))), 8, "float32")
        written = home.task_file.read_text()
        assert f'[broker]\n# ours\nurl = "{mosquitto.url}"' in written
        assert 'name = "films"' in written and anna.take_part(2, body).verdict is Verdict.COUNTED
        assert "as it is served" in output_of(capsys, home, "task", "check")


def test_settings_of_a_file_that_is_edited_are_taken_up_between_rounds(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, mosquitto.url, ROUND)
    (code,) = invite(home)
    text = home.task_file.read_text()
    with serving(home) as served, ScriptedDevice(mosquitto.url, code) as anna:
        anna.enrol().join()
        anna.await_round(1)
        home.task_file.write_text(text.replace("quorum = 1\n", "quorum = 1\nmost_rounds = 77\n"))
        said = output_of(capsys, home, "task", "check")
        assert "round.most_rounds  takes effect between two rounds" in said
        assert anna.take_part(1).verdict is Verdict.COUNTED
        manifest = anna.await_round(2)
        assert manifest.version == 1 and served.parts.first.task.round.most_rounds == 77
        assert served.parts.first.ingest.counted == 1
        # What needs a replacement is said, and the task goes on as it was.
        changed = text.replace("columns = 8", 'columns = 8\nloss = "bpr"').replace(
            "[round]", "[metrics]\nport = 9\n[round]"
        )
        changed = changed.replace("[task]", '[task]\nwarm_start = "a.safetensors"')
        home.task_file.write_text(changed)
        said = output_of(capsys, home, "task", "check")
        assert "task.warm_start  is read when the task's first version is made" in said
        assert "scatter.loss  needs tessera-aggregator task replace" in said
        assert 'note: of another loss than "bpr", and without effect: scatter.least_squares' in said
        assert "metrics.port  takes effect when serve is restarted" in said
        assert anna.take_part(2).verdict is Verdict.COUNTED
        anna.await_round(3)
        assert "goes on with the settings" in (listed(home, capsys)["default"]["problem"] or "")
        assert "goes on with the settings" in output_of(capsys, home, "status")
        home.task_file.write_text(text)
        assert anna.take_part(3).verdict is Verdict.COUNTED
        anna.await_round(4)
        assert listed(home, capsys)["default"]["problem"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "Air"), "is no name"),
        (("add", "default", "--from", "FILE"), "there is a task 'default' already"),
        (("add", "air"), "cannot be read"),
        (("pause",), "needs the NAME"),
        (("pause", "air"), "there is no task 'air'"),
        (("retire", "default"), "has the fleet's tables"),
        (("replace", "default"), "needs --from FILE"),
        (("list", "--now"), "--now is for task replace"),
        (("replace", "default", "--from", "FILE"), "never served"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_done_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    home = make_home(tmp_path, NOWHERE, ROUND)
    store = home.open_store()
    store.tasks.change(1, name="default")
    store.database.close()
    file = home.task_file
    given = [str(file) if each == "FILE" else each for each in arguments]
    assert said in error_of(capsys, home, "task", *given)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("[round]", "[broker]\nurl = 'mqtt://h'\n[round]"), "[broker] is for the whole fleet"),
        (("[round]", "[round]\nquorun = 1"), "quorun"),
        (("columns = 8", "columns = 0"), "scatter.columns"),
        (('folder = "', 'name = "other"\nfolder = "'), "the file is of the task 'air'"),
        (('"air.tsv"', '"gone.tsv"'), "gone.tsv"),
        (("[round]", "only = {site = 3}\n[round]"), "task.only.site"),
    ],
)
def test_a_file_that_is_wrong_is_not_added(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: tuple[str, str],
    said: str,
) -> None:
    home = make_home(tmp_path, NOWHERE, ROUND)
    store = home.open_store()
    store.tasks.change(1, name="default")
    store.database.close()
    file = tmp_path / "air.toml"
    text = task_text(home, "air", ROUND)
    assert change[0] in text
    file.write_text(text.replace(*change))
    assert said in error_of(capsys, home, "task", "add", "air", "--from", str(file))
    assert list(listed(home, capsys)) == ["default"]
    file.write_text(text)
    assert "task air, scatter: right" in output_of(capsys, home, "task", "check", str(file))


def test_artifacts_that_reports_call_alike_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    home = AggregatorHome(tmp_path / "home")
    initialise(home, int(time.time()), os.urandom, USUAL_LIVES)
    home.task_file.write_text(
        f'[task]\nmethod = "mutual"\nartifacts = ["../a", "../b"]\n[broker]\nurl = "{NOWHERE}"\n'
        f"[mutual.training]\nclasses = {CLASSES}\n"
    )
    write_mutual_artifact(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")

    def checked(*artifacts: str) -> str:
        for folder, name in zip("ab", artifacts, strict=True):
            file = tmp_path / folder / MANIFEST_FILE
            said = json.loads(file.read_text()) | {"name": name}
            file.write_text(json.dumps(said, sort_keys=True, separators=(",", ":")))
        return output_of(capsys, home, "task", "check")

    assert "agree" not in checked("clicks-32-embedding", "clicks-64-embedding")
    agree = "some agree: clicks-embedding-32, clicks-embedding-64"
    assert agree in checked("clicks-embedding-32", "clicks-embedding-64")
    parts = parts_of(home)
    parts.store.database.close()
    assert agree in caplog.text


def test_a_file_keeps_what_its_paths_are_relative_to(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    file = folder / "air.toml"
    file.write_text('# mine\n[task] # of air\ncatalogue = "a.tsv"\n[round]\nquorum = 1\n')
    text = taken_in(file)
    assert f'folder = "{folder.resolve()}"' in text and "# mine" in text
    again = tmp_path / "again.toml"
    again.write_text(text)
    assert taken_in(again) == text, "an absolute folder stays"


def test_a_file_whose_changes_wait_for_a_restart_is_not_called_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    store = home.open_store()
    store.tasks.change(FIRST, served=home.task_file.read_text())
    store.tasks.change(FIRST, problem="changes of [cluster] take effect when serve is restarted")
    store.database.close()
    said = output_of(capsys, home, "task", "check")
    assert "take effect when serve is restarted" in said and "as it is served" not in said
