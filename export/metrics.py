"""What the metrics of an artifact are about: what its author says, held against the graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from device_sdk.artifact import MetricSource
from device_sdk.evaluation.metrics import METRICS, SCALES, Loss, PredictionMetric
from export.errors import ExportError

MetricSpecs = Mapping[str, str | tuple[str, ...]]
"""By a metric's name: ``(output, batch entry)``, for a classifier with ``"logits"`` (the default)
or ``"probabilities"`` behind; for ``loss`` the loss's name, ``"loss"`` unless there are several."""

_OWN = {
    name: metric for name, metric in METRICS.items() if isinstance(metric, (Loss, PredictionMetric))
}


def read_metrics(
    given: MetricSpecs, entries: Iterable[str]
) -> tuple[dict[str, MetricSource], str | None]:
    """The sources, and the name of the loss that is a metric; None where none is.

    Raises ExportError for an unknown metric, a form that is none, and a batch entry that there is
    not.
    """
    sources: dict[str, MetricSource] = {}
    loss: str | None = None
    for name, spec in given.items():
        metric = _OWN.get(name)
        if metric is None:
            raise ExportError(
                f"metric {name!r} is none that an artifact declares",
                instead=f"one of {', '.join(_OWN)} (a task that recommends needs no declaration)",
            )
        if isinstance(metric, Loss):
            if not isinstance(spec, str):
                raise ExportError(
                    f"metric {name!r} is about {spec!r}",
                    instead='the loss\'s name: {"loss": "loss"}, or one of several',
                )
            sources[name], loss = MetricSource(), spec
        else:
            sources[name] = _source(name, metric, spec, list(entries))
    return sources, loss


def _source(
    name: str, metric: PredictionMetric, spec: str | tuple[str, ...], entries: list[str]
) -> MetricSource:
    most = 3 if metric.classifies else 2
    if not isinstance(spec, tuple) or not 2 <= len(spec) <= most:
        scale = ' and, if it is so, "probabilities"' if metric.classifies else ""
        raise ExportError(
            f"metric {name!r} is about {spec!r}",
            instead=f"the names of an output and of a batch entry{scale}: "
            f'{{"{name}": ("{"logits" if metric.classifies else "output"}", "label")}}',
        )
    output, target, *rest = spec
    if target not in entries:
        raise ExportError(
            f"metric {name!r} is about the batch entry {target!r}, which there is not",
            instead=f"one of {', '.join(entries)}",
        )
    if rest and rest[0] not in SCALES:
        raise ExportError(
            f"metric {name!r} is about {rest[0]!r}", instead=" or ".join(map(repr, SCALES))
        )
    return MetricSource(output, target, (rest or ["logits"])[0] if metric.classifies else None)


def require_ports(
    sources: Mapping[str, MetricSource], outputs: Iterable[str], used: Iterable[str]
) -> None:
    """Raises ExportError for a metric of what a device cannot compare.

    ``outputs``: those in evaluation mode; ``used``: the batch entries that the train step reads.
    """
    known, given = list(outputs), list(used)
    for name, source in sources.items():
        if source.output is not None and source.output not in known:
            raise ExportError(
                f"metric {name!r} is about the output {source.output!r}, which there is not in "
                "evaluation mode",
                instead=f"one of {', '.join(known)}, or a predict= that returns it",
            )
        if source.target is not None and source.target not in given:
            raise ExportError(
                f"metric {name!r} is about the batch entry {source.target!r}, which the loss does "
                "not use, so that devices do not have it",
                instead=f"one of {', '.join(given)}",
            )


def try_metrics(
    given: MetricSpecs,
    sources: Mapping[str, MetricSource],
    got: Mapping[str, np.ndarray],
    batch: Mapping[str, np.ndarray],
) -> None:
    """Measure each metric on the example batch, by what the graph gives for it.

    Raises ExportError where a shape, a label or a scale does not fit.
    """
    for name, source in sources.items():
        metric = _OWN[name]
        if not isinstance(metric, PredictionMetric) or not source.output or not source.target:
            continue
        output, target = got[f"output.{source.output}"], batch[f"batch.{source.target}"]
        about = f"metric {name!r} of {source.output!r} and {source.target!r}"
        if source.scale == "logits" and len(given[name]) == 2 and _looks_likely(output):
            raise ExportError(
                f"{about}: on the example batch the output looks like probabilities",
                instead=f'say which: ("{source.output}", "{source.target}", "probabilities"), or '
                'the same with "logits"',
            )
        try:
            metric.measure(output, target, "logits" if source.scale != SCALES[1] else SCALES[1])
        except (ValueError, TypeError) as error:
            raise ExportError(
                f"{about}, measured on the example batch: {error}",
                instead=_FORMS[metric.classifies],
            ) from error


_FORMS = {
    True: "an output [batch, classes], or [batch] for two, and a batch entry [batch] of classes",
    False: "an output and a batch entry of the same shape",
}


def _looks_likely(output: np.ndarray) -> bool:
    """All within 0 to 1, and rows of several that sum to 1."""
    if ((output < 0) | (output > 1)).any():
        return False
    rows = output.reshape(len(output), -1)
    return rows.shape[1] == 1 or bool(np.allclose(rows.sum(axis=1), 1, atol=1e-3))
