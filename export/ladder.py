"""``submodels``: one model as a ladder of artifacts, of which each device trains what it affords.

Two kinds of rung. *Low rank*: every large layer of any model is served as two factors of its
truncated singular value decomposition (Yao et al. 2021, FedHM, section 3), which approximate the
same function with fewer products and fewer bytes. *Slices*: the model built narrower, whose tensors
are the first rows of the full one's (Diao et al. 2021, HeteroFL, section 3).
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from device_sdk.artifact import (
    INITIAL_FILE,
    MANIFEST_FILE,
    ArtifactError,
    FileEntry,
    Manifest,
    read_manifest,
    safetensors,
)
from device_sdk.artifact.parts import is_under
from device_sdk.artifact.submodels import (
    FULL_FILE,
    MOST_RUNGS,
    Piece,
    Submodel,
    Units,
    part_of,
    slice_of,
)
from export.build import Exported, Progress, Recipe, export_given, reported
from export.errors import ExportError
from export.given import (
    MetricSpecs,
    described_metrics,
    named_axes,
    named_tensors,
    require_modules,
)
from export.insides import TorchDispatchMode
from export.optimizers import Optimizer
from export.rewrites.patch import without_fast_path
from export.step import LossesFunction, LossFunction, PredictFunction
from export.write import replaced

LEAST_SIDE = 16
"""A matrix with a shorter side is small beside its layer's activations, and stays whole."""
_RECURRENT = re.compile(r"(?P<path>(.*\.)?)(weight|bias)_(ih|hh)(?P<end>_l\d+(_reverse)?)$")
LEAST_SHARED_BYTES = 1 << 16
_UNEQUAL = 0.1
_TOLERANCE = 1e-9
"""Of outputs that have to be equal, beside the largest; they are computed in float64. At first
values much is near to linear, and what is another function differs by little."""
_COARSE_TOLERANCE = 1e-5
"""Where float32 comes in: as factors' product, or in the model's own code."""

