"""What an author hands to ``export.train_step``, held against what it takes, before all else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

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
