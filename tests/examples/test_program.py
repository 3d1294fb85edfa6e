"""How an example over a fleet reports its rounds, and how it ends."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from aggregator.demo.child import FleetError
from examples import air_quality, click_distillation, demo, local_story, rotated_digits
from examples.program import carried_out, option_parser


@pytest.mark.parametrize(
    ("ending", "said"),
    [(None, ""), (FleetError("no [broker]"), "some thing: no [broker]"), (KeyboardInterrupt(), "")],
)
def test_the_exit_status_says_whether_it_went_well(
    ending: BaseException | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(console: Console) -> None:
        if ending is not None:
            raise ending

    assert carried_out("some_thing", run) == (0 if ending is None else 1)
    assert said in capsys.readouterr().err


def test_a_programming_error_is_not_hidden() -> None:
    def run(console: Console) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        carried_out("some_thing", run)


def test_the_options_have_the_examples_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_DATA", "/data")
    options = option_parser("some_thing", None, rounds=9, holds="mnist/").parse_args([])
    assert (options.rounds, options.data, options.out) == (
        9,
        Path("/data"),
        Path("out/some_thing"),
    )


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (air_quality, "--stations"),
        (click_distillation, "TESSERA_DATA"),
        (demo, "--local"),
        (local_story, "MovieLens"),
        (rotated_digits, "no global model"),
    ],
)
def test_help_teaches(example: ModuleType, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.main(["--help"])
    assert stopped.value.code == 0
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (air_quality, "PRSA_Data"),
        (click_distillation, "unpack MovieLens 1M"),
        (rotated_digits, "TESSERA_DATA"),
    ],
)
def test_missing_data_are_said(
    example: ModuleType, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert said in capsys.readouterr().err
