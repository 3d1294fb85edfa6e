"""What an author hands to ``export.train_step``, held against what it takes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from device_sdk.artifact import MetricSource
from device_sdk.evaluation.metrics import METRICS, SCALES, Loss, PredictionMetric
from export.errors import ExportError


def refuse_other_kinds(
    model: object,
    loss: object,
    directory: object,
    *,
    name: object,
    gradient: object,
    **called: object,
) -> None:
    """Raise ExportError where an argument is of another kind than it has to be.

    ``called``: by name, what may be None and is called if not.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ExportError(f"the model is the class {model.__name__}", instead="one made of it")
    if not isinstance(model, nn.Module):
        raise ExportError(
            f"the model is {_a(model)}, no torch.nn.Module, whose parameters a step could train",
            instead="a module that holds the parameters, and calls the function in its forward",
        )
    for which, value in {"loss": loss, **called}.items():
        if not callable(value) and (value is not None or which == "loss"):
            raise ExportError(
                f"{which} is {_a(value)}, which cannot be called",
                instead=_CALLED.get(which, f"a function, or no {which}"),
            )
    if gradient is not None and not hasattr(gradient, "combine"):
        raise ExportError(
            f"gradient is {_a(gradient)}, no rule for several losses",
            instead="export.ConflictProjection(), or any export.GradientRule",
        )
    if name is not None and not isinstance(name, str):
        raise ExportError(
            f"name is {_a(name)}", instead="a text, or no name: the folder's is taken"
        )
    if isinstance(loss, nn.Module) and type(loss).__module__.startswith("torch.nn"):
        raise ExportError(
            f"loss is a {type(loss).__name__}, which takes no model and batch",
            instead='lambda model, batch: criterion(model(batch["x"]), batch["label"])',
        )
    _check_directory(directory)


_CALLED = {
    "loss": 'lambda model, batch: criterion(model(batch["x"]), batch["label"])',
    "predict": 'lambda model, batch: {"logits": model(batch["x"])}',
}


def require_modules(model: nn.Module, names: Collection[str], argument: str) -> None:
    """Raise ExportError where the argument names what is no module of the model."""
    known = dict(model.named_modules(remove_duplicate=False))
    odd = next((name for name in names if name not in known), None)
    if odd is not None:
        raise ExportError(
            f"{argument} names {odd!r}, which is no module of the model",
            instead=f"names such as {', '.join(list(known)[1:4])}",
        )


def _check_directory(directory: object) -> None:
    if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
        raise ExportError(f"directory is {_a(directory)}", instead='a folder: "artifacts/mine"')
    place = Path(directory)
    for each in (place, *place.parents):
        if each.exists() and not each.is_dir():
            raise ExportError(
                f"directory is {str(place)!r}, and {str(each)!r} is a file",
                instead="a new folder, or one with an artifact to replace",
            )


def named_tensors(batch: object) -> dict[str, Tensor]:
    """The example batch as a dict. Raises ExportError where it is none of named tensors."""
    if not isinstance(batch, Mapping):
        raise ExportError(
            f"the example batch is {_a(batch)}",
            instead='a dict of named tensors: {"x": x, "label": label}, which loss(model, batch) '
            "gets as it is",
        )
    for key in batch:
        if not isinstance(key, str):
            raise ExportError(
                f"the example batch has {key!r} as a name, which is {_a(key)}",
                instead="names that are text",
            )
    return dict(batch)


def named_axes(dynamic: object) -> dict[str, dict[int, str]]:
    """The free axes, with lists of names (None where an axis is fixed) as dicts.

    Raises ExportError where they are none.
    """
    example = '{"x": {0: "batch"}} for x [batch, ...], {} where no size varies'
    if not isinstance(dynamic, Mapping):
        raise ExportError(f"dynamic is {_a(dynamic)}", instead=example)
    found: dict[str, dict[int, str]] = {}
    for name, axes in dynamic.items():
        pairs: Any = axes.items() if isinstance(axes, Mapping) else None
        if isinstance(axes, (list, tuple)):
            pairs = [(at, axis) for at, axis in enumerate(axes) if axis is not None]
        if pairs is None or not all(_is_axis(*pair) for pair in pairs):
            raise ExportError(
                f"dynamic[{name!r}] is {axes!r}, and not axes by their places, each with a name",
                instead=example,
            )
        found[name] = dict(pairs)
    return found


def _is_axis(place: object, name: object) -> bool:
    return isinstance(place, int) and not isinstance(place, bool) and isinstance(name, str)


def described_metrics(metrics: object) -> dict[str, Any]:
    """What the metrics are about, by name. Raises ExportError where they are no mapping."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ExportError(
            f"metrics is {_a(metrics)}",
            instead='what each is about: {"loss": "loss", "accuracy": ("logits", "label")}',
        )
    return {name: tuple(of) if isinstance(of, list) else of for name, of in metrics.items()}


def _a(value: object) -> str:
    """The kind of a value, for a sentence."""
    if value is None or value == "":
        return repr(value)
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


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
