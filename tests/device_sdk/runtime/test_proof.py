"""A provider that is not the CPU's shows on the first batch that it trains as the CPU does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_sdk import BatchError, NonFiniteStep, Trainer
from device_sdk.runtime.providers import CPU
from tests.fakes.handmade import linear_artifact
from tests.fakes.odd_provider import ODD, offer_odd_provider


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """A trainer on a provider whose results go through a function."""
    linear_artifact(tmp_path)

    def make(spoil: Callable[[np.ndarray], None], **options: Any) -> Trainer:
        with monkeypatch.context() as patch:
            offer_odd_provider(patch, spoil)
            return Trainer(tmp_path, **options)

    return make


def _batch(rows: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(rows, 4)).astype(np.float32),
        "y": rng.normal(size=(rows, 3)).astype(np.float32),
    }


def _right(array: np.ndarray) -> None:
    """Nothing is spoilt."""


def _wrong(array: np.ndarray) -> None:
    if array.dtype == np.float32:
        array *= np.float32(1.01)


def _same_as_cpu(trainer: Trainer, tmp_path: Path) -> None:
    """The proof leaves no trace: the trainer goes on as one that never was anywhere else."""
    plain = Trainer(tmp_path, providers="cpu")
    for _ in range(3):
        assert trainer.step(_batch()) == plain.step(_batch())
    assert trainer.step_count == plain.step_count == 3
    for name, array in plain.state.items():
        assert np.array_equal(trainer.state[name], array)


def test_a_provider_that_is_right_stays(odd: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer = odd(_right, providers="odd")
    assert trainer.provider_report == ""
    _same_as_cpu(trainer, tmp_path)
    assert trainer.providers == (ODD.title, CPU.title)
    assert "is off by 0.0e+00" in trainer.provider_report


def test_a_wrong_provider_gives_way_to_the_cpu(odd: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer = odd(_wrong, providers="odd")
    _same_as_cpu(trainer, tmp_path)
    assert trainer.providers == (CPU.title,)
    assert "OddExecutionProvider is wrong: two steps' change of 'packed'" in trainer.provider_report


def test_a_failing_provider_gives_way_to_the_cpu(
    odd: Callable[..., Trainer], tmp_path: Path
) -> None:
    def fails(array: np.ndarray) -> None:
        raise RuntimeError("no kernel for this")

    trainer = odd(fails, providers="odd")
    _same_as_cpu(trainer, tmp_path)
    assert trainer.providers == (CPU.title,)
    assert "fails: onnxruntime failed" in trainer.provider_report
    assert "no kernel for this" in trainer.provider_report


def test_a_wrong_first_batch_proves_nothing(odd: Callable[..., Trainer]) -> None:
    trainer = odd(_wrong, providers="odd")
    with pytest.raises(BatchError):
        trainer.step({"x": _batch()["x"]})
    with pytest.raises(NonFiniteStep):
        trainer.step({**_batch(), "y": np.full((4, 3), np.nan, np.float32)})
    assert trainer.providers[0] == ODD.title
    trainer.step(_batch())
    assert trainer.providers == (CPU.title,)


class _Times:
    """A clock on which intervals last what a list says, over and over."""

    def __init__(self, *seconds: float) -> None:
        ticks = (moment for each in itertools.cycle(seconds) for moment in (0.0, each))
        self.now = lambda: next(ticks)


@pytest.mark.parametrize(("ours", "theirs"), [(0.5, 0.25), (0.25, 0.5)])
def test_auto_takes_the_faster(odd: Callable[..., Trainer], ours: float, theirs: float) -> None:
    trainer = odd(_right, providers="auto", clock=_Times(ours, theirs))
    trainer.step(_batch())
    assert trainer.providers[0] == (ODD.title if ours < theirs else CPU.title)
    assert f"a step takes {ours * 1e3:g} ms, the CPU's {theirs * 1e3:g} ms" in (
        trainer.provider_report
    )
