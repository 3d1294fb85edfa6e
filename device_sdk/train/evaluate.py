"""What a device finds out about a model on data that it holds back, within its share of time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.evaluation.metrics import (
    METRICS,
    Loss,
    Metric,
    NotFinite,
    PredictionMetric,
    RankMetric,
    Scale,
    Statistics,
    draw_negatives,
    full_rank,
    sampled_rank,
)
from device_sdk.evaluation.report import (
    Evaluation,
    EvaluationReport,
    EvaluationTerms,
    Stage,
    write_evaluations,
)
from device_sdk.system.clock import Clock, slowed
from device_sdk.system.printable import in_words

if TYPE_CHECKING:
    from device_sdk.artifact.manifest import Manifest
    from device_sdk.trainer import Trainer

_log = logging.getLogger("tessera.device")
Rows = NDArray[np.int64]
Floats = NDArray[np.float32]
Samples = Mapping[str, NDArray[Any]]
Measure = Callable[[Rows], Mapping[str, Statistics]]
"""Statistics by metric of the held-out rows given."""

_FIRST_ROWS, _MOST_ROWS = 16, 256


class Unmeasured(Exception):
    """Nothing, or not all, can be found out: a slug for the aggregator, and why, for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(slots=True)
class RoundEvaluation:
    """One round's evaluation: its budget, what was found, and what was not, and why.

    Attributes:
        terms: what the task asks for.
        seconds: the most that all of it may take; a device that is emulated to be slow takes
            ``slowdown`` times as long.
        stages: how many there are to be, each with an equal share of what is left.
        clock: times it.
        rng: draws the sample where time is too short for all.
        how_to_hold_back: what the owner of a device does that holds back nothing.
        detail: in words, why something is missing; for this device's owner.
        rounds: that the control arm's second model has trained.
    """

    terms: EvaluationTerms
    seconds: float
    stages: int
    clock: Clock
    rng: np.random.Generator
    slowdown: float = 1.0
    how_to_hold_back: str = "give LocalData a test= or holdout="
    detail: str = ""
    rounds: int = 0
    _reason: str = ""
    _results: list[Evaluation] = field(default_factory=list)
    _spent: float = 0.0
    _order: Rows | None = None

    @property
    def report(self) -> EvaluationReport:
        """What was found; of results that do not fit into a report the first ones."""
        return self._fitting()[0]

    @property
    def written(self) -> bytes:
        """The report's bytes."""
        return self._fitting()[1]

    def _fitting(self) -> tuple[EvaluationReport, bytes]:
        results, reason = list(self._results), self._reason
        while True:
            found = EvaluationReport(tuple(results), reason, self.rounds)
            try:
                return found, write_evaluations(found)
            except ValueError:
                results.pop()
                reason = reason or "too-large"

    def miss(self, why: Unmeasured) -> None:
        """Note what is missing. The first reason is the one that is sent."""
        self._reason = self._reason or why.reason
        self.detail = "; ".join(filter(None, (self.detail, str(why))))
        _log.info("evaluation: %s", why)

    def stage(
        self,
        stage: Stage,
        count: int,
        metrics: Sequence[str],
        measure: Measure,
        at_once: tuple[int, int] = (1, _MOST_ROWS),
    ) -> None:
        """Evaluate one stage on ``count`` held-out rows, or on as many as time allows.

        ``at_once``: the fewest and the most rows that ``measure`` takes at a time; where fewer are
        left of ``count``, they are left out. All stages go through the rows in the same order,
        drawn once. Raises nothing: what goes wrong is noted, and the stage left out.
        """
        if not metrics:
            return
        budget = (self.seconds - self._spent) / self.stages
        self.stages = max(1, self.stages - 1)
        start = self.clock.now()
        try:
            self._require(count, budget, at_once[0])
            totals = {name: np.zeros(METRICS[name].size) for name in metrics}
            self._measure(totals, count, measure, budget, at_once)
            self._results += [Evaluation(stage, name, total) for name, total in totals.items()]
        except Unmeasured as why:
            self.miss(why)
        except NotFinite as error:
            self.miss(Unmeasured("not-finite", f"{stage}: {error}"))
        except ValueError as error:  # BatchError too: a batch that does not fit the artifact
            self.miss(Unmeasured("bad-test-data", f"{stage}: the test data: {error}"))
        except Exception as error:
            # A round goes on without its evaluation, whatever stopped that.
            _log.warning("the evaluation failed", exc_info=True)
            self.miss(Unmeasured("failed", f"{stage}: {in_words(error)}"))
        self._spent += self.clock.now() - start

    def _require(self, count: int, budget: float, least: int) -> None:
        if count == 0:
            raise Unmeasured("no-test-data", f"no data is held back: {self.how_to_hold_back}")
        if count < self.terms.least_samples:
            raise Unmeasured(
                "too-few-samples",
                f"{count} samples are held back; the task takes {self.terms.least_samples} or more",
            )
        if count < least:
            raise Unmeasured(
                "too-few-samples",
                f"{count} samples are held back, and the artifact takes batches of {least}: hold "
                "back more, or export it with a batch axis of any length (dynamic=)",
            )
        if budget <= 0:
            raise Unmeasured("out-of-time", "no time was left to evaluate")

    def _measure(
        self,
        totals: Mapping[str, Statistics],
        count: int,
        measure: Measure,
        budget: float,
        at_once: tuple[int, int],
    ) -> None:
        """Add up what is measured, by the metrics' names."""
        if self._order is None or len(self._order) != count:
            self._order = self.rng.permutation(count)
        least, most = at_once
        done, size, spent = 0, min(max(_FIRST_ROWS, least), most), 0.0
        while done + least <= count and size >= least:
            rows = self._order[done : done + size]
            start = self.clock.now()
            for name, statistics in measure(rows).items():
                totals[name][...] += statistics
            spent += slowed(self.clock, start, self.slowdown)
            done += len(rows)
            # As many more as the pace so far leaves time for.
            left = math.inf if spent <= 0 else (budget - spent) * done / spent
            size = int(min(2 * size, most, max(0.0, left)))


