"""The task file's table ``[evaluation]``: what devices find out, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from aggregator.evaluation import Rules, figure_name
from aggregator.methods.method import Binding
from aggregator.store.versions import Ranking
from aggregator.tables import TomlTable
from device_sdk.artifact import ArtifactError, read_manifest
from device_sdk.evaluation.metrics import METRICS, RankMetric
from device_sdk.evaluation.report import STAGES, EvaluationTerms, Stage
from device_sdk.fields import Within

_SHARE = Within(0, 1, above=True)
_MOST = Within(1, 1_000_000)


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """The table ``[evaluation]``. Without it, devices evaluate nothing.

    Attributes:
        metrics: which (default: all that the artifacts name; with scatter hr10_all, ndcg10_all,
            hr10 and ndcg10).
        every_rounds: in rounds whose number is a multiple of this.
        share: about this share of a round's devices evaluates.
        least_samples: devices that hold fewer back report none.
        least_devices: a figure of fewer is neither shown nor stored.
        sample_cap: one device's samples count for no more than so many times the median device's;
            0: no limit.
        time_share: of train_seconds, at most; beyond it devices go by a sample.
        best_by: the metric that says which version is best; personal.NAME: of devices' own models
            (default: the first of the metrics, of the model that devices receive if there is one).
        early_stopping: after so many rounds without improvement no round opens, and devices get the
            best version; 0: never.
        least_improvement: what counts as one, in best_by's own unit.
        control: about this share of the devices also trains a model alone, of which nothing is
            exchanged, so that evaluations can say what federation brings; for them a round takes
            twice the time. 0: none.
    """

    metrics: tuple[str, ...] = ()
    every_rounds: Annotated[int, _MOST] = 1
    share: Annotated[float, _SHARE] = 1.0
    least_samples: Annotated[int, _MOST] = 1
    least_devices: Annotated[int, Within(1, 2**31)] = 3
    sample_cap: Annotated[float, Within(1, or_zero=True)] = 10.0
    time_share: Annotated[float, _SHARE] = 0.25
    best_by: str | None = None
    early_stopping: Annotated[int, Within(0, 2**31)] = 0
    least_improvement: Annotated[float, Within(0)] = 0.0
    control: Annotated[float, Within(0, 1)] = 0.0

    @property
    def has_control(self) -> bool:
        """Whether some of the devices are to train a model alone."""
        return self.control > 0

    @property
    def terms(self) -> EvaluationTerms:
        """What devices are told."""
        return EvaluationTerms(
            self.metrics,
            self.every_rounds,
            self.share,
            self.least_samples,
            self.time_share,
            self.control,
        )

    @property
    def rules(self) -> Rules:
        """What becomes a figure."""
        return Rules(self.metrics, self.least_devices, self.least_samples, self.sample_cap)

    @property
    def ranking(self) -> Ranking:
        """By what versions are compared."""
        name = self.best_by or self.metrics[0]
        return Ranking(name, METRICS[named(name)[1]].higher_is_better)


def named(name: str) -> tuple[Stage, str]:
    """The stage and metric of a figure's name. Raises ValueError for no figure's name."""
    for stage in STAGES:
        for metric in METRICS:
            if name in (figure_name(stage, metric), f"{stage}.{metric}"):
                return stage, metric
    raise ValueError(f"no metric is called {name!r}; there are {', '.join(METRICS)}")


def metric_of(ranking: Ranking | None) -> str:
    """The metric that versions are compared by; empty where they are not."""
    return "" if ranking is None else named(ranking.metric)[1]


def read_evaluation(
    table: TomlTable, artifacts: Sequence[Path], binding: Binding[Any]
) -> EvaluationSettings:
    """The table, with its defaults filled in.

    Args:
        table: the table.
        artifacts: the folders of the task's artifacts.
        binding: the task's method. With items its devices rank those that they hold back; else the
            metrics are those that all of the artifacts name.

    Raises TaskError for a metric that does not exist, or that devices could not measure.
    """
    settings = table.read(EvaluationSettings)
    if settings.control and (why := binding.why_no_control(len(artifacts))):
        raise table.error(
            "control", f"is {settings.control}, and {binding.method_name} has no control arm: {why}"
        )
    for name in settings.metrics:
        if name not in METRICS:
            raise table.error(
                "metrics", f"names {name!r}, which is no metric; there are {', '.join(METRICS)}"
            )
    if binding.needs_catalogue:
        ranking = {name: each for name, each in METRICS.items() if isinstance(each, RankMetric)}
        found = usual = sorted(ranking, key=lambda name: not ranking[name].among_all)
        source = "a method that ranks items has"
    else:
        found = usual = _declared(table, artifacts)
        source = "the artifacts name"
    for name in settings.metrics:
        if name not in found:
            raise table.error("metrics", f"names {name!r}; {source} {', '.join(found)}")
    metrics = settings.metrics or tuple(usual)
    best_by = settings.best_by or f"{binding.stages[0]}.{metrics[0]}"
    try:
        stage, metric = named(best_by)
    except ValueError as error:
        raise table.error("best_by", f"is not usable: {error}") from None
    if metric not in metrics:
        raise table.error("best_by", f"is {best_by!r}; evaluation.metrics has {', '.join(metrics)}")
    if stage not in binding.stages:
        there = ", ".join(figure_name(each, one) for each in binding.stages for one in metrics)
        raise table.error(
            "best_by", f"is {best_by!r}; with {binding.method_name} devices evaluate {there}"
        )
    found_settings = replace(settings, metrics=metrics, best_by=figure_name(stage, metric))
    try:
        _ = found_settings.terms
    except ValueError as error:
        raise table.error("metrics", f"is not usable: {error}") from None
    return found_settings


def _declared(table: TomlTable, artifacts: Sequence[Path]) -> list[str]:
    """What every artifact names, in the order of the first one."""
    declared = []
    for folder in artifacts:
        try:
            declared.append([name for name in read_manifest(folder).metrics if name in METRICS])
        except (ArtifactError, OSError) as error:
            raise table.error("", f"needs the artifact {folder}: {error}") from None
        if not declared[-1]:
            raise table.error(
                "",
                f"asks for an evaluation, but the artifact {folder} names no metric: export it "
                "again with metrics=..., or take the table out",
            )
    found = [name for name in declared[0] if all(name in each for each in declared)]
    if not found:
        raise table.error("", "asks for an evaluation, but the artifacts have no metric in common")
    return found
