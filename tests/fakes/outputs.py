"""What the operator's commands print."""

from __future__ import annotations

import pytest

from aggregator.home import AggregatorHome
from tests.fakes.homes import command


def output_of(capsys: pytest.CaptureFixture[str], home: AggregatorHome, *arguments: str) -> str:
    """What a command prints, which must succeed."""
    capsys.readouterr()
    assert command(home, *arguments) == 0
    return capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], home: AggregatorHome, *arguments: str) -> str:
    """Why a command fails, which must."""
    capsys.readouterr()
    assert command(home, *arguments) == 1
    return capsys.readouterr().err
