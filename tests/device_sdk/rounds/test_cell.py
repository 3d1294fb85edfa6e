"""A device and its cell: cells that are told, split, away for a while, or gone for good."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_sdk.link.events import Message
from device_sdk.wire.seal.placement import Placement, shard_of
from tests.fakes.in_memory import Bench

NORTH, SOUTH = "north.fleet.example:8883", "south.fleet.example"
OPEN = 5
DAY = 86_400.0


class Cluster(Bench):
    """A bench whose aggregator has a cell for its device, and tells it so wherever else it is."""

    def __init__(self, folder: Path, cell: str = NORTH, seed: int = 0) -> None:
        super().__init__(folder, seed=seed)
        self.cell = cell
        self.aggregator.placement_of = self._placement
        self.silent: set[str] = set()
        """Cells where nobody takes what comes."""
        take = self.aggregator._take

        def take_where_somebody_is(message: Message) -> None:
            if self.here not in self.silent:
                take(message)

        self.aggregator._take = take_where_somebody_is  # type: ignore[method-assign]

    def _placement(self, device_id: bytes) -> Placement | None:
        here = self.participant.cell.here
        return None if here == self.cell else Placement(shard_of(device_id), self.cell)

    @property
    def here(self) -> str:
        return self.participant.cell.here

    @property
    def stored(self) -> str:
        membership = self.home.membership.load()
        return membership.grant.cell

    def is_served(self) -> bool:
        return self.connected and self.participant.sessions.is_settled

    def take_part(self) -> None:
        """A round of which this device's update is part."""
        seen = len(self.aggregator.seen.bodies)
        self.aggregator.open_round(deadline_seconds=3000)
        self.run(60)
        assert len(self.aggregator.seen.bodies) > seen
        assert self.home.rounds.outbox() == []


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "home")


def test_a_device_goes_to_the_cell_that_it_is_told(cluster: Cluster) -> None:
    cluster.run(5)
    assert cluster.here == cluster.stored == NORTH and cluster.is_served()
    assert [cell for _, cell in cluster.moves] == [NORTH]
    cluster.take_part()
    cluster.run(DAY)
    assert len(cluster.moves) == 1
    cluster.restart()
    assert cluster.here == NORTH, "at once, without a look at the other broker"


def test_a_cell_that_is_split_is_left_at_the_next_session(cluster: Cluster) -> None:
    cluster.run(5)
    cluster.cell = SOUTH
    cluster.take_part()
    assert cluster.here == NORTH
    cluster.participant.sessions.reopen()
    cluster.run(60)
    assert cluster.here == cluster.stored == SOUTH
    cluster.take_part()


def test_an_update_that_waits_moves_with_the_device(cluster: Cluster) -> None:
    cluster.run(5)
    cluster.aggregator.knobs.receipts = False
    cluster.aggregator.open_round(deadline_seconds=30_000)
    cluster.run(20)
    assert len(cluster.home.rounds.outbox()) == 1
    cluster.aggregator.knobs.receipts = True
    cluster.reach(NORTH, False)
    cluster.run(700)
    assert cluster.here == "" and cluster.home.rounds.outbox() == []


def test_a_cell_that_is_gone_is_forgotten_and_the_next_one_taken(cluster: Cluster) -> None:
    cluster.run(5)
    cluster.reach(NORTH, False)
    cluster.cell = ""
    cluster.run(299)
    assert cluster.here == NORTH
    cluster.run(302)
    assert cluster.here == cluster.stored == "" and cluster.is_served()
    cluster.take_part()
    cluster.cell = SOUTH
    cluster.participant.sessions.reopen()
    cluster.run(60)
    assert cluster.here == cluster.stored == SOUTH and cluster.is_served()


def test_a_cell_whose_broker_stands_and_where_nobody_answers_is_left_too(cluster: Cluster) -> None:
    cluster.run(5)
    cluster.silent.add(NORTH)
    cluster.cell = ""
    cluster.participant.sessions.reopen()
    cluster.run(700)
    assert cluster.here == cluster.stored == "" and cluster.is_served()