# A model on arrays: the artifact says what of its outputs and entries each metric is about.


def _known(evaluation: RoundEvaluation, usable: Callable[[str], bool], otherwise: str) -> list[str]:
    found = []
    for name in evaluation.terms.metrics:
        if name not in METRICS:
            evaluation.miss(
                Unmeasured("unknown-metric", f"metric {name!r} is unknown to this version")
            )
        elif not usable(name):
            evaluation.miss(Unmeasured("undeclared-metric", f"metric {name!r}: {otherwise}"))
        else:
            found.append(name)
    return found


class ModelEvaluation:
    """Statistics of an artifact's model on ``test``, a row of each array for each sample.

    Of the task's metrics those are measured that the artifact declares.
    """

    def __init__(self, evaluation: RoundEvaluation, manifest: Manifest, test: Samples) -> None:
        declared = ", ".join(manifest.metrics) or "none"
        self._evaluation, self._test = evaluation, test
        self._least, self._fixed = manifest.rows(test.keys())
        self._metrics = _known(
            evaluation,
            lambda name: (
                name in manifest.metrics and isinstance(METRICS[name], (PredictionMetric, Loss))
            ),
            f"the artifact {manifest.name!r} does not declare it (it declares {declared}): export "
            "it with metrics=",
        )

    def miss(self, why: Unmeasured) -> None:
        """See :meth:`RoundEvaluation.miss`."""
        self._evaluation.miss(why)

    def stage(self, stage: Stage, trainer: Trainer, rounds: int = 0) -> None:
        """Evaluate the trainer's present model; a second one has trained so many ``rounds``."""
        self._evaluation.rounds = max(self._evaluation.rounds, rounds)

        def measure(rows: Rows) -> Mapping[str, Statistics]:
            batch = {name: array[rows] for name, array in self._test.items()}
            loss, outputs = trainer.evaluate(batch)
            return {
                name: _statistics(name, trainer, loss, outputs, batch) for name in self._metrics
            }

        count = len(next(iter(self._test.values()))) if self._test else 0
        most = self._least if self._fixed else max(_MOST_ROWS, self._least)
        self._evaluation.stage(stage, count, self._metrics, measure, (self._least, most))


