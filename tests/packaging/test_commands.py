"""Each command that the distribution installs starts, and explains itself."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "program", "commands"),
    [
        (
            "device_sdk.cli",
            "tessera-device",
            ("bench", "train", "join", "run", "status", "recommend"),
        ),
        ("export.cli", "tessera-export", ("mf", "image", "click", "build", "inspect", "operators")),
        (
            "aggregator.cli",
            "tessera-aggregator",
            ("init", "invite", "serve", "status", "devices", "revoke", "rotate"),
        ),
    ],
)
def test_help_names_every_command_with_examples(
    module: str, program: str, commands: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(module).main
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: {program}")
    assert "examples:" in printed
    for command in commands:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: {program} {command}")
        assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [("export.cli", "torch", "export"), ("aggregator.cli", "rich", "aggregator")],
)
def test_a_command_of_an_extra_names_the_extra_that_is_not_installed(
    module: str, missing: str, extra: str
) -> None:
    without = f"import sys; sys.modules[{missing!r}] = None; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", without], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"pip install 'tessera-edge[{extra}]'" in done.stderr.splitlines()[-1]
