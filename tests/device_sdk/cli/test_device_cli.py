"""`tessera-device`, run the way a user runs it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from device_sdk.cli import main
from device_sdk.cli.arguments import ProgressLine, read_file
from device_sdk.factorisation import ITEMS, USERS, packaged_artifact
from device_sdk.home.home import Home
from device_sdk.interactions import read_interactions
from device_sdk.trainer import Trainer
from tests.fakes.waiting import PATIENCE_SECONDS

BENCH = ["bench", "--items", "200", "--interactions", "150", "--max-k", "8", "--time-box", "2"]


@pytest.fixture
def views(tmp_path: Path) -> Path:
    path = tmp_path / "views.csv"
    lines = [f"user{n % 9},item{n * n % 23}" for n in range(120)]
    path.write_text("\n".join(["user,item", *lines]))
    return path


def test_bench_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BENCH, "--deadline", "20", "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["chosen"] == "8"
    assert {"cpu_model", "cores", "threads", "provider", "versions"} <= set(report["machine"])
    assert report["machine"]["provider"] == "NumPy"
    assert printed.err == ""


def test_bench_times_bprs_train_step_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BENCH, "--deadline", "20", "--loss", "bpr", "--providers", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["provider"] == "CPUExecutionProvider"


def test_bench_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BENCH, "--deadline", "20", "--slowdown", "2"]) == 0
    printed = capsys.readouterr().out
    assert "Chosen: k = 8." in printed
    assert "EMULATED" in printed
    assert "p90 ms" in printed and "of the limit" in printed


def test_bench_declines_when_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*BENCH, "--deadline", "1e-7", "--when-none-fits", "decline", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] is None


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["dance"],
        ["bench"],
        [*BENCH, "--deadline", "0"],
        [*BENCH, "--deadline", "nan"],
        [*BENCH, "--deadline", "soon"],
        [*BENCH, "--deadline", "1", "--slowdown", "0.5"],
        [*BENCH, "--deadline", "1", "--headroom", "1"],
        [*BENCH, "--deadline", "1", "--max-k", "0"],
        [*BENCH, "--deadline", "1", "--items", "1.5"],
        [*BENCH, "--deadline", "1", "--method", "matmul"],
        [*BENCH, "--artifact", "net"],
        ["train"],
        ["train", "--interactions", "x", "--k", "4", "--deadline", "1"],
        ["train", "--interactions", "x", "--seed", "-1"],
    ],
)
def test_wrong_usage_is_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(wrong)
    assert stopped.value.code == 2
    assert "usage: tessera-device" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["bench"], ["train"]])
def test_help_teaches(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    assert "examples:" in capsys.readouterr().out


def test_failures_are_1_and_say_why(
    tmp_path: Path, views: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert main(["bench", "--artifact", nowhere]) == 1
    assert "does not exist: is" in capsys.readouterr().err
    for odd, why in {
        "--samples 5": "--samples is of a round with --artifact",
        "--threads 2": "--threads is of the train step, which only --loss bpr takes",
    }.items():
        assert main([*BENCH, "--deadline", "1", *odd.split()]) == 1
        assert why in capsys.readouterr().err
    assert main(BENCH) == 1
    assert "--items needs --deadline too" in capsys.readouterr().err
    assert main(["bench", "--artifact", nowhere, "--users", "3"]) == 1
    assert "--users is of a choice of k, which goes with --items" in capsys.readouterr().err
    assert main([*BENCH, "--deadline", "1", "--interactions", "201"]) == 1
    assert "201 interactions of 1 user(s) with 200 items" in capsys.readouterr().err
    assert main(["train", "--interactions", nowhere]) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert main(["train", "--interactions", str(tmp_path)]) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert main(["train", "--interactions", str(views), "--user", "eve"]) == 1
    assert "'eve' is not among" in capsys.readouterr().err
    assert main(["train", "--interactions", str(views), "--out", f"{nowhere}/x"]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main(["train", "--interactions", str(views), "--out", str(tmp_path)]) == 1
    assert "--out:" in (said := capsys.readouterr().err) and "is a folder" in said
    assert main(["train", "--interactions", str(views), "--lr", "1e30"]) == 1
    assert "not finite" in capsys.readouterr().err


def test_a_pipe_that_nobody_writes_into_is_waited_for_aloud(
    tmp_path: Path, views: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "views.pipe"
    os.mkfifo(pipe)
    said = ""

    def write_once_asked() -> None:
        nonlocal said
        while "waiting until a program has written" not in said:
            time.sleep(0.001)
            said += capsys.readouterr().err
        pipe.write_bytes(views.read_bytes())

    writer = threading.Thread(target=write_once_asked, daemon=True)
    writer.start()
    arguments = argparse.Namespace(
        interactions=pipe, columns=None, separator="", encoding="", time_format=""
    )
    found = read_file(arguments, "--interactions", quiet_seconds=0.01)
    assert list(found.pairs()) == list(read_interactions(views).pairs())
    assert f"{pipe} is a pipe" in said


def test_train_saves_and_recommends(
    tmp_path: Path, views: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trained"
    command = ["train", "--interactions", str(views), "--k", "4", "--epochs", "12"]
    assert main([*command, "--out", str(out), "--recommend", "3", "--user", "user4"]) == 0
    printed = capsys.readouterr().out
    assert "epoch   12 of 12" in printed
    seen = {line.split(",")[1] for line in views.read_text().splitlines() if "user4," in line}
    rows = printed.split("for user user4:")[1].splitlines()
    recommended = [cell for line in rows for cell in line.split() if cell.startswith("item")][1:]
    assert len(recommended) == 3
    assert not seen & set(recommended)
    trainer = Trainer(packaged_artifact())
    trainer.restore(out)
    assert trainer.parameters[USERS].shape == (9, 4)
    assert trainer.parameters[ITEMS].shape[1] == 4
    assert trainer.step_count > 0


def test_the_same_seed_learns_the_same(
    tmp_path: Path, views: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        out = tmp_path / name
        command = ["train", "--interactions", str(views), "--epochs", "2", "--seed", seed]
        assert main([*command, "--out", str(out)]) == 0
        files.append(out.read_bytes())
    assert files[0] == files[1] != files[2]
    capsys.readouterr()


def test_train_measures_when_given_a_deadline(
    views: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--interactions", str(views), "--deadline", "1e-7", "--epochs", "1"]
    assert main(command) == 0
    assert "Even the smallest misses: k = 1" in capsys.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT to a child process")
def test_nothing_is_lost_on_ctrl_c(tmp_path: Path, views: Path) -> None:
    out = tmp_path / "trained"
    # Where the tests run in a shell's background, SIGINT is ignored, and children inherit that.
    heeded = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heeded}; import sys; from device_sdk.cli import main; sys.exit(main())"
    options = ["--interactions", str(views), "--epochs", "10000000", "--out", str(out)]
    child = subprocess.Popen(
        [sys.executable, "-c", program, "train", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while "epoch    1" not in child.stdout.readline():
            assert child.poll() is None
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        printed, errors = child.communicate(timeout=PATIENCE_SECONDS)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130
    assert "saved to" in printed
    assert "Traceback" not in errors
    trainer = Trainer(packaged_artifact())
    trainer.restore(out)
    assert trainer.step_count > 0


class Terminal:
    """A stream that takes itself for a terminal, or not."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.text = ""

    def isatty(self) -> bool:
        return self.live

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        return


def test_progress_is_for_terminals_only() -> None:
    silent, live = Terminal(False), Terminal(True)
    for stream in (silent, live):
        line = ProgressLine(stream)  # type: ignore[arg-type]
        line.show("long text")
        line.show("short")
        line.clear()
    assert silent.text == ""
    assert live.text == "\rlong text\rshort    \r     \r"


def test_trust_needs_a_home_and_a_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = str(tmp_path / "home")
    assert main(["trust", "CODE", "--home", home]) == 1
    assert "enrol first" in capsys.readouterr().err
    Home(tmp_path / "home", create=True).close()
    assert main(["trust", "CODE", "--home", home]) == 1
    assert "has not joined a fleet" in capsys.readouterr().err
