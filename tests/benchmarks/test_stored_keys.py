"""Every stored run is still found: its key is one that the suite's presets give."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from benchmarks.harness import RESULTS, StoredRuns

# By suite, the command lines that together ask for everything stored.
_ASKED = {
    "attention": ["--seeds 3"],
    "distill": ["--seeds 3"],
    "mutual": ["--seeds 3"],
    "peers": ["--flower-whole"],
    "privacy": ["--seeds 1"],
    "recommendation": [""],
    "robust": [
        "--seeds 3",
        "--split validation",
        "--epochs 40 --method scatter --seeds 3",
        "--one-device",
        "--one-device --split validation",
        "--one-device --epochs 40 --split validation --method scatter --seeds 2",
        "--one-device --epochs 10 --split validation --method scatter --seeds 2",
    ],
    "scatter": ["--seeds 10"],
}


@pytest.mark.parametrize("suite", _ASKED)
def test_stored_runs_are_asked_for(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set()
    load = StoredRuns.load

    def noted(stored: StoredRuns[Any, Any], run: Any) -> Any:
        asked.add(run.key)
        # These two ask for what depends on what they found.
        return load(stored, run) if suite in ("mutual", "recommendation") else None

    monkeypatch.setattr(StoredRuns, "load", noted)
    main = importlib.import_module(f"benchmarks.{suite}.__main__").main
    for arguments in _ASKED[suite]:
        assert main(["--table-only", *arguments.split()]) == 0
    lines = map(json.loads, (RESULTS / f"{suite}.jsonl").read_text().splitlines())
    lost = [line["run"] for line in lines if line["key"] not in asked]
    assert not lost, f"{len(lost)}, of which one is {lost[0]}"
