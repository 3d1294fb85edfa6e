"""How an example over a fleet reports its rounds, and how it ends."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from examples.fleet.errors import FleetError
from examples.program import carried_out, how_often, option_parser, round_bar


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


def test_a_loss_is_not_called_a_gain() -> None:
    assert how_often(17.46) == "17.5 points more often"
    assert how_often(-1.42) == "1.4 points less often"


def test_a_programming_error_is_not_hidden() -> None:
    def run(console: Console) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        carried_out("some_thing", run)


def test_the_bar_says_what_it_waits_for_and_then_what_came() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with round_bar(console, 7, "devices enrol") as show:
        show(3, "loss 0.25")
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "round 3/7" in printed and "loss 0.25" in printed


def test_the_options_have_the_examples_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_DATA", "/data")
    options = option_parser("some_thing", None, rounds=9, holds="mnist/").parse_args([])
    assert (options.rounds, options.data, options.out) == (
        9,
        Path("/data"),
        Path("out/some_thing"),
    )
