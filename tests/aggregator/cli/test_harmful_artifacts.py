"""An artifact that would hang or crash devices gets no further than the operator's command."""

from __future__ import annotations

from pathlib import Path

import pytest

from aggregator.cli import main
from aggregator.home import AggregatorHome
from tests.fakes.bombs import Bomb, make_bomb
from tests.fakes.handmade import linear_artifact
from tests.fakes.homes import make_home


def run(home: AggregatorHome, *arguments: str) -> int:
    return main([*arguments[:1], "--home", str(home.folder), *arguments[1:]])


def task_file(folder: Path, artifact: Path) -> Path:
    file = folder / "air.toml"
    file.write_text(
        f'[task]\nmethod = "fedavg"\nartifacts = ["{artifact}"]\n'
        "[fedavg.training]\nepochs = 1\nlearning_rate = 0.1\n"
    )
    return file


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("loop", "(step-too-long): a step did not end within 1 s"),
        ("crash", "(crashed): "),
        ("late-loop", "(step-too-long): step 51 did not end within 1 s"),
        ("late-crash", "(crashed): step 51"),
        ("late-memory", "(out-of-memory): step 51"),
    ],
)
def test_check_and_add_refuse_it_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Bomb, words: str
) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    linear_artifact(tmp_path / "linear")
    file = task_file(tmp_path, make_bomb(kind, tmp_path / "linear", tmp_path / "bomb", after=50))
    capsys.readouterr()
    for action in (["check", str(file)], ["add", "air", "--from", str(file)]):
        assert run(home, "task", *action, "--step-seconds", "1") == 1
        said = "".join(capsys.readouterr())
        assert words in said and "would do harm on devices" in said
        assert str(tmp_path / "bomb") in said
    assert [row.name for row in home.open_store().tasks.all()] == [None]


def test_one_that_does_none_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    linear_artifact(tmp_path / "linear")
    assert run(home, "task", "check", str(task_file(tmp_path, tmp_path / "linear"))) == 0
    assert "right" in capsys.readouterr().out
