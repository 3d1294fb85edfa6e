"""A submodel as a module, and the proof that it is what it says: a part of the full model."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from device_sdk.artifact import ArtifactError
from device_sdk.artifact.parts import is_under
from device_sdk.artifact.submodels import Piece, Submodel, Units, part_of, slice_of
from export.errors import ExportError
from export.insides import TorchDispatchMode
from export.rewrites.patch import without_fast_path
from export.step import LossesFunction, LossFunction, PredictFunction

_UNEQUAL = 0.1
_TOLERANCE = 1e-9
"""Of outputs that have to be equal, beside the largest; they are computed in float64. At first
values much is near to linear, and what is another function differs by little."""
_COARSE_TOLERANCE = 1e-5
"""Where float32 comes in: as factors' product, or in the model's own code."""

Asked = tuple[LossFunction | LossesFunction, Mapping[str, Tensor], PredictFunction | None]
"""Loss, example batch and prediction: what two models are compared by."""


@dataclass(frozen=True)
class BuiltRung:
    """A submodel: its module, and which of its tensors are parts of the full model's."""

    name: str
    model: nn.Module
    pieces: Mapping[str, Piece]

    def cuts(self, full: nn.Module) -> dict[tuple[str, int], Fraction]:
        """By tensor and axis that it cuts, its share of the full model's rows."""
        own, whole = tensors_in(self.model), tensors_in(full)
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
            for name in tensors_in(self.model)
            if (self.pieces[name].of if name in self.pieces else name) in tensors
        )


def tensors_in(model: nn.Module) -> dict[str, Tensor]:
    """The model's float32 parameters and buffers by name: what a rung may have a part of."""
    own = (*model.named_parameters(), *model.named_buffers())
    return {name: each.detach() for name, each in own if each.dtype == torch.float32}


def prove(
    full: nn.Module,
    rung: BuiltRung,
    values: Mapping[str, Any],
    loss: LossFunction | LossesFunction,
    batch: Mapping[str, Tensor],
    predict: PredictFunction | None,
    units: Units | None = None,
) -> None:
    """Give the rung's model these values, and compare it with the full one that it is a part of;
    its slices are of ``units``, or the first. Raises ExportError, naming the module, where its
    outputs are not those of the full model with the rest switched off."""
    parts = take(rung, values, units)
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


def movable_units(
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
            lengths[name, axis] = tensors_in(full)[name].shape[axis] // blocks[axis]
    for rung, own, share in zip(rungs, cuts, shares, strict=True):
        names = tensors_in(rung.model)
        uncut = any(name in names and (name, axis) not in own for name, axis in lengths)
        if set(own.values()) - {share} or (share < 1 and uncut):
            return 0
    most = math.gcd(*lengths.values())
    least = math.lcm(*(share.denominator for share in shares))
    for units in (each for each in range(most, 0, -1) if most % each == 0 == each % least):
        with contextlib.suppress(ExportError):
            for rung, share in zip(rungs, shares, strict=True):
                chosen = _others(units, int(share * units))
                prove(full, rung, values, *asked, units=Units(units, chosen))
            return units
    return 0


def _others(units: int, kept: int) -> Any:
    """So many units at random, not all of them the first."""
    found = np.sort(np.random.default_rng(0).permutation(units)[:kept])
    return found if (found != np.arange(kept)).any() else np.arange(units - kept, units)


def take(
    rung: BuiltRung, values: Mapping[str, Any], units: Units | None = None
) -> Mapping[str, Any]:
    """Give the rung's model its part of the full one's values, which is returned."""
    own = {name: tuple(each.shape) for name, each in tensors_in(rung.model).items()}
    try:
        parts = part_of(values, _unplaced(rung), own, units=units)
    except ArtifactError as error:
        raise ExportError(
            f"{rung.name}: {error}",
            instead="a function whose smaller models have no axis that is longer than the full "
            "model's",
        ) from error
    with torch.no_grad():
        for name, each in tensors_in(rung.model).items():
            each.copy_(torch.from_numpy(parts[name].copy()))
    return parts


def told_apart(full: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
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
        for name, each in tensors_in(same).items():
            each.copy_(_switched_off(rung, name, values[name], parts, units))
    return same


def _switched_off(
    rung: BuiltRung, name: str, value: Any, parts: Mapping[str, Any], units: Units | None
) -> Tensor:
    """The full model's tensor as the rung has it: truncated, or zero outside the slice."""
    factors = {p.role: parts[n] for n, p in rung.pieces.items() if p.of == name}
    if "left" in factors:
        product = factors["left"].astype("f8") * factors["scale"] @ factors["right"]
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
        if path:
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
