"""The cluster's measurements, small; and the arithmetic of a fleet on paper."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from benchmarks.aggregator.broker import MOSQUITTO
from benchmarks.cluster import scale
from benchmarks.cluster.__main__ import stored_runs, tables
from benchmarks.cluster.connections import measure_connections
from benchmarks.cluster.experiment import TINY, ClusterRun, Setup, execute
from benchmarks.cluster.processes import between

needs_mosquitto = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")

UNIT = scale.Measured(
    worker_update=200.0,
    worker_open=900.0,
    store_update=50.0,
    store_open=100.0,
    broker_update=30.0,
    broker_open=80.0,
    coordinator_device=20.0,
    broker_connect=50.0,
    broker_connection=2_000.0,
    broker_download=400.0,
    row_bytes=500.0,
    registry_device=1_000.0,
    session=2_000.0,
    coordinator_memory=1_500.0,
    worker_base=80e6,
    coordinator_base=100e6,
    manifest=800.0,
    download=500_000.0,
)


@needs_mosquitto
def test_devices_over_a_few_connections_are_all_counted(tmp_path: Path) -> None:
    run = ClusterRun(Setup(0), 30, 2, shape=TINY, connections=3, window=10)
    found = execute(run, None)
    assert [each.round for each in found.rounds] == [2, 3]
    assert found.storms == []
    assert found.chunks > 0 and found.chunk_bytes > 0 and found.manifest_bytes > 0
    assert len(found.megabytes) == 2 + 4
    store = stored_runs(tmp_path)
    store.save(run, found)
    assert store.load(run) == found
    assert "one process, SQLite" in "".join(tables(store, [run], None))


@pytest.mark.exhaustive
@needs_mosquitto
@pytest.mark.slow
def test_devices_of_a_killed_worker_open_sessions_with_the_next(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    run = ClusterRun(Setup(2), 24, 1, shape=TINY, connections=2, window=8)
    found = execute(run, None)
    store = stored_runs(tmp_path)
    store.save(run, found)
    assert stored_runs(tmp_path).load(run) == found
    (storm,) = found.storms
    assert 0 < sum(storm.opens) <= 24
    assert "A worker is killed" in "".join(tables(store, [run], None))
    assert found.update_micros.keys() >= {"aggregator", "worker", "ray", "broker", "generator"}


@needs_mosquitto
def test_a_download_is_the_chunks_and_little_more_by_either_way() -> None:
    found = measure_connections(connections=20, chunks=4, chunk_bytes=10_000, downloads=5)
    for each in (found.broker_download_bytes, found.http_download_bytes):
        assert 40_000 < each < 44_000


def test_usage_is_what_was_added_by_kind() -> None:
    before = {1: ("worker", 5.0, 100.0, 0.0), 2: ("worker", 1.0, 0.0, 0.0)}
    after = {1: ("worker", 6.5, 300.0, 10.0), 3: ("worker", 0.5, 40.0, 20.0)}
    used = between(before, after)
    assert used.seconds == {"worker": 2.0}
    assert used.written == {"worker": 240.0}
    assert used.megabytes == {"worker": 30.0}


def test_a_plan_is_multiplication() -> None:
    assumed = scale.read_assumed()
    fleet = assumed["fleet"]
    found = scale.plan(1_000_000, UNIT, assumed)
    updates = 1e6 * fleet["share"] * fleet["rounds_a_day"] / 86_400
    opens = 1e6 * fleet["opens_a_day"] / 86_400
    assert found.updates_a_second == pytest.approx(updates)
    at_peak = 1e6 * fleet["share"] / fleet["arrive_seconds"]
    cores = (at_peak * 200e-6 + fleet["peak"] * opens * 900e-6) / fleet["busy"]
    assert found.worker_cores == pytest.approx(cores)
    assert found.coordinator_round_seconds == pytest.approx(1e6 * fleet["share"] * 20e-6)
    assert found.worker_memory == pytest.approx(80e6 + 2e9 / found.workers)
    over_http = 1e6 * fleet["share"] * fleet["rounds_a_day"] * 30 * 500_000
    assert found.http_egress_month == pytest.approx(over_http)
    assert found.dollars == pytest.approx(sum(found.costs.values()))


def test_there_are_as_many_workers_as_hold_all_sessions() -> None:
    assumed = scale.read_assumed()
    large = dataclasses.replace(UNIT, session=100_000.0)
    found = scale.plan(1_000_000, large, assumed)
    most = assumed["limits"]["worker_memory_gigabytes"] * 1e9
    assert found.workers == 13 and found.worker_memory <= most


def test_chunks_come_from_brokers_where_no_web_server_has_them() -> None:
    assumed = scale.read_assumed()
    fleet = {**assumed["fleet"], "chunks_over_http": False}
    over_http = scale.plan(1_000_000, UNIT, assumed)
    by_broker = scale.plan(1_000_000, UNIT, {**assumed, "fleet": fleet})
    assert by_broker.http_egress_month == 0
    moved = by_broker.broker_egress_month - over_http.broker_egress_month
    assert moved == pytest.approx(over_http.http_egress_month)
    assert by_broker.broker_cores > over_http.broker_cores


def test_the_smallest_limit_comes_first_and_is_where_the_plan_reaches_it() -> None:
    assumed = scale.read_assumed()
    limits = scale.limits_of(UNIT, assumed)
    assert [each.devices for each in limits] == sorted(each.devices for each in limits)
    registry = next(each for each in limits if "the registry" in each.what)
    memory = UNIT.coordinator_base + registry.devices * UNIT.coordinator_memory
    gigabytes = assumed["limits"]["coordinator_memory_gigabytes"]
    assert memory == pytest.approx(gigabytes * 1e9, rel=0.01)
    free = dataclasses.replace(UNIT, coordinator_device=0.0)
    assert math.inf in [each.devices for each in scale.limits_of(free, assumed)]


def test_the_page_is_what_the_stored_measurements_make_of_it() -> None:
    made = scale.page(scale.from_stored(scale.RESULTS), scale.read_assumed())
    assert scale.PAGE.read_text(encoding="utf-8") == made
