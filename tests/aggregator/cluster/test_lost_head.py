"""A coordinator that stood by, and takes over when Ray is not the one any more that it joined."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aggregator.cluster.coordinator import posts
from aggregator.cluster.ray_runtime import RayRuntime
from aggregator.errors import AggregatorError
from aggregator.task.cluster import Cell, Cluster
from aggregator.task.file import read_task
from tests.fakes.homes import make_home


def test_a_head_that_was_started_anew_is_told_of_in_words(tmp_path: Path) -> None:
    exceptions = pytest.importorskip("ray.exceptions")

    def refuse(**named: Any) -> None:
        raise exceptions.AuthenticationError("RPC error: WrongClusterID")

    util = SimpleNamespace(list_named_actors=refuse)
    ray = SimpleNamespace(util=util, exceptions=exceptions, remote=lambda one: one)
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    task, store = read_task(home.task_file), home.open_store()
    with closing(store.database):
        where = posts(home, store, Cluster((Cell("", None, 1),)), task.fleet)
        with pytest.raises(AggregatorError, match="its head was restarted"):
            RayRuntime(where, SimpleNamespace(ray=ray, own=False))  # type: ignore[arg-type]
