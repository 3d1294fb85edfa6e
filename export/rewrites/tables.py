"""Reading by brackets, masks and numbers of rows, in forms that stay free in what they meet."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from export.errors import ExportError
from export.rewrites import RECORDED, TRAINED, taking
from export.short_gradients import ShortGradient
from export.symbols import expression, may_be_empty, never_negative


class _NumberedRows(ShortGradient):
    """Rows ``start`` to ``stop`` along one axis of a table of fixed length."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, axis: int, start: Any, stop: Any) -> Tensor:
        ctx.place = axis, table.shape[axis], start, stop
        return table.index_select(axis, _numbers(start, stop))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        axis, length, start, stop = ctx.place
        around = [0, 0] * (grad.dim() - 1 - axis)
        return torch.constant_pad_nd(grad, [*around, start, length - stop]), None, None, None


def _refusal(size: Any) -> Tensor:
    """Zero [1], looked up where no row is if the size is below 0: the device refuses the step.

    Brackets count such a start or end from the table's end, for which a graph has no shape.
    """
    row = 2 * torch.sym_min(size, 0)
    at = torch.scalar_tensor(row, dtype=torch.int64).reshape(1)
    return torch.zeros(1, dtype=torch.int64).index_select(0, at)


def _free(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def _by_data(number: Any) -> bool:
    """Whether it is a number that was read out of a tensor."""
    return _free(number) and may_be_empty(number)


def _at(number: Any) -> Tensor:
    return torch.scalar_tensor(number, dtype=torch.int64).reshape(1)


def _is_decided(item: Any) -> bool:
    """Whether it is a slice from or up to a place that was read out of a tensor."""
    if not isinstance(item, slice) or item.step not in (None, 1):
        return False
    return _by_data(item.start) or _by_data(item.stop)


def _numbers(start: Any, stop: Any) -> Tensor:
    """The rows' numbers from a start to a stop; the step is refused where there are no such."""
    rows = torch.arange(stop - start) + start if _by_data(start) else torch.arange(start, stop)
    lengths = (start, stop - start)
    if any(map(_by_data, lengths)) or not all(never_negative(expression(n)) for n in lengths):
        rows = rows + _refusal(torch.sym_min(*lengths))
    return rows


def _ends(item: slice, size: Any) -> tuple[Any, Any]:
    return 0 if item.start is None else item.start, size if item.stop is None else item.stop


def _takes_one_axis(item: Any) -> bool:
    plain = isinstance(item, (int, torch.SymInt, slice)) and not isinstance(item, bool)
    return plain or _is_place(item)


def _is_place(item: Any) -> bool:
    """Whether it is a number in a tensor; torch reads uint8 as a mask."""
    return isinstance(item, Tensor) and item.dim() == 0 and item.dtype in _PLACES


_PLACES = (torch.int64, torch.int32, torch.int16, torch.int8)


def sliced(table: Tensor, key: Any) -> Any:
    """``table[key]``: a slice of a fixed axis that ends at a free size reads rows by number.

    A tensor that holds one number reads the row of that number.
    """
    items = list(key) if isinstance(key, tuple) else [key]
    rest: list[Any] = []
    result, axis = table, 0
    for place, item in enumerate(items):
        if item is Ellipsis:
            later = items[place + 1 :]
            if not all(each is None or _takes_one_axis(each) for each in later):
                return table[key]
            axis = result.dim() - sum(each is not None for each in later)
            rest.append(item)
            continue
        if item is None:
            rest.append(item)
            continue
        if not _takes_one_axis(item):
            return table[key]
        before: list[Any] = [slice(None)] * axis
        if isinstance(item, slice) and _reads_rows(item, result.shape[axis]):
            start, stop = _ends(item, result.shape[axis])
            result = _NumberedRows.apply(result, axis, start, stop)
            item = slice(None)
        elif isinstance(item, slice) and _may_end_before(item, result.shape[axis]):
            start, stop = (_within(place, result.shape[axis]) for place in (item.start, item.stop))
            result = torch.ops.aten.slice(result, axis, start, stop, item.step or 1)
            item = slice(None)
        elif _by_data(item):
            result, item = result[(*before, _at(item))], 0
        elif _free(item):
            # torch's own brackets make a number of a free size.
            result = result.select(axis, item)
            continue
        elif _is_place(item):
            result, item = result[(*before, item.reshape(1))], 0
        rest.append(item)
        axis += 1
    return table[key] if result is table else result[tuple(rest)]


def assigned(x: Tensor, key: Any, value: Any) -> None:
    """``x[key] = value``: at a number that a tensor holds, through a mask of that place."""
    value = torch.scalar_tensor(value, dtype=x.dtype) if _free(value) else value
    items = list(key) if isinstance(key, tuple) else [key]
    items = [_at(item).reshape(()) if _by_data(item) else item for item in items]
    if sum(map(_is_decided, items)) == 1 and all(map(_takes_whole_axis, items)):
        x[
            tuple(
                _numbers(*_ends(item, size)) if _is_decided(item) else item
                for item, size in zip(items, x.shape, strict=False)
            )
        ] = value
        return
    if not any(map(_is_place, items)) or not all(map(_takes_part, items)):
        x[key] = value
        return
    # The axes of the view that the places lie on, each of them whole.
    view = x[tuple(slice(None) if _is_place(item) else item for item in items)]
    dots = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    mask = torch.ones((), dtype=torch.bool)
    filled = torch.as_tensor(value, dtype=x.dtype)
    axes = {}
    for i, item in enumerate(items):
        if _is_place(item):
            early = i < dots
            others = items[:i] if early else items[i + 1 :]
            kept = sum(_is_place(one) or one is None or isinstance(one, slice) for one in others)
            axes[kept if early else view.dim() - 1 - kept] = item
    for axis, item in sorted(axes.items()):
        after = view.dim() - 1 - axis
        number = torch.arange(view.shape[axis])
        # Read from the numbers: one from the end is counted so, and one beyond is refused.
        here = number == number[item.reshape(1)]
        mask = mask & here.reshape([-1] + [1] * after)
        if filled.dim() > after:
            filled = filled.unsqueeze(filled.dim() - after)
    view.copy_(torch.where(mask, filled, view))


def _takes_whole_axis(item: Any) -> bool:
    return _takes_one_axis(item) and not _is_place(item)


def _takes_part(item: Any) -> bool:
    return item is None or item is Ellipsis or _takes_one_axis(item)


def _reads_rows(item: slice, size: Any) -> bool:
    """Whether a slice ends at what data decide, or of a fixed axis from there to a free size."""
    if _is_decided(item):
        return True
    if item.step not in (None, 1) or _free(size) or not _free(item.stop):
        return False
    return item.start is None or _free(item.start) or int(item.start) >= 0


def _may_end_before(item: slice, size: Any) -> bool:
    """Whether a slice of a free axis starts or stops at a number that the axis may not reach."""
    return _free(size) and any(map(_is_beyond_one, (item.start, item.stop)))


def _is_beyond_one(place: Any) -> bool:
    """Whether it is a number of places that an axis may be too short for."""
    return isinstance(place, int) and 1 < abs(place) < sys.maxsize


def _within(place: Any, size: Any) -> Any:
    """Such a number of places from the start, or below 0 from the end, and not beyond the axis."""
    if not _is_beyond_one(place):
        return place
    reached = torch.sym_min(size, abs(place))
    return reached if place > 0 else size - reached


def masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """``torch.masked_select``: the elements at the mask's true places, in order."""
    if mask.shape == (input.shape[0], *[1] * (input.dim() - 1)):
        # Whole rows.
        return input[mask.reshape(-1)].reshape(-1)
    input, mask = torch.broadcast_tensors(input, mask)
    return input[mask]


def masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """``torch.masked_scatter``: the source's first elements, in order, at the true places."""
    input, mask = torch.broadcast_tensors(input, mask)
    number = (mask.reshape(-1).cumsum(0) - 1).clamp(min=0)
    return torch.where(mask, source.reshape(-1)[number].reshape(input.shape), input)


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """``torch.bincount``: of ``minlength`` classes, or as many as there are.

    Where there are more than ``minlength``, torch's result is longer; the device refuses the step.
    """
    classes: Any = minlength or input.max().to(torch.int64).item() + 1
    if weights is None:
        ones = torch.ones_like(input, dtype=torch.int64)
    else:
        single = weights.dtype == torch.float32
        ones = weights.detach().to(torch.float32 if single else torch.float64)
    return torch.zeros(classes, dtype=ones.dtype).index_add(0, input, ones)


def fill_diagonal_(input: Tensor, value: float, wrap: bool = False) -> Tensor:
    """``Tensor.fill_diagonal_``: where all of a place's indices are equal.

    ``wrap`` begins anew below the square part of a tall matrix.
    """
    if input.dim() == 2 and wrap:
        rows, columns = input.shape
        number = torch.arange(rows).unsqueeze(1) * columns + torch.arange(columns)
        return input.masked_fill_(number % (columns + 1) == 0, value)
    first, *others = (
        torch.arange(size).reshape([-1] + [1] * (input.dim() - 1 - axis))
        for axis, size in enumerate(input.shape)
    )
    diagonal = first == others[0]
    for other in others[1:]:
        diagonal = diagonal & (first == other)
    return input.masked_fill_(diagonal, value)


RECORDED.equals(
    {
        Tensor.__getitem__: sliced,
        Tensor.__setitem__: assigned,
        Tensor.masked_select: masked_select,
        torch.masked_select: masked_select,
        Tensor.masked_scatter: masked_scatter,
        torch.masked_scatter: masked_scatter,
        Tensor.fill_diagonal_: fill_diagonal_,
        Tensor.bincount: bincount,
        torch.bincount: bincount,
    }
)


# Bags of embeddings as a lookup and a sum, lookups that first shorten the rows they read, and
# one-hot rows that refuse a class that is none.


@taking(functional.embedding_bag)
def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None, mode: str, settings: Mapping[str, Any]
) -> Tensor:
    """``torch.nn.functional.embedding_bag``.

    input int64 [bags, n], or [total] with ``offsets`` [bags]; result float32 [bags, dim].
    """
    if mode == "max" and offsets is not None:
        raise ExportError(
            "embedding bags in mode 'max' by offsets",
            operator="embedding_bag",
            instead="bags of one length [bags, n], with padding_idx in the places left over",
        )
    padding_idx, per_sample = settings["padding_idx"], settings["per_sample_weights"]
    if settings["scale_grad_by_freq"]:
        raise ExportError(
            "an embedding's gradient scaled by frequency",
            operator="embedding_bag",
            instead="scale_grad_by_freq=False",
        )
    short = {name: settings[name] for name in ("max_norm", "norm_type")}
    rows: Tensor = embedding(input, weight, **short)
    counted = torch.ones_like(input).to(weight.dtype)
    if padding_idx is not None:
        counted = (input != padding_idx % weight.shape[0]).to(weight.dtype)
        if mode == "max":
            return _largest(rows, counted.unsqueeze(-1) > 0)
        rows = rows * counted.unsqueeze(-1)
    if mode == "max":
        return _largest(rows, torch.ones_like(rows, dtype=torch.bool))
    if per_sample is not None:
        rows = rows * per_sample.unsqueeze(-1)
    if offsets is None:
        total, count = rows.sum(1), counted.sum(1)
    else:
        # A lookup that refuses the offsets that torch refuses: those beyond the input.
        ends = torch.zeros(input.shape[0] + 1, dtype=offsets.dtype)
        offsets = offsets + ends.index_select(0, offsets)
        starts = offsets[:-1] if settings["include_last_offset"] else offsets
        position = torch.arange(input.shape[0])
        bag = (position.unsqueeze(1) >= starts.unsqueeze(0)).sum(1) - 1
        empty = torch.zeros(starts.shape[0], weight.shape[1], dtype=weight.dtype)
        total = empty.index_add(0, bag, rows)
        count = torch.zeros(starts.shape[0], dtype=weight.dtype).index_add(0, bag, counted)
    if mode == "sum":
        return total
    return total / count.clamp(min=1).unsqueeze(-1)


