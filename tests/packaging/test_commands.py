"""Each command that the distribution installs starts, and explains itself."""

from __future__ import annotations

import importlib

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
        assert capsys.readouterr().out.startswith(f"usage: {program} {command}")