def _statistics(
    name: str, trainer: Trainer, loss: float | None, outputs: Samples, batch: Samples
) -> Statistics:
    metric: Metric = METRICS[name]
    source = trainer.artifact.metrics[name]
    if isinstance(metric, Loss):
        if loss is None:
            raise ValueError("the artifact gives no loss in evaluation mode")
        return metric.measure(loss, len(next(iter(batch.values()))))
    if not isinstance(metric, PredictionMetric) or source.output is None or source.target is None:
        raise ValueError(f"the artifact declares {name!r} about nothing that it could be about")
    scale: Scale = "probabilities" if source.scale == "probabilities" else "logits"
    return metric.measure(outputs[source.output], batch[source.target], scale)


# A factorisation: where each user's held-out item ranks.


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutItem:
    """One user's item that was not trained on.

    Attributes:
        user: the user's place, a row of the users' vectors.
        item: its row in the item matrix.
        seen: the rows of the items that the user was trained on, int64.
    """

    user: int
    item: int
    seen: Rows


class RankEvaluation:
    """Ranks of held-out items, among the same drawn ones in every stage of a round."""

    def __init__(self, evaluation: RoundEvaluation, held: Sequence[HeldOutItem]) -> None:
        self._evaluation, self._held = evaluation, held
        evaluation.how_to_hold_back = (
            "of a user's items that the catalogue knows the latest is, where there are two or more"
        )
        self._metrics = _known(
            evaluation,
            lambda name: isinstance(METRICS[name], RankMetric),
            "a task that recommends is measured by hr10, ndcg10, hr10_all and ndcg10_all",
        )
        self._negatives: dict[int, Rows] = {}

    def stage(self, stage: Stage, users: Floats, items: NDArray[Any]) -> None:
        """Evaluate ``users`` float32 [users, K] with ``items`` [items, K].

        A user without a vector yet, new since the last round, is no user of this stage.
        """
        known = [each for each in self._held if each.user < len(users)]
        if users.shape[1] != items.shape[1]:
            known = []
        full = items.astype(np.float32, copy=False)

        def measure(rows: Rows) -> Mapping[str, Statistics]:
            chosen = [known[row] for row in rows.tolist()]
            ranks = {
                among_all: np.array(
                    [self._rank(each, users, full, among_all) for each in chosen], dtype=np.int64
                )
                for among_all in {_ranking(name).among_all for name in self._metrics}
            }
            return {
                name: _ranking(name).measure(ranks[_ranking(name).among_all])
                for name in self._metrics
            }

        if not known and self._held:
            why = "no user with a held-out item has a vector yet: this device has not trained"
            self._evaluation.miss(Unmeasured("no-model", f"{stage}: {why}"))
            return
        self._evaluation.stage(stage, len(known), self._metrics, measure)

    def _rank(self, held: HeldOutItem, users: Floats, items: Floats, among_all: bool) -> int:
        user = users[held.user]
        if not np.isfinite(user).all():
            raise NotFinite("a user's vector is not finite")
        if among_all:
            return full_rank(user, items, held.item, held.seen)
        if held.user not in self._negatives:
            touched = np.append(held.seen, held.item)
            self._negatives[held.user] = draw_negatives(len(items), touched, self._evaluation.rng)
        return sampled_rank(user, items, held.item, self._negatives[held.user])


def _ranking(name: str) -> RankMetric:
    metric = METRICS[name]
    if not isinstance(metric, RankMetric):
        raise ValueError(f"metric {name!r} is not of ranks")
    return metric