def _largest(rows: Tensor, counted: Tensor) -> Tensor:
    """The largest counted element of each bag, by the first of equal ones; 0 in an empty bag."""
    counted = counted.expand(rows.shape)
    place = rows.masked_fill(~counted, float("-inf")).argmax(1, keepdim=True)
    found = rows.gather(1, place).squeeze(1)
    return found * counted.any(1)


@taking(functional.embedding)
def embedding(input: Tensor, weight: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """``torch.nn.functional.embedding``; ``max_norm`` shortens the table's rows, as torch does."""
    max_norm = settings["max_norm"]
    if max_norm is not None:
        with torch.no_grad():
            places = input.reshape(-1)
            rows = functional.embedding(places, weight)
            norms = torch.linalg.vector_norm(rows, settings["norm_type"], 1, keepdim=True)
            # torch's own term against a division by zero.
            shorter = rows * (max_norm / (norms + 1e-7))
            weight[places] = torch.where(norms > max_norm, shorter, rows)
    plain = {name: settings[name] for name in ("padding_idx", "scale_grad_by_freq")}
    return functional.embedding(input, weight, **plain)


def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """``torch.nn.functional.one_hot``, which is recorded as a comparison that is true of no class.

    As a lookup first, it refuses what torch refuses.
    """
    classes = torch.arange(input.max().item() + 1 if num_classes == -1 else num_classes)
    return (functional.embedding(input, classes.unsqueeze(1)) == classes).to(torch.int64)


RECORDED.equals({functional.embedding: embedding})
RECORDED.replaces((functional, "embedding_bag", embedding_bag))
TRAINED.equals({functional.one_hot: one_hot})
