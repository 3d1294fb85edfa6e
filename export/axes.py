"""Named dynamic axes: which sizes may vary at run time, and with what sizes to trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from export.errors import ExportError

Shape = tuple[int | str, ...]

# Traced sizes: primes that differ from each other and from usual layer sizes, so that two axes
# can not be taken for one, nor an axis for a fixed size.
_TRACE_SIZES = (211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271)


@dataclass(frozen=True)
class Axes:
    """The named axes of one artifact.

    ``of`` maps a tensor to ``{dimension: axis name}``: a batch entry by ``batch.<name>``, a
    parameter or buffer by ``state.<name>``, since either may have the other's name. ``example``
    maps an axis to its size in the example batch and the model's parameters.
    """

    of: Mapping[str, Mapping[int, str]]
    example: Mapping[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.example)

    def shape(self, name: str, sizes: Sequence[int]) -> Shape:
        """A tensor's shape with names where sizes may vary."""
        named = self.of.get(name, {})
        return tuple(named.get(i, int(size)) for i, size in enumerate(sizes))

    def trace_sizes(self) -> dict[str, int]:
        """The size with which each axis is traced."""
        return dict(zip(self.example, _TRACE_SIZES, strict=False))

    def concrete(self, shape: Shape, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """A named shape with sizes filled in."""
        return tuple(sizes[size] if isinstance(size, str) else size for size in shape)


def parse_axes(
    dynamic: Mapping[str, Mapping[int, str]],
    batch: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
) -> Axes:
    """Check ``dynamic`` against the example batch and the parameters it names.

    A name that both have is the batch entry's. Raises ExportError for an unknown tensor, a
    dimension out of range, or one axis name with two sizes.
    """
    example: dict[str, int] = {}
    seen_at: dict[str, str] = {}
    of: dict[str, dict[int, str]] = {}
    for name, dims in dynamic.items():
        tensors, kind = (batch, "batch") if name in batch else (parameters, "state")
        if name not in tensors:
            known = ", ".join(sorted({*batch, *parameters})) or "none"
            raise ExportError(
                f"dynamic names {name!r}, which is neither a batch tensor nor a parameter",
                instead=f"one of: {known}",
            )
        shape = tuple(tensors[name].shape)
        named = of[f"{kind}.{name}"] = {}
        for dim, axis in dims.items():
            if not -len(shape) <= dim < len(shape):
                raise ExportError(
                    f"dynamic[{name!r}] names dimension {dim}, but its shape is {list(shape)}"
                )
            if not axis.isidentifier():
                raise ExportError(
                    f"dynamic[{name!r}][{dim}] = {axis!r} is not an axis name",
                    instead="a name of letters, digits and underscores",
                )
            at = dim % len(shape)
            size = int(shape[at])
            if example.setdefault(axis, size) != size:
                raise ExportError(
                    f"axis {axis!r} is {example[axis]} in {seen_at[axis]!r} but {size} in {name!r}",
                    instead="two axis names, or an example batch whose sizes agree",
                )
            seen_at.setdefault(axis, name)
            named[at] = axis
    if len(example) > len(_TRACE_SIZES):
        raise ExportError(f"{len(example)} named axes; at most {len(_TRACE_SIZES)} are supported")
    return Axes(of=of, example=example)
