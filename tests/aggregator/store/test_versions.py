"""Table ``versions``: what is kept of them, what is dropped, and how a person names one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.keys.folder import initialise
from aggregator.store import TaskStore
from aggregator.store.rows import VersionRow
from aggregator.store.versions import Ranking

LOSS = Ranking("loss", higher_is_better=False)


@pytest.fixture
def store(tmp_path: Path, store_url: str | None) -> TaskStore:
    home = AggregatorHome(tmp_path / "home", store_url)
    initialise(home, int(time.time()), os.urandom)
    return home.open_store().first


def add(store: TaskStore, version: int, *, model: bool = True) -> None:
    row = VersionRow(version, version, 1000.0 + version, 3, "", "", 0, {}, False, model, 0)
    arrays = {"w": np.full((2, 3), version, np.float32)} if model else None
    store.versions.add(row, arrays)


def kept(store: TaskStore) -> list[int]:
    return [row.version for row in store.versions.all() if row.kept]


def test_the_newest_the_best_and_the_pinned_stay(store: TaskStore) -> None:
    other = store.fleet.task(2)
    for version in range(8):
        add(store, version)
        add(other, version)
    for version, loss in enumerate((0.9, 0.2, 0.5, 0.4, 0.8)):
        store.versions.note_metrics(version, {"loss": loss, "auc": loss})
    store.versions.pin(0, pinned=True)
    store.versions.ask_for(4)
    assert store.versions.prune(2, 2, LOSS, before=8) == 2
    assert kept(store) == [7, 6, 4, 3, 1, 0]
    store.versions.ask_for(None)
    store.versions.pin(0, pinned=False)
    store.versions.prune(2, 1, Ranking("auc", higher_is_better=True), before=8)
    assert kept(store) == [7, 6, 0]
    # A home that was set back makes a number again: what is replaced takes nobody's place.
    assert store.versions.prune(1, 0, None, before=7) == 1 and kept(store) == [7, 6]
    store.versions.prune(1, 3, None, before=8)
    assert kept(store) == [7]
    # What is known of a version stays, and so does the other task's.
    assert [row.version for row in store.versions.all()] == list(range(7, -1, -1))
    assert store.versions.all()[-2].metrics == {"loss": 0.2, "auc": 0.2}
    assert kept(other) == list(range(7, -1, -1))
    assert other.versions.model(5)["w"].tolist() == [[5.0] * 3] * 2


def test_figures_are_added_and_replaced_by_name(store: TaskStore) -> None:
    add(store, 1)
    store.versions.note_metrics(1, {"loss": 0.5})
    store.versions.note_metrics(1, {"auc": 0.7, "loss": 0.4})
    store.versions.note_metrics(2, {"loss": 0.1})  # not known: nothing happens
    found = store.versions.find(1)
    assert found is not None and found.metrics == {"loss": 0.4, "auc": 0.7}
    assert store.versions.find(2) is None


def test_a_version_is_named_by_a_person(store: TaskStore) -> None:
    for version in range(5):
        add(store, version)
    store.versions.note_metrics(2, {"loss": 0.1})
    store.versions.note_metrics(3, {"loss": 0.1})
    store.versions.prune(3, 0, None, before=5)
    assert store.versions.named("latest", None).version == 4
    assert store.versions.named("best", LOSS).version == 2
    assert store.versions.named("3", None).version == 3
    for name in ("1", "9", "03"):
        with pytest.raises(AggregatorError, match=rf"no version '{name}', .*kept are 2, 3, 4 \("):
            store.versions.named(name, None)
    with pytest.raises(AggregatorError, match=r"kept are 2, 3, 4"):
        store.versions.model(1)
    with pytest.raises(AggregatorError, match="no metric says which version is best"):
        store.versions.named("best", None)
    with pytest.raises(AggregatorError, match="has a figure of 'auc' yet"):
        store.versions.named("best", Ranking("auc", higher_is_better=True))
    with pytest.raises(AggregatorError, match="has no version yet"):
        store.fleet.task(2).versions.named("latest", None)


def test_a_method_without_a_model_says_where_models_are(store: TaskStore) -> None:
    add(store, 1, model=False)
    with pytest.raises(AggregatorError, match=r"keeps no model .* Device.model\(\)"):
        store.versions.named("latest", None)
