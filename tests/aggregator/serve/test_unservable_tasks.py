"""A task that cannot be served ends neither serve nor the others, and can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.serve.tasks import TaskParts
from aggregator.store import TaskStore
from aggregator.store.tasks import FIRST
from aggregator.task.file import Task
from aggregator.task.request import ReplaceRequest
from device_sdk.system.files import write_atomically
from device_sdk.wire.publish.receipts import Verdict
from tests.brokers.mosquitto import Mosquitto
from tests.fakes.client import ScriptedDevice
from tests.fakes.handmade import factor_artifact, linear_artifact
from tests.fakes.homes import Serving, command, invite, make_home, serving
from tests.fakes.outputs import error_of, output_of
from tests.fakes.tasks import add_task, task_text
from tests.fakes.waiting import wait_until

NOWHERE = "mqtt://127.0.0.1:1"
ROUND = "quorum = 1"


def cut(folder: Path) -> None:
    """Damage an artifact, as a copy that was cut."""
    for path in folder.iterdir():
        if path.name != "manifest.json":
            path.write_bytes(path.read_bytes()[:-5])


def with_companion(folder: Path) -> str:
    """An attention task that is for ``folder``, with whole artifacts."""
    linear_artifact(folder / "linear")
    linear_artifact(folder / "meta", "mae")
    return (
        f'[task]\nfolder = "{folder}"\nmethod = "attention"\nartifacts = ["linear"]\n'
        f'companions = ["meta"]\n[round]\n{ROUND}\n'
        "[attention.training]\naggregator_mixes = false\n"
    )


def ask(home: AggregatorHome, number: int, text: str) -> None:
    """What ``task replace`` asks for once it has found nothing wrong."""
    store = home.open_store()
    store.tasks.change(number, request=ReplaceRequest(text).write())
    store.database.close()


def names(served: Serving) -> list[str]:
    return [each.task.name for each in served.parts.tasks.served]


def test_a_damaged_companion_is_refused_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, NOWHERE, ROUND)
    add_task(home, "air", task_text(home, "air", ROUND))
    with serving(home) as served:
        wait_until(lambda: len(served.parts.tasks.served) == 2)
    file = tmp_path / "air.toml"
    file.write_text(with_companion(tmp_path))
    cut(tmp_path / "meta")
    for arguments in (
        ("check", str(file)),
        ("replace", "air", "--from", str(file)),
        ("add", "other", "--from", str(file)),
    ):
        capsys.readouterr()
        assert command(home, "task", *arguments) == 1
        said = capsys.readouterr()
        assert str(tmp_path / "meta") in said.out + said.err
    store = home.open_store()
    assert [(row.name, row.request) for row in store.tasks.all()] == [
        ("default", None),
        ("air", None),
    ]
    store.database.close()


@pytest.mark.parametrize("when", ["before it is looked at", "after it was looked at"])
def test_a_replacement_that_cannot_be_served_leaves_the_task_as_it_was(
    tmp_path: Path, when: str
) -> None:
    """Its artifact is damaged after the command that asked for it looked at it."""
    home = make_home(tmp_path, NOWHERE, ROUND)
    add_task(home, "air", task_text(home, "air", ROUND))
    text = with_companion(tmp_path)
    with serving(home) as served:
        board = served.parts.tasks
        wait_until(lambda: len(board.served) == 2)
        air, store = board.served[1], served.parts.store
        generation, label = air.rounds.generation, air.store.facts.label
        make: Callable[[TaskStore, Task], TaskParts] = board._make

        def cut_first(store: TaskStore, task: Task) -> TaskParts:
            cut(tmp_path / "meta")
            return make(store, task)

        if when.startswith("after"):
            board._make = cut_first
        else:
            cut(tmp_path / "meta")
        ask(home, air.store.number, text)
        wait_until(lambda: store.tasks.find(air.store.number).request is None)
        wait_until(lambda: store.tasks.find(air.store.number).problem is not None)
        row = store.tasks.find(air.store.number)
        assert "it was not replaced: the artifact" in (row.problem or "")
        assert names(served) == ["default", "air"]
        assert (air.rounds.generation, air.store.facts.label) == (generation, label)
        assert board.served[1] is air
    with serving(home) as served:
        assert names(served) == ["default", "air"]


def of_own_artifact(text: str) -> str:
    """The same task, which trains one; the loss that needs none takes none."""
    text = text.replace("[task]\n", '[task]\nartifact = "own"\n')
    return text.replace("[scatter]\n", '[scatter]\nloss = "bpr"\n')


def test_a_first_task_that_cannot_be_served_is_replaced_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, NOWHERE, ROUND)
    factor_artifact(home.folder / "own")
    text = home.task_file.read_text()
    home.task_file.write_text(of_own_artifact(text))
    add_task(home, "air", task_text(home, "air", ROUND))
    with serving(home) as served:
        wait_until(lambda: len(served.parts.tasks.served) == 2)
        generation = served.parts.first.rounds.generation
    cut(home.folder / "own")
    refused = r"task default cannot .*own.*task replace default"
    with pytest.raises(AggregatorError, match=refused), serving(home):
        pass
    # A request that is no better changes nothing.
    ask(home, 1, home.task_file.read_text().replace("columns = 8", "columns = 9"))
    with pytest.raises(AggregatorError, match=refused), serving(home):
        pass
    store = home.open_store()
    row = store.tasks.find(1)
    assert row.request is None and "it was not replaced" in (row.problem or "")
    store.database.close()
    new = home.folder / "new.toml"
    new.write_text(text)
    assert "as soon as serve runs" in output_of(
        capsys, home, "task", "replace", "default", "--from", str(new)
    )
    with serving(home) as served:
        assert names(served) == ["default", "air"]
        first = served.parts.first
        assert first.rounds.generation > generation
        row = first.store.fleet.tasks.find(1)
        assert (row.request, row.problem) == (None, None)
        assert "artifact" not in home.task_file.read_text()


def test_another_task_that_cannot_be_served_is_replaced_while_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, NOWHERE, ROUND)
    factor_artifact(home.folder / "own")
    text = task_text(home, "air", ROUND)
    add_task(home, "air", of_own_artifact(text))
    with serving(home) as served:
        wait_until(lambda: len(served.parts.tasks.served) == 2)
    assert command(home, "task", "pause", "air") == 0
    cut(home.folder / "own")
    file = tmp_path / "air.toml"
    file.write_text(text)
    with serving(home) as served:
        wait_until(lambda: served.parts.store.tasks.find(2).problem is not None)
        assert names(served) == ["default"]
        assert "task air is replaced\n" in output_of(
            capsys, home, "task", "replace", "air", "--from", str(file), "--now"
        )
        wait_until(lambda: names(served) == ["default", "air"])
        assert served.parts.tasks.served[1].rounds.paused
        assert served.parts.store.tasks.find(2).problem is None


def test_more_tasks_than_devices_can_be_told_are_not_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path, NOWHERE, ROUND)
    for name in ("air", "boats", "cars"):
        add_task(home, name, task_text(home, name, ROUND))
    # The bound is 256; this home has as many, and one more of a version that had none.
    for owner in ("aggregator.store.tasks", "device_sdk.wire.seal.announcement"):
        monkeypatch.setattr(f"{owner}.MOST_TASKS", 3)
    with serving(home) as served:
        rows = served.parts.store.tasks
        wait_until(lambda: rows.find(4).problem is not None)
        assert "3 tasks" in (rows.find(4).problem or "")
        assert names(served) == ["default", "air", "boats"]
        file = tmp_path / "dogs.toml"
        file.write_text(task_text(home, "dogs", ROUND))
        for arguments in (("check", str(file)), ("add", "dogs", "--from", str(file))):
            capsys.readouterr()
            assert command(home, "task", *arguments) == 1
            said = capsys.readouterr()
            assert "at most 3 tasks" in said.out + said.err and "retire" in said.out + said.err
        # Room for one more, and it is served.
        assert command(home, "task", "retire", "air") == 0
        wait_until(lambda: names(served) == ["default", "boats", "cars"])
        assert rows.find(4).problem is None


def test_a_waiting_replacement_does_not_overwrite_what_is_edited_meanwhile(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home = make_home(tmp_path, mosquitto.url, "quorum = 1")
    text = home.task_file.read_text()
    file = home.folder / "wide.toml"
    file.write_text(text.replace("columns = 8", "columns = 12"))
    edited = text.replace("quorum = 1\n", "quorum = 1\npause_seconds = 0.1\n")
    with serving(home) as served, ScriptedDevice(mosquitto.url, invite(home)[0]) as anna:
        anna.enrol().join()
        anna.await_round(1)
        assert command(home, "task", "replace", "default", "--from", str(file)) == 0
        home.task_file.write_text(edited)
        assert anna.take_part(1).verdict is Verdict.COUNTED
        anna.await_round(2)
        row = served.parts.store.tasks.find(FIRST)
        assert "was edited since task replace" in (row.problem or "") and row.request is None
        assert home.task_file.read_text() == edited
        assert served.parts.first.task.round.pause_seconds == 0.1


def test_a_task_whose_file_could_not_be_written_is_served_once_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, NOWHERE, ROUND)
    file = home.folder / "air.toml"
    file.write_text(task_text(home, "air", ROUND))
    home.task_files.write_text("in the way")
    with serving(home) as served:
        assert "cannot be written" in error_of(
            capsys, home, "task", "add", "air", "--from", str(file)
        )
        home.task_files.unlink()
        wait_until(lambda: names(served) == ["default", "air"])


def test_a_file_that_cannot_be_written_keeps_no_task_from_what_it_is_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor serve from starting, nor the other files from being written, once each: what is edited in
    them later stays."""
    home = make_home(tmp_path, NOWHERE, ROUND)
    add_task(home, "air", task_text(home, "air", ROUND))
    before = home.task_file.read_text()
    wide = before.replace("columns = 8", "columns = 12")
    air, stuck = home.task_files / "air.toml", [home.task_file]

    def write(path: Path, content: bytes) -> None:
        if path in stuck:
            raise OSError("read-only")
        write_atomically(path, content)

    monkeypatch.setattr("aggregator.task.request.write_atomically", write)
    with serving(home) as served:
        wait_until(lambda: names(served) == ["default", "air"])
        ask(home, FIRST, wide)
        wait_until(lambda: served.parts.first.task.text == wide)
        ask(home, 2, air.read_text() + "# replaced\n")
        wait_until(lambda: air.read_text().endswith("# replaced\n"))
        edited = air.read_text() + "# edited\n"
        air.write_text(edited)
    home.task_file.write_text(before + "# too early\n")
    with serving(home) as served:  # as each life does, of which a process has many
        assert served.parts.first.task.text == wide
        wait_until(lambda: served.parts.store.tasks.find(2).served == edited)
        assert air.read_text() == edited
        stuck.clear()
        wait_until(lambda: home.task_file.read_text() == wide)
        assert served.parts.first.task.text == wide


def test_a_replacement_with_other_tables_of_the_fleet_is_done_and_says_what_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path, NOWHERE, ROUND)
    with serving(home) as served:
        text = home.task_file.read_text() + "\n[admission]\nopens_share = 0.3\n"
        home.task_file.write_text(text)
        file = home.folder / "wide.toml"
        file.write_text(text.replace("columns = 8", "columns = 12"))
        said = output_of(capsys, home, "task", "replace", "default", "--from", str(file))
        assert "task default is replaced\n" in said and "when serve is restarted" in said
        assert served.parts.first.rounds.generation > 0
