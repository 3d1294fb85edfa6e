"""``submodels``: one model as a ladder of artifacts, of which each device trains what it affords.

Two kinds of rung. *Low rank*: every large layer of any model is served as two factors of its
truncated singular value decomposition (Yao et al. 2021, FedHM, section 3), which approximate the
same function with fewer products and fewer bytes. *Slices*: the model built narrower, whose tensors
are rows of the full one's (Diao et al. 2021, HeteroFL, section 3), shallower (Kim et al. 2023,
DepthFL), or with fewer of its layers trained.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from device_sdk.artifact import (
    INITIAL_FILE,
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    read_manifest,
    safetensors,
)
from device_sdk.artifact.parts import is_under
from device_sdk.artifact.submodels import FULL_FILE, MOST_RUNGS, Basis, Piece, Submodel
from export.build import Exported, Progress, Recipe, export_given, reported
from export.errors import ExportError
from export.given import (
    MetricSpecs,
    described_metrics,
    named_axes,
    named_tensors,
    require_modules,
)
from export.gradient_rules import GradientRule
from export.low_rank import LEAST_SIDE, of_rank
from export.optimizers import Adam, Optimizer
from export.rung import BuiltRung, movable_units, prove, take, tensors_in, told_apart
from export.step import LossesFunction, LossFunction, PredictFunction
from export.write import replaced

_RECURRENT = re.compile(r"(?P<path>(.*\.)?)(weight|bias)_(ih|hh)(?P<end>_l\d+(_reverse)?)$")
LEAST_SHARED_BYTES = 1 << 16
"""Of frozen values, for a file of their own: as large as one chunk on its way to a device."""
AnyOptimizer = Optimizer | Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def submodels(
    model: nn.Module | Callable[[int], nn.Module],
    loss: LossFunction | LossesFunction,
    example_batch: Mapping[str, Tensor],
    *,
    ranks: Sequence[float] = (),
    widths: Sequence[int] = (),
    whole: Collection[str] = (),
    dynamic: Mapping[str, Mapping[int, str]],
    directory: str | Path,
    optimizer: AnyOptimizer | None = None,
    predict: PredictFunction | None = None,
    gradient: GradientRule | None = None,
    metrics: MetricSpecs | None = None,
    verify: bool = True,
    progress: Progress | None = None,
) -> list[Exported]:
    """Write a ladder: a folder of artifacts, each of a part of one model, smallest first.

    A task that names the folder as its ``artifact`` trains the full model; each device times the
    rungs, takes the largest that it affords, and fetches no more than that.

    model: any torch module, with ``ranks``; with ``widths`` a function ``make(width)`` of one.
    ranks: of each large layer, rising to 1: ``(1/8, 1/4, 1/2, 1)``. The weights of linear layers,
        convolutions, embeddings, RNNs and attention with both sides of 16 or more are factored
        where that makes them smaller; others stay whole.
    widths: rising, such as ``(16, 32, 64)``; the last is the full model. What ``make`` makes of
        them may be narrower, have fewer blocks, fewer trained parameters, or adapters of a smaller
        rank (:func:`export.lora`).
    whole: names of modules that no rung factors, such as ``("head",)``; of slices, that no rung
        cuts.
    optimizer: an ``export.Optimizer``, or what makes one of torch's out of a rung's parameters:
        ``lambda parameters: torch.optim.Adam(parameters, lr=1e-3)``. Where a trial finds the rate,
        it is the full model's for all rungs.

    Other arguments are those of :func:`export.train_step`. Each rung is checked before it is
    written: its outputs are those of the full model with its layers truncated, or with all that is
    outside the slices switched off. Raises ExportError, naming the module, where they are not;
    nothing is written then.
    """
    directory = Path(directory)
    full, rungs = _rungs(model, ranks, widths, whole)
    given, batch = described_metrics(metrics), named_tensors(example_batch)
    values = _values(full)
    apart, asked = told_apart(full, values), (loss, batch, predict)
    # A rung that predicts may be an artifact by itself, which begins with these factors anywhere.
    stored = {**values, **(_bases(rungs, values) if predict else {})}
    data = safetensors.encode(stored)
    digest = hashlib.sha256(data).hexdigest()
    _require_replaceable(directory)
    with reported(progress) as say, replaced(directory) as draft:
        (draft / FULL_FILE).write_bytes(data)
        for rung in rungs:
            say(f"{rung.name}: proving it")
            prove(full, rung, apart, *asked)
        units = movable_units(full, rungs, apart, asked)
        found: list[Exported] = []
        moved: Collection[str] = ()
        # The full model first: what it trains the others either train or are brought.
        for place, rung in reversed([*enumerate(rungs, 1)]):
            take(rung, stored)
            share = rung.share(full)
            made: Any = Adam() if optimizer is None else optimizer
            if not _is_optimizer(made):
                made = made(rung.model.parameters())
            inputs = Recipe(
                rung.model, loss, batch, named_axes(dynamic), made, predict, gradient, given,
                rung.name,
                Submodel(
                    place, len(rungs), digest, rung.pieces, rung.parts_of(moved),
                    units, int(share * units) if units else 0,
                ),
                found[-1].manifest.rate if found and found[-1].manifest.rate_by_trial else None,
            )  # fmt: skip
            told = _prefixed(say, rung.name)
            found = [
                export_given(inputs, draft / rung.name, verify=verify, progress=told),
                *found,
            ]
            moved = moved or found[0].manifest.moved
        say("writing what is frozen")
        manifests = _share_frozen([each.directory for each in found])
    return [
        Exported(directory / each.directory.name, manifest, each.report)
        for each, manifest in zip(found, manifests, strict=True)
    ]


def _rungs(
    model: nn.Module | Callable[[int], nn.Module],
    ranks: Sequence[float],
    widths: Sequence[int],
    whole: Collection[str],
) -> tuple[nn.Module, list[BuiltRung]]:
    if bool(ranks) == bool(widths):
        raise ExportError("a ladder has either ranks or widths", instead="ranks=(1/8, 1/4, 1/2, 1)")
    given = ranks or widths
    sizes = [*given] if isinstance(given, Sequence) else [given]
    numbers = isinstance(given, Sequence) and all(isinstance(each, Real) for each in sizes)
    rising = numbers and sizes == sorted(set(sizes)) and sizes[0] > 0
    if not rising or len(sizes) > MOST_RUNGS:
        raise ExportError(
            f"the rungs are {given!r}",
            instead=f"up to {MOST_RUNGS} rising numbers above 0, such as (1/4, 1/2, 1) or (16, 32)",
        )
    if widths:
        if isinstance(model, nn.Module) or not callable(model):
            raise ExportError(
                "widths need a function that builds the model",
                instead="submodels(lambda width: Net(width), ..., widths=(16, 32, 64)), or ranks=",
            )
        return _sliced(model, widths, whole)
    if not isinstance(model, nn.Module):
        raise ExportError(
            f"ranks need a torch module, and this is a {type(model).__name__}",
            instead="the model itself, or widths= for a function that builds it",
        )
    if ranks[-1] != 1:
        raise ExportError(f"the last rank is {ranks[-1]:g}", instead="1, the full model")
    require_modules(model, whole, "whole")
    found = [of_rank(model, float(rank), whole) for rank in ranks]
    for smaller, larger in pairwise(found):
        if _size(smaller.model) >= _size(larger.model):
            raise ExportError(
                f"the rungs {smaller.name} and {larger.name} are the same: no layer (both sides of "
                f"{LEAST_SIDE} or more, and neither tied nor frozen) becomes smaller there; of a "
                "square matrix the factors are as large as itself from a rank of 1/2 on",
                instead="fewer ranks, or widths= for a model built narrower",
            )
    return model, found


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Slices: the model built narrower.


def _sliced(
    make: Callable[[int], nn.Module], widths: Sequence[int], whole: Collection[str]
) -> tuple[nn.Module, list[BuiltRung]]:
    models = [make(int(width)) for width in widths]
    full = models[-1]
    require_modules(full, whole, "whole")
    shapes = [{n: tuple(t.shape) for n, t in tensors_in(each).items()} for each in models]
    found = []
    for width, model, own in zip(widths, models, shapes, strict=True):
        _require_part(model, full, width, widths[-1])
        pieces = {
            name: Piece(name, "slice", _blocks(name, shapes[-1]))
            for name, shape in own.items()
            if shape != shapes[-1][name]
        }
        changed = (name for name, shape in shapes[-1].items() if own.get(name) != shape)
        cut = next((name for name in changed if is_under(name, whole)), None)
        if cut is not None:
            raise ExportError(f"{cut!r} is smaller at width {width}, and is to stay whole")
        found.append(BuiltRung(f"width-{width}", model, pieces))
    kinds = [(own, _trained(model).keys()) for own, model in zip(shapes, models, strict=True)]
    for (smaller, larger), (width, wider) in zip(pairwise(kinds), pairwise(widths), strict=True):
        if smaller == larger:
            raise ExportError(
                f"make({width}) and make({wider}) build the same model",
                instead="a function that uses its width",
            )
    return full, found


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _require_part(model: nn.Module, full: nn.Module, width: int, largest: int) -> None:
    """Raise ExportError where the model has, or trains, what the full one does not, or nothing."""
    odd = next(iter(sorted(tensors_in(model).keys() - tensors_in(full).keys())), None)
    if odd is not None:
        raise ExportError(
            f"make({width}) has {odd!r}, which make({largest}), the full model, lacks",
            instead="models whose layers are those of the full one, narrower or fewer",
        )
    trained = _trained(model)
    if not trained:
        raise ExportError(f"make({width}) trains nothing: all of its parameters are frozen")
    odd = next(iter(sorted(trained.keys() - _trained(full).keys())), None)
    if odd is not None:
        raise ExportError(
            f"make({width}) trains {odd!r}, which make({largest}), the full model, keeps frozen",
            instead="requires_grad where the full model has it, or in fewer places",
        )


def _blocks(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """How many equal blocks each axis falls into: of a recurrent layer its gates, which lie below
    one another, of attention query, key and value."""
    count = 3 if "in_proj_" in name else 1
    layer = _RECURRENT.match(name)
    inner = shapes.get(f"{layer['path']}weight_hh{layer['end']}", ()) if layer else ()
    if len(inner) == 2 and inner[0] % inner[1] == 0:
        count = inner[0] // inner[1]
    return (count, *(1,) * (len(shapes[name]) - 1)) if count > 1 else ()


def _bases(rungs: Sequence[BuiltRung], values: Mapping[str, Any]) -> dict[str, Any]:
    """What tensors are factored by, up to the largest rank of each."""
    ranks: dict[str, int] = {}
    for rung in rungs:
        own = tensors_in(rung.model)
        ranks |= {p.of: len(own[n]) for n, p in rung.pieces.items() if p.role == "scale"}
    found: dict[str, Any] = {}
    for name, rank in ranks.items():
        found |= Basis.of(values[name]).kept_as(name, rank)
    return found


def _values(model: nn.Module) -> dict[str, Any]:
    return {name: each.numpy().copy(order="C") for name, each in tensors_in(model).items()}


# What is frozen lies in one file, which all rungs share.


def _share_frozen(folders: Sequence[Path]) -> list[Manifest]:
    """Take what the full model, the last folder's, has frozen out of each rung's own file, as far
    as it is the same there; the manifests. Less than a message's worth stays where it is."""
    *_, full = folders
    initial, frozen = _initial(full), read_manifest(full).frozen_members
    shared = {n: a for n, a in initial.items() if n in frozen and a.dtype == np.float32}
    if sum(array.nbytes for array in shared.values()) < LEAST_SHARED_BYTES:
        return [read_manifest(folder) for folder in folders]
    data = safetensors.encode(shared)
    entry = FileEntry.of(data)
    (full.parent / f"{entry.sha256}.safetensors").write_bytes(data)
    return [_without(folder, shared, entry) for folder in folders]


