"""What cannot be served as a cluster is refused in words."""

from __future__ import annotations

import dataclasses
import socket
import sys
from pathlib import Path

import pytest

from aggregator.cluster.coordinator import posts
from aggregator.cluster.joined_ray import JoinedRay
from aggregator.cluster.serve import coordinate, require_servable
from aggregator.cluster.worker import Worker
from aggregator.errors import AggregatorError, TaskError
from aggregator.home import AggregatorHome
from aggregator.store.cluster import Deposed
from aggregator.store.rows import ShareRow
from aggregator.task.cluster import Cell, Cluster
from aggregator.task.file import read_task
from device_sdk.wire.seal.placement import SHARDS
from tests.fakes.clusters import world
from tests.fakes.homes import command, make_home
from tests.fakes.outputs import error_of, output_of


@pytest.fixture
def home(tmp_path: Path) -> AggregatorHome:
    return make_home(tmp_path, "mqtt://127.0.0.1:1")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("workers = 0", "cluster.workers is 0"),
        ("workers = 5000", "cluster.workers is 5000"),
        ("store = 'fleet.sqlite'", "cluster.store is no URL"),
        ("chunks = 'ftp://a'\nchunk_store = 'b'", "cluster.chunks is not usable"),
        ("cells = 3", "cluster.cells must be tables"),
        ("workers = 2\n[[cluster.cells]]\nname = 'a'", "cluster.workers is given, and each of"),
        ("[[cluster.cells]]\nworkers = 2", "name is missing"),
        ("[[cluster.cells]]\nname = 'A b'", "name is not usable"),
        ("[[cluster.cells]]\nname = 'a'\nbroker = 'http://a'", "broker is not usable"),
        ("[[cluster.cells]]\nname = 'a'\n[[cluster.cells]]\nname = 'a'", "as of a cell before"),
        (
            "[[cluster.cells]]\nname = 'a'\nbroker = 'mqtt://b'\n"
            "[[cluster.cells]]\nname = 'b'\nbroker = 'mqtt://b'",
            "cells #2.broker is mqtt://b:1883, as of a cell before it",
        ),
        (
            "[[cluster.cells]]\nname = 'a'\nbroker = 'mqtt://b:1'\n[[cluster.cells]]\nname = 'b'",
            "cells #2.broker is mqtt://b:1, as of a cell before it",
        ),
        ("[[cluster.cells]]\nname = 'a'\nworker = 2", "cluster.cells #1.worker is unknown"),
        ("nodes = 2", "cluster.nodes"),
    ],
)
def test_a_table_that_cannot_be(home: AggregatorHome, table: str, said: str) -> None:
    with home.task_file.open("a") as file:
        file.write(f"\n[cluster]\n{table}\n")
    with pytest.raises(TaskError, match=said.replace(".", r"\.")):
        read_task(home.task_file)


def test_a_cell_is_reached_at_its_name_or_where_the_table_says(home: AggregatorHome) -> None:
    text = home.task_file.read_text()
    (home.folder / "password").write_text("secret\n")
    text = text.replace("[broker]", "[broker]\nuser = 'tessera'\npassword_file = 'password'")
    home.task_file.write_text(
        f"{text}\n[[cluster.cells]]\nname = 'eu.example:2883'\n"
        "[[cluster.cells]]\nname = 'us.example'\n"
        "[[cluster.cells]]\nname = 'fi.example'\nbroker = 'mqtts://10.0.0.7'\n"
        "[[cluster.cells]]\nname = 'se.example'\nbroker = 'mqtt://other:word@10.0.0.8'\n"
    )
    fleet = read_task(home.task_file).fleet
    found = [cell.broker for cell in fleet.cluster.cells]
    assert list(map(str, found)) == [
        "mqtt://eu.example:2883", "mqtt://us.example:1", "mqtts://10.0.0.7:8883",
        "mqtt://10.0.0.8:1883",
    ]  # fmt: skip
    ways = [fleet.broker.way.at(url) for url in found if url is not None]
    assert [(way.url.user, way.password()) for way in ways] == [
        *[("tessera", "secret")] * 3, ("other", "word"),
    ]  # fmt: skip


