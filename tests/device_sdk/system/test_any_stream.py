"""Commands where the terminal, or whatever reads what they print, is not UTF-8."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.waiting import PATIENCE_SECONDS

VIEWS = "user,item\nzoé,坂本 龍一\nzoé,\u202etxt\n\u044f,\U0001f600\n"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
@pytest.mark.parametrize(
    ("program", "command", "status"),
    [
        ("device_sdk.cli", ["train", "--interactions", "{file}", "--epochs", "1"], 0),
        ("device_sdk.cli", ["train", "--interactions", "{file}", "--user", "é"], 1),
        ("device_sdk.cli", ["status", "--home", "{file}/été\udcff"], 1),
        ("aggregator.cli", ["status", "--home", "{file}/été\udcff"], 1),
        ("export.cli", ["{file}/été\udcff:f", "--out", "{file}/été"], 2),
    ],
)
def test_no_command_ends_in_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    encoding: str,
    program: str,
    command: list[str],
    status: int,
) -> None:
    path = tmp_path / "vues é.csv"
    path.write_text(VIEWS, encoding="utf-8")
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    main = importlib.import_module(program).main
    try:
        ended = main([each.format(file=path) for each in command])
    except SystemExit as said:
        ended = said.code
    for stream in streams.values():
        stream.flush()
    written = b"".join(stream.buffer.getvalue() for stream in streams.values())  # type: ignore[attr-defined]
    assert ended == status, written
    assert written.decode(encoding)


@pytest.mark.parametrize("said", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}])
def test_a_process_of_its_own_prints_escapes(tmp_path: Path, said: dict[str, str]) -> None:
    path = tmp_path / "views.csv"
    path.write_text(VIEWS, encoding="utf-8")
    command = ["train", "--interactions", str(path), "--epochs", "1", "--k", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "device_sdk.cli", *command],
        env={**os.environ, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", **said},
        capture_output=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"for user zo\\xe9:" in done.stdout
