"""Federated averaging's and teacher logits' parts: ML-100K's clicks, and their defences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from statistics import fmean

from benchmarks.datasets.click import Clicks, clicks_of
from benchmarks.datasets.movielens import read_100k
from benchmarks.distill.fleet import ArtifactShelf, click_fields
from benchmarks.harness import data_folder
from benchmarks.robust.attacks import ATTACKS, Attack
from benchmarks.robust.clicks.execute import execute
from benchmarks.robust.clicks.experiment import (
    ML_100K,
    Experiment,
    MethodName,
    Outcome,
    base_experiment,
)
from benchmarks.robust.clicks.fleet import TrainerShelf
from benchmarks.robust.suite import Option, SplitKind, Suite, Trial, changed
from benchmarks.robust.table import (
    DEFAULT,
    UNPROTECTED,
    Found,
    change_table,
    difference_table,
    promotion_table,
    single_table,
)

OPTIONS: Mapping[MethodName, tuple[Option, ...]] = {
    "fedavg": (
        Option(UNPROTECTED, "no protection", lambda base: base),
        Option("clip", "norms up to 3 running medians", changed(clip_multiple=3.0)),
        Option(
            DEFAULT,
            "norms up to 3 running medians, and so for claims of samples (a task's default)",
            changed(clip_multiple=3.0, samples_multiple=3.0),
        ),
        Option(
            "outliers",
            "updates larger than 3 running medians left out",
            changed(outlier_multiple=3.0),
        ),
        Option(
            "trimmed",
            "a fifth trimmed at either end of every coordinate",
            changed(robust="trimmed", trim_share=0.2),
        ),
        Option("median", "the median of every coordinate", changed(robust="median")),
    ),
    "logits": (
        Option(UNPROTECTED, "no bounds; every device has one voice a label", lambda base: base),
        Option(
            "bounds",
            "confidence of at least one half (recommended)",
            changed(least_confidence=0.5),
        ),
        Option(
            "samples", "no bounds; voices by claimed samples, to 10,000", changed(weights="samples")
        ),
        Option(
            "samples, bounds",
            "voices by claimed samples, confidence of at least one half",
            changed(weights="samples", least_confidence=0.5),
        ),
        Option(
            "samples, capped",
            "the same, and no claim counts for more than 1,000",
            changed(weights="samples", least_confidence=0.5, most_samples=1_000),
        ),
    ),
}
# A teacher that pushes an item no harder than others is an honest one.
_ATTACKS: Mapping[MethodName, tuple[Attack, ...]] = {
    "fedavg": ATTACKS,
    "logits": ("flip", "noise", "promotion"),
}


class ClickSuite(Suite[Experiment, Outcome]):
    """Loads the data once, when the first run needs them; exports artifacts into ``folder``.

    Args:
        method: which of the two.
        root: the data folder; None for the default one.
        folder: for artifacts.
    """

    outcome = Outcome

    def __init__(self, method: MethodName, root: Path | None, folder: Path) -> None:
        self.options = OPTIONS[method]
        self.attacks = _ATTACKS[method]
        self.devices = ML_100K.devices
        self._method = method
        self._root = root
        self._folder = folder
        self._loaded: tuple[Clicks, TrainerShelf] | None = None

    def experiment(self, split: SplitKind, seed: int, option: Option, rounds: int) -> Experiment:
        """ML-100K's clicks under ``option``."""
        base = base_experiment(self._method, split, seed, rounds)
        return replace(base, settings=option.change(base.settings))

    def run(self, trial: Trial[Experiment], progress: Callable[[str], None]) -> Outcome:
        """See :class:`Suite`."""
        if self._loaded is None:
            clicks = clicks_of(read_100k(data_folder(self._root, "ml-100k")), ML_100K)
            shelf = ArtifactShelf(self._folder, click_fields(clicks.sizes))
            self._loaded = (clicks, TrainerShelf(shelf))
        return execute(trial, *self._loaded, progress)

    def single_table(self, found: Found[Outcome]) -> str:
        """AUC."""
        share = 1 / self.devices
        return single_table(found, share, lambda one: one.auc, "AUC of the other devices")

    def difference_tables(self, found: Found[Outcome], before: Found[Outcome]) -> list[str]:
        """AUC, of the round that was chosen and of all rounds."""
        return [
            difference_table(found, before, lambda one: one.auc, "AUC of honest devices"),
            difference_table(
                found,
                before,
                lambda one: dict.fromkeys(one.auc, fmean(one.by_round or (nan,))),
                "validation AUC, mean of all rounds",
            ),
        ]

    def tables(self, found: Found[Outcome], options: Sequence[str]) -> list[str]:
        """AUC, cross-entropy, and what is predicted of the promoted item."""
        rows, attacks = options, self.attacks
        return [
            change_table(found, rows, attacks, lambda one: one.auc, "AUC of honest devices"),
            change_table(found, rows, attacks, lambda one: one.loss, "cross-entropy"),
            promotion_table(
                found, rows, attacks, lambda one: one.exposure, "promoted item in the top 10"
            ),
            promotion_table(
                found, rows, attacks, lambda one: one.click, "promoted item's predicted click"
            ),
        ]