@pytest.mark.parametrize("seed", range(4))
def test_a_cell_that_tells_a_device_to_wait_is_not_left(tmp_path: Path, seed: int) -> None:
    cluster = Cluster(tmp_path / "home", seed=seed)
    cluster.run(5)
    opens, moves = len(cluster.sent(OPEN)), len(cluster.moves)
    cluster.tell_to_wait(550)
    cluster.run(549)
    assert len(cluster.sent(OPEN)) == opens and len(cluster.moves) == moves
    cluster.run(2)
    assert cluster.is_served() and len(cluster.moves) == moves
    # What is gone meanwhile is gone: that time counts again when the wait is over.
    cluster.tell_to_wait(550)
    cluster.run(1)
    cluster.silent.add(NORTH)
    cluster.run(550 + 299)
    assert len(cluster.moves) == moves
    cluster.run(302)
    assert cluster.here == "" and cluster.is_served()


def test_cells_that_disagree_move_a_device_less_and_less_often(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "home")

    def elsewhere(device_id: bytes) -> Placement:
        return Placement(shard_of(device_id), SOUTH if cluster.here == NORTH else NORTH)

    cluster.aggregator.placement_of = elsewhere
    cluster.run(60)
    assert 2 <= len(cluster.moves) <= 10
    cluster.run(DAY)
    assert len(cluster.moves) <= 10 + 8 + DAY / 360
    hours = [cluster.moves[-1 - each][0] - cluster.moves[-2 - each][0] for each in range(10)]
    assert sum(hours) > 10 * 900 and min(hours) >= 360
    # When they agree it is over, and the next move is one without a wait.
    cluster.aggregator.placement_of = cluster._placement
    cluster.cell = SOUTH
    cluster.run(2 * 3600)
    cluster.participant.sessions.reopen()
    cluster.run(3660)
    assert cluster.here == cluster.stored == SOUTH and cluster.is_served()
    cluster.run(3600)
    cluster.cell = NORTH
    cluster.participant.sessions.reopen()
    cluster.run(60)
    assert cluster.here == NORTH


def test_a_cell_that_stays_away_is_tried_again_and_again_and_costs_little(cluster: Cluster) -> None:
    cluster.run(5)
    cluster.reach(NORTH, False)
    cluster.run(1000)
    assert cluster.is_served()
    unserved = 0
    for _ in range(1440):
        cluster.run(60)
        unserved += not cluster.is_served()
    assert unserved < 0.1 * 1440
    assert len([cell for _, cell in cluster.moves if cell == NORTH]) > 20
    cluster.reach(NORTH, True)
    cluster.run(3700)
    assert cluster.here == cluster.stored == NORTH and cluster.is_served()


def test_a_device_without_a_network_is_in_its_cell_most_of_the_time(cluster: Cluster) -> None:
    cluster.run(5)
    cluster.reach(NORTH, False)
    cluster.reach("", False)
    at_home = 0
    for _ in range(1440):
        cluster.run(60)
        at_home += cluster.here == NORTH
    assert at_home > 0.8 * 1440
    assert cluster.stored == NORTH
    cluster.reach(NORTH, True)
    cluster.reach("", True)
    cluster.run(1300)
    assert cluster.here == cluster.stored == NORTH and cluster.is_served()


def test_a_device_without_a_cell_stays_where_it_enrolled(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "home", cell="")
    cluster.run(5)
    cluster.reach("", False)
    cluster.run(DAY)
    cluster.reach("", True)
    cluster.take_part()
    assert cluster.moves == []


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["north", "south", "other", "split", "restart", "lose"]),
        st.booleans(),
        st.floats(0, 5000),
    ),
    max_size=8,
)


@settings(max_examples=25, deadline=None)
@given(STEPS, st.integers(0, 2**32 - 1))
def test_whatever_comes_and_goes_a_device_ends_in_its_cell(
    steps: list[tuple[str, bool, float]], seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder) / "home", seed=seed)
        for what, value, seconds in steps:
            match what:
                case "north":
                    cluster.reach(NORTH, value)
                case "south":
                    cluster.reach(SOUTH, value)
                case "other":
                    cluster.reach("", value)
                case "split":
                    cluster.cell = NORTH if value else SOUTH
                case "restart":
                    cluster.restart()
                    cluster.set_connected(cluster.here not in cluster.away)
                case "lose":
                    cluster.aggregator.forget_sessions()
                    cluster.aggregator.publish_standing()
            cluster.run(seconds)
        # The cell alone is enough for who is there, the other broker alone for all.
        cluster.reach(cluster.cell, True)
        cluster.reach("", True)
        cluster.run(4000 + 2 * 3600)
        if cluster.here != cluster.cell:
            cluster.participant.sessions.reopen()
            cluster.run(1300)
        assert cluster.is_served() and cluster.here == cluster.stored == cluster.cell
        cluster.home.close()
