"""What ``task check`` says of a change, and what ``serve`` makes of it, key by key."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from aggregator.errors import TaskError
from aggregator.home import AggregatorHome
from aggregator.rounds.replacement import fits
from aggregator.serve.service import Service
from aggregator.task.check import NEXT_ROUND, OTHER_TASK, REPLACE, RESTART, changes
from aggregator.task.file import read_task
from aggregator.task.template import tables_of
from device_sdk.fields import default_of, hints_of, is_settings, texts_of
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import command, make_home
from tests.fakes.outputs import output_of
from tests.fakes.parts import enrol, parts_of

METHODS = ("scatter", "fedavg")
NAMED: dict[str, object] = {
    "task.name": "other",
    "task.cohort": "other",
    "task.artifact": "other",
    "task.catalogue": "more.tsv",
    "task.only": {"site": "north"},
    "broker.proxy": "http://proxy.example:3128",
    "broker.user": "somebody",
    "broker.url": "mqtt://elsewhere",
    "broker.prefix": "elsewhere",
    "evaluation.metrics": ["ndcg10", "hr10_all"],
    "evaluation.best_by": "ndcg10",
    "evaluation.control": 0.5,
    "scatter.outlier_multiple": 3.0,
    "scatter.item_multiple": 3.0,
    "fedavg.outlier_multiple": 3.0,
    "console.address": "127.0.0.1:8443",
    "console.hosts": ["fleet.example"],
    "console.trusted_proxy": "10.0.0.0/8",
    "cluster.store": "postgresql://store.example/fleet",
    "cluster.worker_store": "postgresql://workers@store.example/fleet",  # alone: with store
    "cluster.chunks": "https://chunks.example/fleet",  # alone: they go together
    "cluster.chunk_store": "chunks",
    "round.train_seconds": 7.0,
    "round.deadline_seconds": 70.0,
    "round.late": "staleness",  # of averaging
}
LEFT_OUT = {
    "task.method",  # with its artifacts: tests/aggregator/serve/test_replaced_models.py
    "task.artifacts",
    "task.companions",
    "task.folder",  # a change of where paths point to
    "task.warm_start",
    "fedavg.slices",  # of a ladder: tests/aggregator/simulate/test_ladders.py
    "broker.password_file",
    "broker.ca_file",
    "broker.certificate_file",
    "broker.key_file",
    "metrics.token_file",
    "console.certificate",  # with its key
    "console.key",
    "console.proxy_user_header",  # with a proxy that is trusted
}


def keys(path: str, kind: type[Any]) -> Iterator[tuple[str, object]]:
    """Every key of a table, with another value than its default."""
    for field in fields(kind):
        key, hint = f"{path}.{field.name}", hints_of(kind)[field.name]
        if is_settings(hint):
            yield from keys(key, hint)
        elif key in NAMED:
            yield key, NAMED[key]
        elif key not in LEFT_OUT:
            yield key, another(default_of(field), texts_of(hint))


def another(value: Any, options: tuple[Any, ...]) -> object:
    if isinstance(value, bool):
        return not value
    if options:
        return next(each for each in options if each != value)
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value + 0.5 if value > 1 else value / 2 if value else 0.5
    return "linear.bias"


def written(values: dict[str, Any], prefix: str = "") -> str:
    lines = [f"[{prefix[:-1]}]\n"] if prefix else []
    inner = []
    for name, value in values.items():
        if isinstance(value, dict):
            inner.append(written(value, f"{prefix}{name}."))
        else:
            lines.append(f"{name} = {json.dumps(value)}\n")
    return "".join([*lines, *inner])


def home_with(method: str, folder: Path) -> AggregatorHome:
    home = make_home(folder, "mqtt://127.0.0.1:1", "quorum = 1", "[evaluation]")
    lines = (home.folder / "items.tsv").read_text() + "item-20\n"
    (home.folder / "more.tsv").write_text(lines)
    for name in ("linear", "other"):
        linear_artifact(home.folder / name, "mae", "rmse" if name == "linear" else "mae")
    if method == "fedavg":
        values = tomllib.loads(home.task_file.read_text())
        values["task"] = {"method": "fedavg", "artifact": "linear"}
        del values["scatter"]
        home.task_file.write_text(written(values))
    return home


@pytest.mark.parametrize("method", METHODS)
def test_serve_makes_of_each_change_what_check_says(method: str, tmp_path: Path) -> None:
    home = home_with(method, tmp_path)
    parts = parts_of(home)
    board, row = parts.tasks, parts.store.tasks.find(1)
    before = tomllib.loads(home.task_file.read_text())
    tables = tables_of(method)
    every = [each for path, kind in tables.items() for each in keys(path, kind)]
    said: dict[str, str] = {}
    every.append(("task.only", NAMED["task.only"]))
    # A longer catalogue, which there is no way back from, last.
    for key, value in sorted(every, key=lambda each: each[0] == "task.catalogue"):
        values = json.loads(json.dumps(before))
        inside = values
        *names, last = key.split(".")
        for name in names:
            inside = inside.setdefault(name, {})
        inside[last] = value
        home.task_file.write_text(written(values))
        try:
            task = read_task(home.task_file)
        except TaskError as error:
            said[key] = str(error)  # it does not go together with the others
            continue
        found = changes(row.served or "", task, lambda other: fits(parts.store.first, other))
        takes = {each.takes for each in found}
        assert len(takes) == 1, (key, found)
        (said[key],) = takes
        board.look_at_files()
        now = parts.store.tasks.find(1)
        problem = now.problem or ""
        if said[key] == NEXT_ROUND:
            assert now.served == task.text and not problem, (key, problem)
        elif said[key] == RESTART:
            assert "when serve is restarted" in problem, key
            assert board.first.task.fleet == parts.settings, key
        else:
            assert said[key] in (REPLACE, OTHER_TASK), key
            assert "goes on with the settings it had" in problem, (key, problem)
            wanted = "task replace" if said[key] == REPLACE else f"{key} is 'other'; devices know"
            assert wanted in problem, (key, problem)
        home.task_file.write_text(written(before))
        board.look_at_files()
    parts.store.database.close()
    words = (NEXT_ROUND, RESTART, REPLACE, OTHER_TASK)
    odd = {key: word for key, word in said.items() if word not in words}
    assert odd.keys() <= {"task.catalogue", *NAMED}, odd
    assert sum(word == NEXT_ROUND for word in said.values()) > 30


def test_a_round_that_is_held_goes_on_with_the_settings_of_the_file(tmp_path: Path) -> None:
    """What made it fail is mended without a restart."""
    home = make_home(tmp_path, "mqtt://127.0.0.1:1", "quorum = 1\ndeadline_seconds = 900.0")
    enrol(home, [b"a" * 16])
    parts = parts_of(home)
    service = Service(parts)
    service._tick()
    text = home.task_file.read_text()
    codec = '[task]\nbroadcast_codec = "float32"'
    home.task_file.write_text(text.replace("[task]", codec))
    assert not parts.tasks.look_at_files(), "a round is open"
    parts.store.first.rounds.hold(1, "the method could not close it")
    parts.tasks.look_again()
    assert parts.tasks.look_at_files()
    rounds = parts.first.rounds
    assert parts.first.task.broadcast_codec == "float32"
    assert rounds.current is not None and rounds.current.held and rounds.outstanding == 1
    assert command(home, "release") == 0
    parts.tasks.look_again()
    assert rounds.current is not None and rounds.current.held is None
    parts.store.database.close()


def test_an_artifact_that_was_written_anew_in_its_folder_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = home_with("fedavg", tmp_path)
    enrol(home, [b"a" * 16])
    parts = parts_of(home)
    Service(parts)._tick()
    parts.store.database.close()
    assert "as it is served" in output_of(capsys, home, "task", "check")
    shutil.rmtree(home.folder / "linear")
    linear_artifact(home.folder / "linear", "mae")
    assert f"task.artifacts  {REPLACE}" in output_of(capsys, home, "task", "check")


def test_another_method_is_a_replacement_with_all_that_is_its_own(tmp_path: Path) -> None:
    home = home_with("scatter", tmp_path)
    served = home.task_file.read_text()
    values = tomllib.loads(served)
    values["task"] = {"method": "fedavg", "artifact": "linear"}
    values["fedavg"] = {"clip_multiple": 2.0}
    values["round"]["quorum"] = 2
    del values["scatter"]
    home.task_file.write_text(written(values))
    found = changes(served, read_task(home.task_file), lambda task: True)
    assert {each.key: each.takes for each in found} == {
        **dict.fromkeys(("task.method", "task.artifacts", "task.catalogue"), REPLACE),
        **dict.fromkeys(("scatter.columns", "fedavg.clip_multiple"), REPLACE),
        "scatter.least_squares.most_columns": REPLACE,
        "round.quorum": NEXT_ROUND,
    }


def test_a_name_that_is_said_or_left_out_is_no_change(tmp_path: Path) -> None:
    home = home_with("scatter", tmp_path)
    path = home.task_files / "air.toml"
    path.parent.mkdir()
    text = home.task_file.read_text().partition("[broker]")[0].replace("items.tsv", "../items.tsv")
    said = text.replace("[task]", '[task]\nname = "air"\ncohort = "all"')
    fleet = read_task(home.task_file).fleet
    for before, after in ((text, said), (said, text)):
        path.write_text(after)
        assert changes(before, read_task(path, fleet), lambda task: True) == []
