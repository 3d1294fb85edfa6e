"""Scatter aggregation's part: ML-100K's fleet of a device a user, and its defences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.data_folder import data_folder
from benchmarks.recommendation.given_splits import has_times, load_split
from benchmarks.recommendation.split import LeaveOneOut, hold_out_validation
from benchmarks.robust.attacks import ATTACKS
from benchmarks.robust.scatter.execute import execute
from benchmarks.robust.scatter.outcome import Outcome, OutcomeStore
from benchmarks.robust.suite import Option, SplitName, Suite, changed
from benchmarks.robust.table import (
    DEFAULT,
    UNPROTECTED,
    Found,
    change_table,
    promotion_table,
    single_table,
)
from benchmarks.robust.trial import Trial
from benchmarks.scatter.experiment import Experiment
from benchmarks.scatter.full_round import open_step
from benchmarks.scatter.presets import ROWS, preset
from device_sdk.methods.scatter.factor_step import FactorStep

RECOMMENDED = "guarded"
_DATA = "ml-100k"
# Of the validation items and their negatives: the same for every setting that is compared.
_VALIDATION_SEED = 12345

OPTIONS = (
    Option(UNPROTECTED, "no protection", lambda base: base),
    Option("clip", "norms up to 4 running medians", changed(clip_multiple=4.0)),
    Option(
        DEFAULT,
        "norms up to 4 running medians, rows up to 16 (a task's default)",
        changed(clip_multiple=4.0, row_multiple=16.0),
    ),
    Option("rows", "rows up to 6 running medians", changed(row_multiple=6.0)),
    Option(
        RECOMMENDED,
        "updates out of line by 3 left out, items' vectors up to 1.25 (recommended)",
        changed(outlier_multiple=3.0, item_multiple=1.25),
    ),
    Option(
        "trimmed",
        "rows up to 6, and a tenth trimmed at either end of every cell",
        changed(row_multiple=6.0, robust="trimmed", trim_share=0.1),
    ),
    Option(
        "median",
        "rows up to 6, and the median of those who touched a cell",
        changed(row_multiple=6.0, robust="median"),
    ),
)


class ScatterSuite(Suite[Experiment, Outcome]):
    """Loads the data and the train graph once, when the first run needs them.

    Args:
        root: the data folder; None for the default one.
        artifact: another factorisation artifact's folder.
    """

    options = OPTIONS
    attacks = ATTACKS
    devices = 943

    def __init__(self, root: Path | None, artifact: Path | None) -> None:
        self._root = root
        self._artifact = artifact
        self._splits: dict[SplitName, LeaveOneOut] = {}
        self._step: FactorStep | None = None

    def experiment(self, split: SplitName, seed: int, option: Option, rounds: int) -> Experiment:
        """See :func:`base_experiment`."""
        return base_experiment(split, seed, option, rounds)

    def store(self, folder: Path) -> OutcomeStore:
        """See :class:`Suite`."""
        return OutcomeStore(folder)

    def run(self, trial: Trial[Experiment], progress: Callable[[str], None]) -> Outcome:
        """See :class:`Suite`."""
        kind = trial.experiment.split
        if kind not in self._splits:
            self._splits[kind] = _load(self._root, kind)
        if self._step is None:
            self._step = open_step(self._artifact)
        return execute(trial, self._splits[kind], self._step, progress)

    def single_table(self, found: Found[Outcome]) -> str:
        """HR@10."""
        share = 1 / self.devices
        return single_table(found, share, lambda one: one.hit_ratio, "HR@10 of the other users")

    def tables(self, found: Found[Outcome], options: Sequence[str]) -> list[str]:
        """HR@10, and who sees the promoted item."""
        return [
            change_table(
                found, options, ATTACKS, lambda one: one.hit_ratio, "HR@10 of honest users"
            ),
            promotion_table(
                found, options, ATTACKS, lambda one: one.exposure, "promoted item in the top 10"
            ),
        ]


def base_experiment(split: SplitName, seed: int, option: Option, epochs: int) -> Experiment:
    """ML-100K's unequal fleet under ``option``; ``epochs`` 0 for the preset's."""
    (unequal,) = (row for row in ROWS if row.name == "unequal")
    found = unequal.change(preset(_DATA, split, seed))
    found = replace(found, settings=option.change(found.settings))
    return replace(found, epochs=epochs) if epochs else found


def _load(given: Path | None, kind: SplitName) -> LeaveOneOut:
    root = data_folder(given, f"{_DATA}/leave_one_out")
    whole = load_split(root, _DATA)
    if kind == "test":
        return whole
    rng = np.random.default_rng(_VALIDATION_SEED)
    return hold_out_validation(whole.train, whole.items, rng, latest=has_times(_DATA))
