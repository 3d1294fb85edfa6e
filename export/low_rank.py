"""Low rank: a model whose large layers are two factors each, as rungs of a ladder are.

A matrix W [m, n] becomes L [m, r] times R [r, n] (Yao et al. 2021, FedHM, section 3), with a scale
[r] between them that a step leaves as it is (``device_sdk.artifact.submodels.Basis.factor``).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

import torch.nn.functional as functional
from torch import Tensor, nn

from device_sdk.artifact.parts import is_under
from device_sdk.artifact.submodels import Piece
from export.rung import BuiltRung

LEAST_SIDE = 16
"""A matrix with a shorter side is small beside its layer's activations, and stays whole."""


class Factors(nn.Module):
    """A matrix [m, n] as ``left`` [m, r] times diag(``scale``) [r] times ``right`` [r, n]."""

    scale: Tensor

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        matrix = weight.detach().flatten(1)
        self.left = nn.Parameter(matrix.new_zeros(len(matrix), rank))
        self.right = nn.Parameter(matrix.new_zeros(rank, matrix.shape[1]))
        self.register_buffer("scale", matrix.new_ones(rank))

    @property
    def inner(self) -> Tensor:
        """What ``left`` is multiplied by, [r, n]."""
        return self.scale[:, None] * self.right


class LowRankLinear(nn.Linear):
    """``x V' U' + b``: of [.., n] by way of [.., r]."""

    factors: Any

    def forward(self, input: Tensor) -> Tensor:
        inner = functional.linear(input, self.factors.weight.inner)
        return functional.linear(inner, self.factors.weight.left, self.bias)


class _LowRankConv:
    """The kernel's own convolution to r channels, then one of 1 x 1."""

    factors: Any
    kernel_size: tuple[int, ...]
    in_channels: int
    stride: Any
    padding: Any
    dilation: Any
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        convolve = getattr(functional, f"conv{len(self.kernel_size)}d")
        right = self.factors.weight.inner
        kernel = right.reshape(len(right), self.in_channels, *self.kernel_size)
        inner = convolve(
            input, kernel, stride=self.stride, padding=self.padding, dilation=self.dilation
        )
        left = self.factors.weight.left
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


class LowRankEmbedding(nn.Embedding):
    """Rows of U, then times V."""

    factors: Any

    def forward(self, input: Tensor) -> Tensor:
        rows = functional.embedding(input, self.factors.weight.left, self.padding_idx)
        found: Tensor = rows @ self.factors.weight.inner
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


def _factored(layer: nn.Module, ranks: Mapping[str, int]) -> nn.Module:
    """A layer whose weights ``ranks`` are factors. Whoever reads one of them (a loss, a model whose
    scores are products with its own embedding) gets the product, made anew."""
    made = copy.copy(layer)
    made._parameters = {n: p for n, p in layer._parameters.items() if n not in ranks}
    made._modules = dict(layer._modules)
    made._modules["factors"] = nn.ModuleDict(
        {weight: Factors(getattr(layer, weight), rank) for weight, rank in ranks.items()}
    )
    shapes = {weight: getattr(layer, weight).shape for weight in ranks}

    def product(weight: str) -> property:
        def read(self: Any) -> Tensor:
            factors = self.factors[weight]
            found: Tensor = (factors.left @ factors.inner).reshape(shapes[weight])
            return found

        return property(read)

    known: dict[str, Any] = {weight: product(weight) for weight in ranks}
    if isinstance(layer, nn.RNNBase):
        known["_flat_weights"] = property(
            lambda self: [getattr(self, each) for each in self._flat_weights_names],
            lambda self, given: None,  # torch gathers them anew when it moves a model
        )
    kind = _FORMS.get(type(layer), type(layer))
    made.__class__ = type(kind.__name__, (kind,), known)
    return made


def of_rank(model: nn.Module, share: float, whole: Collection[str]) -> BuiltRung:
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
            setattr(parent, child, _factored(layer, ranks))
            for weight in ranks:
                for role in ("left", "scale", "right"):
                    pieces[f"{full}.factors.{weight}.{role}"] = Piece(f"{full}.{weight}", role)
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