def test_each_cell_has_shards_by_its_workers_and_hears_all() -> None:
    cluster = Cluster((Cell("a", None, 3), Cell("b", None, 1)))
    named = [cluster.cell_of(shard) for shard in range(SHARDS)]
    assert (named.count("a"), named.count("b")) == (3 * SHARDS // 4, SHARDS // 4)
    slots = cluster.slots()
    assert [(slot.number, slot.cell.name) for slot in slots] == [
        (0, "a"), (1, "a"), (2, "a"), (3, "b"),
    ]  # fmt: skip
    for name in "ab":
        heard = [shard for slot in slots if slot.cell.name == name for shard in slot.shards()]
        assert sorted(heard) == list(range(SHARDS))
    with pytest.raises(ValueError):
        cluster.cell_of(SHARDS)


def test_options_that_do_not_go_together(
    home: AggregatorHome, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, said in (
        (["--local"], "--local goes with --cluster ray"),
        (["--cluster", "ray", "--standby"], "--standby goes with --address"),
        (["--cluster", "ray", "--address", "127.0.0.1:1"], "store --move"),
    ):
        assert said in error_of(capsys, home, "serve", *options)
    assert "names no database" in error_of(capsys, home, "store", "--move")


def test_a_fleet_that_a_cluster_serves_is_served_by_nobody_else(
    home: AggregatorHome, capsys: pytest.CaptureFixture[str]
) -> None:
    store = home.open_store()
    term = store.lease.take("another machine", "1", 60.0)
    assert term == 1 and store.lease.take("a third", "1", 60.0) is None
    for each in ("serve", "restored"):
        assert "a cluster serves this fleet (another machine)" in error_of(capsys, home, each)
    assert "another machine, term 1" in output_of(capsys, home, "status")
    store.lease.release(term)
    assert store.lease.take("a third", "1", 60.0) == 2
    with pytest.raises(Deposed, match="a third"):
        store.lease.renew(term, 1.0)
    store.lease.release(2)
    store.first.shares.put(ShareRow(1, 0, 1, 1, 3, 3, b"sums"))
    store.database.close()
    assert "has sums of a cluster's workers" in error_of(capsys, home, "serve")


def test_a_worker_of_another_version_or_fleet_does_not_start(home: AggregatorHome) -> None:
    store = home.open_store()
    (post, _) = posts(home, store, Cluster(), read_task(home.task_file).fleet)
    store.database.close()
    with pytest.raises(AggregatorError, match=r"the coordinator is version 0\.0\.1, this worker"):
        Worker(dataclasses.replace(post, program="0.0.1"), world())
    with pytest.raises(AggregatorError, match="does not exist"):
        Worker(dataclasses.replace(post, store=home.folder / "other.sqlite"), world())


def test_a_standby_says_at_its_start_what_this_machine_lacks(home: AggregatorHome) -> None:
    task = read_task(home.task_file)
    require_servable(home, task, world().unix_clock)
    (key,) = home.keys.glob("hpke-*.key")
    key.rename(home.folder / "away")
    with pytest.raises(AggregatorError, match="could not take over: the keys of descriptor"):
        require_servable(home, task, world().unix_clock)
    (home.folder / "away").rename(key)
    assert task.catalogue is not None
    task.catalogue.unlink()
    with pytest.raises(AggregatorError, match=r"could not take over: .*A standby needs all of"):
        require_servable(home, task, world().unix_clock)


def test_what_is_seen_of_workers_without_a_coordinator(
    home: AggregatorHome, capsys: pytest.CaptureFixture[str]
) -> None:
    store = home.open_store()
    term = store.lease.take("a machine", "1", 60.0)
    assert term == 1
    for slot, connected in enumerate((True, False)):
        store.workers.start(slot, f"cell-{slot}", "all", "1")
        store.workers.beat(slot, connected=connected)
    store.lease.release(term)
    store.database.close()
    said = output_of(capsys, home, "status")
    assert "coordinator  none" in said
    assert "cell-0, all shards, start 1, connected" in said
    assert "cell-1, all shards, start 1, no connection to its broker" in said


def test_a_store_that_was_not_moved_yet_is_told_of(
    home: AggregatorHome, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(home, "store") == 0
    assert "note" not in capsys.readouterr().out
    with home.task_file.open("a") as file:
        file.write("\n[cluster]\nstore = 'postgresql://127.0.0.1:1/fleet'\n")
    said = output_of(capsys, home, "store")
    assert f"store        {home.database}" in said
    assert "note" in said and "store --move moves it there" in said


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AggregatorError, match=r"pip install 'tessera-edge\[aggregator,cluster\]'"):
        JoinedRay(None, 1, log_to_driver=False).join()


def test_where_ray_cannot_be_joined_nobody_coordinates(home: AggregatorHome) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        joined = JoinedRay(address, 1, log_to_driver=False)
        for standby in (False, True):
            with pytest.raises(AggregatorError, match=f"at {address} cannot be reached"):
                coordinate(
                    home,
                    read_task(home.task_file),
                    world(),
                    lambda posts: pytest.fail("workers were hired"),
                    lambda: False,
                    standby=standby,
                    join=joined.join,
                )
    store = home.open_store()
    assert store.lease.find() is None
    store.database.close()
    for said in ("auto", "10.0.0.5", "10.0.0.5:ray", ":6379", "10.0.0.5:0"):
        with pytest.raises(AggregatorError, match="is no address of Ray's head"):
            JoinedRay(said, 1, log_to_driver=False).join()
