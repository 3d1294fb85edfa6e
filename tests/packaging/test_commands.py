"""Each command that the distribution installs starts, and explains itself."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import device_sdk
from device_sdk.factorisation import packaged_artifact
from device_sdk.system.command_line import add_out


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
            (
                "init",
                "invite",
                "serve",
                "status",
                "devices",
                "models",
                "model",
                "rollback",
                "rotate",
            ),
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


MODULES = ("device_sdk.cli", "export.cli", "aggregator.cli")


@pytest.mark.parametrize("module", MODULES)
def test_each_command_tells_its_version(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(module).main
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"{main.name} {device_sdk.__version__}\n"


def test_a_mistyped_option_is_answered_with_its_commands_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = importlib.import_module("aggregator.cli").main
    with pytest.raises(SystemExit) as stopped:
        main(["invite", "--cuont", "2"])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("usage: tessera-aggregator invite") and "--count N" in told
    assert told.endswith("tessera-aggregator invite: error: unrecognized arguments: --cuont 2\n")


@pytest.mark.parametrize(
    ("module", "command", "words", "options"),
    [
        ("aggregator.cli", "devices", ["label", "3f2a", "a=b", "c="], ["--home", "H"]),
        ("aggregator.cli", "devices", ["label", "3f2a", "a=-1"], ["--name=hall", "--home", "H"]),
        ("aggregator.cli", "task", ["replace", "air"], ["--now", "--home", "H", "--from", "F"]),
        ("aggregator.cli", "task", ["list"], ["--json"]),
        ("aggregator.cli", "runs", ["compare", "a", "b"], ["--picture", "x.png", "--json"]),
        ("aggregator.cli", "simulate", ["task.toml"], ["--data", "a.py:f", "--seeds", "2"]),
        ("device_sdk.cli", "join", ["mqtt://b", "CODE"], ["--home", "H", "--timeout", "3"]),
        ("device_sdk.cli", "broker", ["set", "mqtt://b"], ["--home", "H", "--password-file", "F"]),
        ("aggregator.cli", "broker", ["move", "mqtt://b"], ["--grace", "7d", "--home", "H"]),
    ],
)
def test_options_stand_anywhere_among_the_words_of_a_command(
    module: str, command: str, words: list[str], options: list[str]
) -> None:
    main = importlib.import_module(module).main
    expected = main.parsed([command, *options, *words])
    for place in range(len(words) + 1):
        assert main.parsed([command, *words[:place], *options, *words[place:]]) == expected


def test_an_option_before_the_command_is_told_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module("aggregator.cli").main
    with pytest.raises(SystemExit):
        main(["--home", "fleet", "devices"])
    assert "behind the COMMAND: tessera-aggregator COMMAND --home" in capsys.readouterr().err


def test_the_version_is_the_installed_distributions() -> None:
    assert device_sdk.__version__ == importlib.metadata.version("tessera-edge")
    lazily = "import sys, device_sdk; sys.exit('importlib.metadata' in sys.modules)"
    subprocess.run([sys.executable, "-c", lazily], check=True)
    unknown = (
        "import importlib.metadata as metadata, sys\n"
        "def version(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        "import device_sdk\n"
        "sys.exit(device_sdk.__version__ != '0+unknown')"
    )
    subprocess.run([sys.executable, "-c", unknown], check=True)


def test_where_to_write_is_said_in_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    for module, command in (
        ("device_sdk.cli", "train"),
        ("aggregator.cli", "invite"),
        ("export.cli", "mf"),
        ("export.cli", "build"),
    ):
        with pytest.raises(SystemExit):
            importlib.import_module(module).main([command, "--help"])
        shown = capsys.readouterr().out
        assert re.search(r"-o (\w+), --out \1", shown)
        assert "--output" not in shown
    parser = argparse.ArgumentParser()
    add_out(parser, metavar="DIR", help="", required=True)
    for spelling in ("-o", "--out", "--output"):
        assert parser.parse_args([spelling, "here"]).out == Path("here")
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert "-o/--out is required" in capsys.readouterr().err


def without(library: str, module: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """A command where the library cannot be found."""
    program = (
        f"import sys; sys.modules[{library!r}] = None; from {module} import main; sys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("module", "library", "command", "extra"),
    [
        ("export.cli", "torch", "mf", "export"),
        ("export.cli", "onnx", "build", "export"),
        ("export.cli", "sympy", "image", "export"),
        ("aggregator.cli", "rich", "serve", "aggregator"),
    ],
)
def test_without_its_extra_a_command_says_what_to_install(
    module: str, library: str, command: str, extra: str
) -> None:
    install = f"pip install 'tessera-edge[{extra}]'"
    how = f"{library} is not installed, which a device does without: {install}"
    for argv in ((command,), (command, "--help")):
        done = without(library, module, *argv)
        assert done.returncode == 1
        assert done.stderr.endswith(f": {how}\n")
        assert len(done.stderr.splitlines()) == 1
    helped = without(library, module, "--help")
    assert helped.returncode == 0
    assert helped.stdout.endswith(f"{how}\n")
    assert f"    {command}" in helped.stdout
    version = without(library, module, "--version")
    assert version.returncode == 0
    assert version.stdout.split()[1] == device_sdk.__version__


def test_an_artifact_is_inspected_without_torch() -> None:
    done = without("torch", "export.cli", "inspect", str(packaged_artifact()))
    assert done.returncode == 0
    assert "ScatterND" in done.stdout


def test_the_library_without_its_extra_says_what_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None; import export; export.Adam(1e-3)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: export: torch is not installed, which a device does without: "
        "pip install 'tessera-edge[export]'"
    )


@pytest.mark.parametrize("more", [["--help"], ["devices", "--json", "--home", "fleet"]])
def test_a_reader_that_has_read_enough_ends_a_command_quietly(
    tmp_path: Path, more: list[str]
) -> None:
    command = [sys.executable, "-m", "aggregator.cli"]
    subprocess.run([*command, "init", "--home", "fleet"], cwd=tmp_path, check=True)
    read, write = os.pipe()
    os.close(read)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [*command, *more],
        cwd=tmp_path,
        env=buffered,
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
