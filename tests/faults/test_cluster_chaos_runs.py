"""A short run of a cluster on each store, on machines of their own, and under Ray: the long ones
are `make chaos ARGS=--cluster`."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from tests.brokers.mosquitto import EXECUTABLE
from tests.faults.chaos import RunResult
from tests.faults.cluster_chaos import ClusterSettings, run_cluster
from tests.faults.ray_chaos import run_ray
from tests.servers.namespaces import missing
from tests.servers.postgres import MISSING, PROGRAMS

SETTINGS = ClusterSettings(
    seed=11, broker="mosquitto", seconds=4.0, least_faults=40, devices=8, workers=2
)


def require(store: str) -> None:
    if EXECUTABLE is None:
        pytest.skip("mosquitto is not installed (apt-get install mosquitto)")
    if store == "postgres" and PROGRAMS is None:
        pytest.skip(MISSING)
    if store == "postgres" and importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed (pip install 'tessera-edge[cluster]')")


def assert_kept(result: RunResult) -> None:
    assert result.judgement.lost == result.judgement.twice == result.judgement.waiting == 0
    assert result.judgement.receipted.get("counted", 0) > 0
    assert result.faults.total() > 30


@pytest.mark.slow
@pytest.mark.parametrize(("store", "adds_up"), [("postgres", True), ("sqlite", False)])
def test_a_cluster_loses_nothing_and_counts_nothing_twice(
    store: str, adds_up: bool, tmp_path: Path
) -> None:
    require(store)
    assert_kept(run_cluster(replace(SETTINGS, store=store, adds_up=adds_up), tmp_path))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_cells_of_machines_whose_networks_are_cut(tmp_path: Path) -> None:
    require("postgres")
    if reason := missing():
        pytest.skip(reason)
    settings = replace(SETTINGS, machines=True, cells=2, deadline_seconds=4.0)
    result = run_cluster(settings, tmp_path)
    assert_kept(result)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_cells_under_ray(tmp_path: Path) -> None:
    require("postgres")
    pytest.importorskip("ray")
    settings = replace(SETTINGS, ray=True, cells=2, machines=not missing(), deadline_seconds=4.0)
    assert_kept(run_ray(settings, tmp_path))
