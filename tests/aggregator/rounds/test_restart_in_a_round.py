"""What the operator did to a home while nobody served, in the middle of a round."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.rounds.machine import RoundClosed, RoundOpened
from aggregator.serve.service import Parts
from tests.fakes.homes import ITEMS, command, make_home
from tests.fakes.parts import enrol, parts_of

ROUND = "quorum = 1"
ANNA, BERT = bytes([1]) * 16, bytes([2]) * 16


@pytest.fixture
def home(tmp_path: Path) -> AggregatorHome:
    """One with two devices, whose first round is open."""
    made = make_home(tmp_path, "mqtt://127.0.0.1:1", ROUND)
    enrol(made, (ANNA, BERT))
    parts = started(made)
    assert isinstance(parts.first.rounds.tick(), RoundOpened)
    parts.store.database.close()
    return made


def started(home: AggregatorHome) -> Parts:
    return parts_of(home)


def gone(catalogue: Path) -> None:
    catalogue.unlink()


def moved(catalogue: Path) -> None:
    catalogue.write_text("item-99\tMoved\n" + catalogue.read_text())


def broken(catalogue: Path) -> None:
    catalogue.write_bytes(b"\xff\n")


@pytest.mark.parametrize("harm", [gone, moved, broken])
def test_a_round_goes_on_without_its_catalogues_file(
    home: AggregatorHome, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None]
) -> None:
    harm(home.folder / "items.tsv")
    parts = started(home)
    (told,) = [each for each in caplog.messages if "catalogue" in each]
    assert told.startswith("the catalogue stays as it was: the catalogue ")
    assert parts.first.rounds.current is not None and parts.first.aggregation.items == ITEMS
    # Between two rounds a start has nothing to go on with, and says so as it ends.
    with parts.store.database.transaction():
        parts.store.first.rounds.give_up(1, time.time())
    parts.store.database.close()
    with pytest.raises(AggregatorError, match=r"the catalogue .*(cannot be read|does not begin)"):
        started(home)


def test_a_start_waits_for_no_device_that_was_revoked_meanwhile(home: AggregatorHome) -> None:
    assert command(home, "revoke", ANNA.hex()) == 0
    parts = started(home)
    assert parts.first.rounds.outstanding == 1
    assert parts.first.rounds.tick() is None  # bert may still come
    parts.store.database.close()
    assert command(home, "revoke", BERT.hex()) == 0
    parts = started(home)
    closed = parts.first.rounds.tick()
    assert isinstance(closed, RoundClosed) and closed.next_version is None
    parts.store.database.close()


def test_a_round_that_loses_all_its_devices_while_serving_ends(home: AggregatorHome) -> None:
    parts = started(home)
    for device in (ANNA, BERT):
        assert parts.first.rounds.tick() is None
        parts.first.rounds.revoked(device)
    assert isinstance(parts.first.rounds.tick(), RoundClosed)
    parts.store.database.close()