Asked = tuple[LossFunction | LossesFunction, Mapping[str, Tensor], PredictFunction | None]
"""Loss, example batch and prediction: what two models are compared by."""
AnyOptimizer = Optimizer | Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def submodels(
    model: nn.Module | Callable[[int], nn.Module],
    loss: LossFunction | LossesFunction,
    example_batch: Mapping[str, Tensor],
    *,
    ranks: Sequence[float] = (),
    widths: Sequence[int] = (),
    whole: Collection[str] = (),
    optimizer: AnyOptimizer,
    dynamic: Mapping[str, Mapping[int, str]],
    directory: str | Path,
    predict: PredictFunction | None = None,
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
    widths: rising, such as ``(16, 32, 64)``; the last is the full model.
    whole: names of modules that no rung factors, such as ``("head",)``; of slices, that no rung
        cuts.
    optimizer: an ``export.Optimizer``, or what makes one of torch's out of a rung's parameters:
        ``lambda parameters: torch.optim.Adam(parameters, lr=1e-3)``.

    Other arguments are those of :func:`export.train_step`. Each rung is checked before it is
    written: its outputs are those of the full model with its layers truncated, or with all that is
    outside the slices switched off. Raises ExportError, naming the module, where they are not;
    nothing is written then.
    """
    directory = Path(directory)
    full, rungs = _rungs(model, ranks, widths, whole)
    given, batch = described_metrics(metrics), named_tensors(example_batch)
    values = _values(full)
    apart, asked = _told_apart(full, values), (loss, batch, predict)
    data = safetensors.encode(values)
    digest = hashlib.sha256(data).hexdigest()
    _require_replaceable(directory)
    with reported(progress) as say, replaced(directory) as draft:
        (draft / FULL_FILE).write_bytes(data)
        for rung in rungs:
            say(f"{rung.name}: proving it")
            _prove(full, rung, apart, *asked)
        units = _movable_units(full, rungs, apart, asked)
        found: list[Exported] = []
        moved: Collection[str] = ()
        # The full model first: what it trains the others either train or are brought.
        for place, rung in reversed([*enumerate(rungs, 1)]):
            _take(rung, values)
            share = rung.share(full)
            made: Any = optimizer
            if not _is_optimizer(optimizer):
                made = optimizer(rung.model.parameters())  # type: ignore[operator]
            inputs = Recipe(
                rung.model, loss, batch, named_axes(dynamic), made, predict, None, given,
                rung.name,
                Submodel(
                    place, len(rungs), digest, rung.pieces, rung.parts_of(moved),
                    units, int(share * units) if units else 0,
                ),
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


@dataclass(frozen=True)
class BuiltRung:
    """A submodel: its module, and which of its tensors are parts of the full model's."""

    name: str
    model: nn.Module
    pieces: Mapping[str, Piece]

    def cuts(self, full: nn.Module) -> dict[tuple[str, int], Fraction]:
        """By tensor and axis that it cuts, its share of the full model's rows."""
        own, whole = _tensors(self.model), _tensors(full)
        return {
            (name, axis): Fraction(size, whole[name].shape[axis])
            for name, piece in self.pieces.items()
            if piece.role == "slice"
            for axis, size in enumerate(own[name].shape)
            if size < whole[name].shape[axis]
        }

    def share(self, full: nn.Module) -> Fraction:
        """Of the width, where all that it cuts has the same; 1 where it cuts nothing."""
        return min(self.cuts(full).values(), default=Fraction(1))

    def parts_of(self, tensors: Collection[str]) -> tuple[str, ...]:
        """Names of its tensors that are of these of the full model."""
        return tuple(
            name
            for name in _tensors(self.model)
            if (self.pieces[name].of if name in self.pieces else name) in tensors
        )


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
    numbers = isinstance(given, Sequence) and all(isinstance(each, int | float) for each in sizes)
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
    found = [_of_rank(model, float(rank), whole) for rank in ranks]
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


# Low rank: layers as two factors.


class Factors(nn.Module):
    """A matrix [m, n] as ``left`` [m, r] times ``right`` [r, n], where a layer's weight was."""

    def __init__(self, layer: str, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.layer = layer
        matrix = weight.detach().flatten(1)
        self.left = nn.Parameter(matrix.new_zeros(len(matrix), rank))
        self.right = nn.Parameter(matrix.new_zeros(rank, matrix.shape[1]))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            what = f"the weight of {self.layer!r} is two factors here, and has no {name!r}"
            raise AttributeError(what) from None


class _LowRank:
    """A layer whose ``weight`` is factored: of the same class, with the same settings."""

    weight: Any

    @classmethod
    def of(cls, name: str, layer: nn.Module, rank: int) -> nn.Module:
        """The layer of that name at ``rank``; its bias is the layer's own."""
        made: Any = copy.copy(layer)
        made.__class__ = cls
        made._parameters = dict(layer._parameters)
        made._modules = dict(layer._modules)
        weight = made._parameters.pop("weight")
        made._modules["weight"] = Factors(name, weight, rank)
        return made  # type: ignore[no-any-return]


class LowRankLinear(_LowRank, nn.Linear):
    """``x V' U' + b``: of [.., n] by way of [.., r]."""

    def forward(self, input: Tensor) -> Tensor:
        inner = functional.linear(input, self.weight.right)
        return functional.linear(inner, self.weight.left, self.bias)


class _LowRankConv(_LowRank):
    """The kernel's own convolution to r channels, then one of 1 x 1."""

    kernel_size: tuple[int, ...]
    in_channels: int
    stride: Any
    padding: Any
    dilation: Any
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        convolve = getattr(functional, f"conv{len(self.kernel_size)}d")
        right = self.weight.right
        kernel = right.reshape(len(right), self.in_channels, *self.kernel_size)
        inner = convolve(
            input, kernel, stride=self.stride, padding=self.padding, dilation=self.dilation
        )
        left = self.weight.left
        found: Tensor = convolve(
            inner, left.reshape(*left.shape, *(1,) * len(self.kernel_size)), self.bias
        )
        return found


class LowRankConv1d(_LowRankConv, nn.Conv1d):
    """[b, c, l]."""


class LowRankConv2d(_LowRankConv, nn.Conv2d):
    """[b, c, h, w]."""


class LowRankConv3d(_LowRankConv, nn.Conv3d):
    """[b, c, d, h, w]."""


class LowRankEmbedding(_LowRank, nn.Embedding):
    """Rows of U, then times V."""

    def forward(self, input: Tensor) -> Tensor:
        rows = functional.embedding(input, self.weight.left, self.padding_idx)
        found: Tensor = rows @ self.weight.right
        return found


_FORMS: Mapping[type[nn.Module], Any] = {
    nn.Linear: LowRankLinear,
    nn.Conv1d: LowRankConv1d,
    nn.Conv2d: LowRankConv2d,
    nn.Conv3d: LowRankConv3d,
    nn.Embedding: LowRankEmbedding,
}
_MULTIPLIED = (nn.RNNBase, nn.MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear)
"""Layers whose weights go into one call of torch's: it gets the factors' product."""


def _multiplied(name: str, layer: nn.Module, ranks: Mapping[str, int]) -> nn.Module:
    """A layer whose weights ``ranks`` are products of factors, made anew whenever they are read."""
    made = copy.copy(layer)
    made._parameters = {n: p for n, p in layer._parameters.items() if n not in ranks}
    made._modules = dict(layer._modules)
    factors = nn.ModuleDict()
    for weight, rank in ranks.items():
        factors[weight] = Factors(f"{name}.{weight}", getattr(layer, weight), rank)
    made._modules["factors"] = factors

    def product(weight: str) -> property:
        return property(lambda self: self.factors[weight].left @ self.factors[weight].right)

    known: dict[str, Any] = {weight: product(weight) for weight in ranks}
    if isinstance(layer, nn.RNNBase):
        known["_flat_weights"] = property(
            lambda self: [getattr(self, each) for each in self._flat_weights_names],
            lambda self, given: None,  # torch gathers them anew when it moves a model
        )
    kind = type(layer)
    made.__class__ = type(kind.__name__, (kind,), known)
    return made


def _of_rank(model: nn.Module, share: float, whole: Collection[str]) -> BuiltRung:
    """The model with every layer factored that is large enough, at ``share`` of its full rank."""
    name = "full" if share == 1 else "{0.numerator}of{0.denominator}".format(_fraction(share))
    made = copy.deepcopy(model)
    pieces: dict[str, Piece] = {}
    # What is inside first: a layer is replaced with what it holds by then.
    for path, parent in reversed([*made.named_modules()]) if share < 1 else ():
        for child, layer in [*parent.named_children()]:
            full = f"{path}.{child}".lstrip(".")
            ranks = {} if is_under(full, whole) else _ranks(model, full, share)
            if not ranks:
                continue
            if type(layer) in _FORMS:
                held = full
                setattr(parent, child, _FORMS[type(layer)].of(full, layer, ranks["weight"]))
            else:
                held = f"{full}.factors"
                setattr(parent, child, _multiplied(full, layer, ranks))
            for weight in ranks:
                for role in ("left", "right"):
                    pieces[f"{held}.{weight}.{role}"] = Piece(f"{full}.{weight}", role)
    return BuiltRung(name, made, pieces)


def _fraction(share: float) -> Fraction:
    return Fraction(share).limit_denominator(256)


def _ranks(model: nn.Module, path: str, share: float) -> dict[str, int]:
    """Of a layer's weights that are factored, their ranks."""
    layer: Any = model.get_submodule(path)
    if type(layer) in _FORMS:
        embeds = isinstance(layer, nn.Embedding)
        if (embeds and (layer.max_norm is not None or layer.sparse)) or (
            getattr(layer, "groups", 1) != 1 or getattr(layer, "padding_mode", "zeros") != "zeros"
        ):
            return {}
    elif not isinstance(layer, _MULTIPLIED):
        return {}
    found = {}
    for name, weight in layer.named_parameters(recurse=False):
        if weight.ndim < 2 or not weight.requires_grad or nn.parameter.is_lazy(weight):
            continue
        if type(layer) in _FORMS and name != "weight":
            continue  # a weight that is made of others: of spectral norm, say
        m, n = weight.flatten(1).shape
        rank = max(1, round(min(m, n) * share))
        if min(m, n) >= LEAST_SIDE and rank * (m + n) < m * n and not _is_tied(model, weight):
            found[name] = rank
    return found


def _is_tied(model: nn.Module, weight: Tensor) -> bool:
    """Whether the same weight has another place in the model: in another module, or in one that
    lies in several places itself."""
    places = model.named_parameters(remove_duplicate=False)
    return sum(parameter is weight for _, parameter in places) > 1


# Slices: the model built narrower.


def _sliced(
    make: Callable[[int], nn.Module], widths: Sequence[int], whole: Collection[str]
) -> tuple[nn.Module, list[BuiltRung]]:
    models = [make(int(width)) for width in widths]
    full = models[-1]
    require_modules(full, whole, "whole")
    shapes = [{n: tuple(t.shape) for n, t in _tensors(each).items()} for each in models]
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
    odd = next(iter(sorted(_tensors(model).keys() - _tensors(full).keys())), None)
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


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    own = (*model.named_parameters(), *model.named_buffers())
    return {name: each.detach() for name, each in own if each.dtype == torch.float32}


def _values(model: nn.Module) -> dict[str, Any]:
    return {name: each.numpy().copy(order="C") for name, each in _tensors(model).items()}


# A rung is what it says.


def _prove(
    full: nn.Module,
    rung: BuiltRung,
    values: Mapping[str, Any],
    loss: LossFunction | LossesFunction,
    batch: Mapping[str, Tensor],
    predict: PredictFunction | None,
    units: Units | None = None,
) -> None:
    """Give the rung's model these values, and compare it with the full one that it is a part of;
    its slices are of ``units``, or the first."""
    parts = _take(rung, values, units)
    if rung.model is full:
        return
    try:
        found = _outputs(rung.model, loss, batch, predict)
    except Exception as error:
        raise ExportError(
            f"the rung {rung.name} does not run: {type(error).__name__}: {error}",
            instead="whole=(...) with the names of modules that other code reads into",
        ) from error
    lacking = _lacking(full, rung.model)
    norms: Mapping[str, Sequence[Tensor]] = {}
    tolerance = _TOLERANCE if found.exact and not _is_factored(rung) else _COARSE_TOLERANCE
    # A block whose parameters are zero is none where what it makes is added to what came in; where
    # a norm stands behind that sum, what came in has to go out.
    for skipped in ((), lacking) if lacking else ((),):
        same = _with_the_rest_off(full, rung, values, parts, skipped, units)
        try:
            expected = _outputs(same, loss, batch, predict)
        except Exception:
            if not skipped:
                raise
            break  # it takes or gives more than one tensor
        unequal = expected.unequal(found, tolerance)
        if not unequal:
            return
        norms = expected.norms
    where = next(
        (n for n, e in found.norms.items() if not _equal(norms.get(n, []), e, tolerance)), ""
    )
    what = "with its layers truncated" if _is_factored(rung) else "with the rest switched off"
    if not where and unequal == ["loss"]:
        raise ExportError(
            f"the loss of the rung {rung.name} is not that of the full model {what}, though all "
            "that it returns beside it is: it reads parameters",
            instead="weight_decay= of the optimizer for a penalty on all of them, or whole=(...) "
            "with the names of the modules that the loss reads",
        )
    raise ExportError(
        f"the outputs of the rung {rung.name} ({', '.join(unequal)}) are not those of the full "
        f"model {what}" + (f", which is {', '.join(lacking)}" if lacking else ""),
        module=where or "the model itself",
        instead="whole=(...) with the module's name, or another form of it: what a layer makes of "
        "its width (a norm over it, a mean, a scale such as LoRA's alpha / r) has to be the same "
        "at all of them; a block that may be left out adds what it makes to its input",
    )


def _movable_units(
    full: nn.Module,
    rungs: Sequence[BuiltRung],
    values: Mapping[str, Any],
    asked: Asked,
) -> int:
    """In how many parts every axis that is cut falls, the most of which any will do as well as the
    first; 0 where there are none: sizes are not in proportion, or the order of units matters."""
    cuts = [rung.cuts(full) for rung in rungs]
    shares = [rung.share(full) for rung in rungs]
    lengths: dict[tuple[str, int], int] = {}
    for rung, own in zip(rungs, cuts, strict=True):
        for name, axis in own:
            blocks = rung.pieces[name].blocks or (1,) * (axis + 1)
            lengths[name, axis] = _tensors(full)[name].shape[axis] // blocks[axis]
    for rung, own, share in zip(rungs, cuts, shares, strict=True):
        names = _tensors(rung.model)
        uncut = any(name in names and (name, axis) not in own for name, axis in lengths)
        if set(own.values()) - {share} or (share < 1 and uncut):
            return 0
    most = math.gcd(*lengths.values())
    least = math.lcm(*(share.denominator for share in shares))
    for units in (each for each in range(most, 0, -1) if most % each == 0 == each % least):
        with contextlib.suppress(ExportError):
            for rung, share in zip(rungs, shares, strict=True):
                chosen = _others(units, int(share * units))
                _prove(full, rung, values, *asked, units=Units(units, chosen))
            return units
    return 0


def _others(units: int, kept: int) -> Any:
    """So many units at random, not all of them the first."""
    found = np.sort(np.random.default_rng(0).permutation(units)[:kept])
    return found if (found != np.arange(kept)).any() else np.arange(units - kept, units)


def _take(
    rung: BuiltRung, values: Mapping[str, Any], units: Units | None = None
) -> Mapping[str, Any]:
    """Give the rung's model its part of the full one's values, which is returned."""
    own = {name: tuple(each.shape) for name, each in _tensors(rung.model).items()}
    try:
        parts = part_of(values, _unplaced(rung), own, units=units)
    except ArtifactError as error:
        raise ExportError(
            f"{rung.name}: {error}",
            instead="a function whose smaller models have no axis that is longer than the full "
            "model's",
        ) from error
    with torch.no_grad():
        for name, each in _tensors(rung.model).items():
            each.copy_(torch.from_numpy(parts[name].copy()))
    return parts


def _told_apart(full: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, unequal where all of a trained tensor are one: what an adapter, a gate or a norm
    that begins at zero makes of its input shows only after the first step."""
    rng, found = np.random.default_rng(0), dict(values)
    for name, parameter in full.named_parameters():
        value = values.get(name)
        if value is None or not parameter.requires_grad or not value.size:
            continue
        first = value.flat[0]
        if (value == first).all():
            share = rng.uniform(-_UNEQUAL, _UNEQUAL, value.shape).astype(np.float32)
            found[name] = (first + share * (abs(first) or 1)).astype(np.float32)
    return found


def _unplaced(rung: BuiltRung) -> Submodel:
    return Submodel(1, 1, "0" * 64, rung.pieces)


def _is_factored(rung: BuiltRung) -> bool:
    return any(piece.role != "slice" for piece in rung.pieces.values())


class _Skipped(nn.Module):
    """In the place of a block that a rung lacks: what comes in goes out."""

    def forward(self, input: Tensor, *_: object, **__: object) -> Tensor:
        return input


def _lacking(full: nn.Module, part: nn.Module) -> tuple[str, ...]:
    """Names of the outermost modules of the full model that the part lacks."""
    own = dict(part.named_modules(remove_duplicate=False))
    found: list[str] = []
    for name, module in full.named_modules():
        is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if name not in own and not is_list and not is_under(name, found):
            found.append(name)
    return tuple(found)


def _with_the_rest_off(
    full: nn.Module,
    rung: BuiltRung,
    values: Mapping[str, Any],
    parts: Mapping[str, Any],
    skipped: Sequence[str],
    units: Units | None,
) -> nn.Module:
    """The full model as the rung is, without what is skipped."""
    same = copy.deepcopy(full)
    for name in skipped:
        path, _, child = name.rpartition(".")
        setattr(same.get_submodule(path), child, _Skipped())
    with torch.no_grad():
        for name, each in _tensors(same).items():
            each.copy_(_switched_off(rung, name, values[name], parts, units))
    return same


def _switched_off(
    rung: BuiltRung, name: str, value: Any, parts: Mapping[str, Any], units: Units | None
) -> Tensor:
    """The full model's tensor as the rung has it: truncated, or zero outside the slice."""
    factors = {p.role: parts[n] for n, p in rung.pieces.items() if p.of == name}
    if "left" in factors:
        product = factors["left"].astype("f8") @ factors["right"]
        return torch.from_numpy(product.reshape(value.shape).astype("f4"))
    if name not in parts and "left" not in factors:
        return torch.zeros(value.shape)
    if name not in rung.pieces:
        return torch.from_numpy(value.copy())
    kept = torch.zeros(value.shape).numpy()
    at = slice_of(parts[name].shape, value.shape, rung.pieces[name].blocks, units)
    kept[at] = parts[name]
    return torch.from_numpy(kept)


class _Precision(TorchDispatchMode):
    """Whether all that is computed inside is float64: a model may have numbers of its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.exact = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, Tensor) and each.is_floating_point():
                self.exact &= each.dtype == torch.float64
        return found


@dataclass(frozen=True)
class _Seen:
    """What a model predicts of the example batch, or its loss, by name; the squared size of each
    module's output, by its path; and whether all of it is float64."""

    outputs: Mapping[str, Tensor]
    norms: Mapping[str, Sequence[Tensor]]
    exact: bool

    def unequal(self, found: _Seen, tolerance: float) -> list[str]:
        """Names of the outputs that are others there."""
        theirs = found.outputs
        return [
            name
            for name in {**self.outputs, **theirs}
            if not (name in self.outputs and name in theirs)
            or not _equal([self.outputs[name]], [theirs[name]], tolerance)
        ]


def _outputs(
    model: nn.Module,
    loss: LossFunction | LossesFunction,
    batch: Mapping[str, Tensor],
    predict: PredictFunction | None,
) -> _Seen:
    """In evaluation mode and float64."""
    double = copy.deepcopy(model).double().eval()
    norms: dict[str, list[Tensor]] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, output: object) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                norms[path] = [output.detach().square().sum()]

        return hook

    for path, module in double.named_modules():
        if path and not isinstance(module, Factors):
            module.register_forward_hook(note(path))
    wide = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    with torch.no_grad(), without_fast_path(), _Precision() as precision:
        found: Any = loss(double, wide) if predict is None else predict(double, wide)
    tensors: dict[str, Tensor] = {}
    for each in found if isinstance(found, tuple) else (found,):
        tensors |= each if isinstance(each, Mapping) else {"loss": each}
    return _Seen(tensors, norms, precision.exact)


def _equal(expected: Sequence[Tensor], found: Sequence[Tensor], tolerance: float) -> bool:
    if len(expected) != len(found):
        return False
    for one, other in zip(expected, found, strict=True):
        if one.shape != other.shape:
            return False
        size = max(1.0, float(one.abs().max()) if one.numel() else 0.0)
        if one.numel() and not float((one - other).abs().max()) <= tolerance * size:
            return False
    return True


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
