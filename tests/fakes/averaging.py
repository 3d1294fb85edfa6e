"""A home of federated averaging with a small linear model, and updates for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from aggregator.home import AggregatorHome
from device_sdk.wire.arrays.exchange import Update, encode_update
from device_sdk.wire.arrays.tensors import Codec
from tests.fakes.handmade import FEATURES, TARGETS, linear_artifact
from tests.fakes.homes import make_home

BROKER = "mqtt://127.0.0.1:1"


def averaged(rng: np.random.Generator) -> bytes:
    """An update of federated averaging, of as many samples as the device has."""
    tensors = {
        "w.linear.weight": rng.standard_normal((FEATURES, TARGETS), dtype=np.float32),
        "w.linear.bias": rng.standard_normal(TARGETS, dtype=np.float32),
        "b.mean": rng.standard_normal(FEATURES, dtype=np.float32),
    }
    told = {"loss": float(rng.standard_normal()), "samples": int(rng.integers(1, 400))}
    return encode_update(Update(1, tensors, told), Codec.INT8, rng)


def averaging_home(
    folder: Path,
    round_lines: str,
    more: str = "",
    store_url: str | None = None,
    url: str = BROKER,
) -> AggregatorHome:
    """``more``: of the table ``[fedavg]``, and tables beside it."""
    folder.mkdir(exist_ok=True)
    home = make_home(folder, url, round_lines, store_url=store_url)
    linear_artifact(folder / "linear")
    rest = home.task_file.read_text().split("[broker]")[1].split("[scatter]")[0]
    lines = f'[task]\nmethod = "fedavg"\nartifacts = ["{folder / "linear"}"]\n[broker]'
    home.task_file.write_text(f"{lines}{rest}[fedavg]\n{more}\n")
    return home
