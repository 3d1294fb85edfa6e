"""A short run of a cluster on each store: the long ones are `make chaos ARGS=--cluster`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.brokers.mosquitto import EXECUTABLE
from tests.faults.cluster_chaos import ClusterSettings, run_cluster
from tests.servers.postgres import MISSING, PROGRAMS


@pytest.mark.slow
@pytest.mark.parametrize(("store", "adds_up"), [("postgres", True), ("sqlite", False)])
def test_a_cluster_loses_nothing_and_counts_nothing_twice(
    store: str, adds_up: bool, tmp_path: Path
) -> None:
    if EXECUTABLE is None:
        pytest.skip("mosquitto is not installed (apt-get install mosquitto)")
    if store == "postgres" and PROGRAMS is None:
        pytest.skip(MISSING)
    if store == "postgres" and importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed (pip install 'tessera-edge[cluster]')")
    settings = ClusterSettings(
        seed=11,
        broker="mosquitto",
        seconds=4.0,
        least_faults=40,
        devices=8,
        store=store,
        workers=2,
        adds_up=adds_up,
    )
    result = run_cluster(settings, tmp_path)
    assert result.judgement.lost == result.judgement.twice == result.judgement.waiting == 0
    assert result.judgement.receipted.get("counted", 0) > 0
    assert result.faults.total() > 30
