"""A fleet, and its console."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.home import AggregatorHome
from tests.fakes.consoles import InProcess, add_users
from tests.fakes.homes import make_home, serving


@pytest.fixture
def console_home(tmp_path: Path) -> AggregatorHome:
    """A home that was served, with a viewer and an operator."""
    made = make_home(tmp_path, "mqtt://127.0.0.1:1", "quorum = 1")
    with serving(made):
        pass
    add_users(made)
    return made


@pytest.fixture
def console(console_home: AggregatorHome) -> Iterator[InProcess]:
    """Its console, without a socket."""
    made = InProcess(console_home)
    yield made
    made.close()