def _without(folder: Path, shared: Mapping[str, Any], entry: FileEntry) -> Manifest:
    initial, manifest = _initial(folder), read_manifest(folder)
    own = {
        name: array
        for name, array in initial.items()
        if name not in shared or not np.array_equal(array, shared[name])
    }
    if len(own) < len(initial):
        data = safetensors.encode(own)
        files = {**manifest.files, INITIAL_FILE: FileEntry.of(data)}
        manifest = replace(manifest, files=files, shared=entry)
        (folder / INITIAL_FILE).write_bytes(data)
        (folder / MANIFEST_FILE).write_bytes(manifest.to_json())
    return manifest


def _initial(folder: Path) -> Mapping[str, Any]:
    return safetensors.decode((folder / INITIAL_FILE).read_bytes()).tensors


# Written whole or not at all.


def _is_optimizer(given: object) -> bool:
    return all(hasattr(given, name) for name in ("name", "settings", "hyper", "update"))


def _prefixed(say: Progress, name: str) -> Progress:
    return lambda text: say(f"{name}: {text}")


def _is_empty(directory: Path) -> bool:
    return directory.is_dir() and not any(directory.iterdir())


def _require_replaceable(directory: Path) -> None:
    ladder = (directory / FULL_FILE).is_file()
    if directory.exists() and not ladder and not _is_empty(directory):
        raise ExportError(
            f"{directory} holds other files", instead="a new folder, or a ladder to replace"
        )
