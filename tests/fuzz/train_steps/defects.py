"""Defects of the exporter, each a line of it changed: what random train steps have to find.

The first were in it once, and gave wrong graphs; the others are what one gets wrong easily.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """In ``file`` stands ``was``, once; the defect is ``now`` in its place."""

    what: str
    file: str
    was: str
    now: str


_ELEMENTWISE = "export/lowering/elementwise.py"
_INDEXING = "export/lowering/indexing.py"
_REDUCTIONS = "export/lowering/reductions.py"
_SHAPES = "export/lowering/shapes.py"
_POOLING = "export/lowering/pooling.py"
_CONVOLUTION = "export/lowering/convolution.py"
_SIMPLIFY = "export/convert.py"
_BROKEN_UP = "export/lowering/decompositions.py"

ONCE = (
    Defect(
        "parts joined along another axis are the whole",
        _SIMPLIFY,
        "return len(self._shape(name) or ()) == 1",
        "return True",
    ),
    Defect(
        "parts with an axis more are the whole",
        _SIMPLIFY,
        'node.op_type == "Concat" and all(map(self._vector, node.input))',
        'node.op_type == "Concat"',
    ),
    Defect(
        "parts of a matrix, flattened, are the whole",
        _SIMPLIFY,
        "list(first.output) == list(parts) and self._vector(source)",
        "list(first.output) == list(parts)",
    ),
    Defect("a sum that keeps no axis loses one", _SIMPLIFY, "if not kept or axes", "if axes"),
    Defect(
        "a write through a view, of what is only returned",
        "export/mutation.py",
        "nodes_behind({nodes[-1]})",
        "nodes_behind(set(nodes[-1].all_input_nodes))",
    ),
    Defect(
        "views do not see a write",
        "export/mutation.py",
        "if _writes(node) and _read_later(",
        "if False and _read_later(",
    ),
    Defect(
        "the maximum of -inf alone is a number",
        _POOLING,
        "if x.dtype == torch.float32 and _may_hold_least(g, x.name):",
        "if False:",
    ),
    Defect(
        "index_fill along an axis from the end",
        _INDEXING,
        "[*[None] * (dim % a.rank), index], Value(name",
        "[*[None] * dim, index], Value(name",
    ),
    Defect(
        "a product of a transposed matrix and a vector",
        _REDUCTIONS,
        'g.op("Squeeze", gemm(g, a, column), g.ints([1]))',
        'g.op("MatMul", a, b)',
    ),
    Defect(
        "decay of parameters without a gradient",
        "export/step.py",
        "            if gradient is not None:\n                found.add(name)\n",
        "            found.add(name)\n            if gradient is not None:\n",
    ),
)

OTHERS = (
    Defect(
        "swapped operands",
        _ELEMENTWISE,
        "left, right = operands(g, tuple(out.shape), [b, a], out.dtype)",
        "left, right = operands(g, tuple(out.shape), [a, b], out.dtype)",
    ),
    Defect(
        "a factor of an addend is dropped",
        _ELEMENTWISE,
        "Value(_scaled(g, b, alpha, out.dtype), out.dtype, b.shape)",
        "b",
    ),
    Defect("a broadcast is dropped", _ELEMENTWISE, "is_full[index] = False", "pass"),
    Defect(
        "whole numbers divide towards 0",
        _ELEMENTWISE,
        'return g.op("Sub", quotient, g.cast(g.op("And", inexact, opposite), out.dtype))',
        "return quotient",
    ),
    Defect(
        "whole numbers are compared with a fraction's whole part",
        _ELEMENTWISE,
        "dtype = torch.result_type(torch.empty(1, dtype=a.dtype), cast(Number, b))",
        "dtype = a.dtype",
    ),
    Defect(
        "rounding towards 0 of negative numbers",
        _ELEMENTWISE,
        'return g.op("Mul", g.op("Floor", g.op("Abs", a)), g.op("Sign", a))',
        'return g.op("Floor", a)',
    ),
    Defect(
        "a clamp between bounds that cross",
        _ELEMENTWISE,
        "if numbers and low <= high and out",
        "if numbers and out",
    ),
    Defect(
        "a variance's divisor",
        _REDUCTIONS,
        "count - int(correction or 0)",
        "count",
    ),
    Defect("a long sum leaves out a group", _REDUCTIONS, "shape[first] // part,", "part,"),
    Defect(
        "a mean of rows by a product is a sum",
        _REDUCTIONS,
        'total = g.op("Div", total, g.scalar(rows, value.dtype))',
        "pass",
    ),
    Defect(
        "a sum over channels first takes the other axis",
        _REDUCTIONS,
        "there = sorted(map(other_axis, axes))",
        "there = axes",
    ),
    Defect(
        "an index of all elements keeps its axes",
        _REDUCTIONS,
        "return g.reshape(result, out.shape) if keepdim else result",
        "return result",
    ),
    Defect(
        "a softmax along another axis",
        _REDUCTIONS,
        "return g.op(op_type, g.cast(a, out.dtype), axis=dim)\n",
        "return g.op(op_type, g.cast(a, out.dtype), axis=-1)\n",
    ),
    Defect(
        "the smallest in place of the largest",
        _REDUCTIONS,
        'flags = {key: int(settings[key]) for key in ("largest", "sorted")}',
        'flags = {"largest": 1, "sorted": int(settings["sorted"])}',
    ),
    Defect(
        "transpositions composed the other way round",
        _SHAPES,
        "order = [before[dim] for dim in order]",
        "order = [order[dim] for dim in before]",
    ),
    Defect(
        "an expand of an expand forgets the axes in front",
        _SHAPES,
        'producer.op_type == "Expand" and len(a.shape) == len(out.shape):',
        'producer.op_type == "Expand":',
    ),
    Defect(
        "padding of the axes in the wrong order",
        _SHAPES,
        "begins[a.rank - 1 - i] = pad[2 * i]",
        "begins[a.rank - len(pad) // 2 + i] = pad[2 * i]",
    ),
    Defect(
        "a strided slice's gradient one place further",
        _INDEXING,
        "dim + 1, 0, stride - 1, grad.dtype",
        "dim + 1, stride - 1, 0, grad.dtype",
    ),
    Defect(
        "a place from the end is one off",
        _INDEXING,
        "torch.sym_max(size + place, 0)",
        "torch.sym_max(size + place - 1, 0)",
    ),
    Defect(
        "indices apart from each other put their axes first",
        _INDEXING,
        "axes[0] if together else 0",
        "axes[0]",
    ),
    Defect(
        "a write by index where its axes are not the first",
        _INDEXING,
        "order = [*range(place, place + rank), *range(place), *range(place + rank, len(full))]",
        "order = [*range(rank, rank + place), *range(rank), *range(place + rank, len(full))]",
    ),
    Defect(
        "a write by index without its sum",
        _INDEXING,
        'result = g.op("ScatterND", moved, where, update, reduction="add")',
        'result = g.op("ScatterND", moved, where, update)',
    ),
    Defect(
        "a scatter's mean counts what was there",
        _INDEXING,
        "1 if include_self else 0, out.dtype",
        "1, out.dtype",
    ),
    Defect(
        "a diagonal below the main one",
        _SHAPES,
        "columns * -offset",
        "-offset",
    ),
    Defect(
        "windows whose elements are not last",
        _SHAPES,
        "order = [*range(axis + 1), *range(axis + 2, a.rank + 1), axis + 1]",
        "order = list(range(a.rank + 1))",
    ),
    Defect(
        "a diagonal's gradient below the main one",
        _BROKEN_UP,
        "(rows if offset >= 0 else columns)",
        "rows",
    ),
    Defect(
        "a selection by a mask with axes behind it",
        _BROKEN_UP,
        "mask = masks[0].reshape([*masks[0].shape, *[1] * after])",
        "mask = masks[0]",
    ),
    Defect(
        "a product's second addend is not scaled",
        _REDUCTIONS,
        "added = bias.name if beta == 1 else",
        "added = bias.name if True else",
    ),
    Defect(
        "a product forgets that its matrix is transposed",
        _REDUCTIONS,
        "right, right_transposed = _untransposed(g, b)",
        "right, right_transposed = _untransposed(g, b)[0], 0",
    ),
    Defect(
        "an average's windows lie side by side",
        _POOLING,
        'pooled = g.op("AveragePool", name, kernel_shape=w.window, strides=w.steps)',
        'pooled = g.op("AveragePool", name, kernel_shape=w.window, strides=w.window)',
    ),
    Defect(
        "an average's gradient is cut at the wrong end",
        _POOLING,
        "*(-p for p in begins), 0, 0, *last]",
        "*last, 0, 0, *(-p for p in begins)]",
    ),
    Defect(
        "a convolution's pads",
        _CONVOLUTION,
        '"pads": [*self.padding, *self.padding],',
        '"pads": [*self.padding, *self.padding[::-1]],',
    ),
    Defect(
        "dropout without its scale",
        "export/rewrites/attention.py",
        "1 / (1 - p)",
        "1.0",
    ),
    Defect(
        "dropout in evaluation, too",
        "export/rewrites/attention.py",
        "list(input.shape)) if training else input",
        "list(input.shape))",
    ),
    Defect(
        "a normalisation's gradient without the mean's share",
        "export/rewrites/normalisation.py",
        "grad_x = (grad - (total * share) - centred * slope) * scale",
        "grad_x = (grad - centred * slope) * scale",
    ),
    Defect(
        "equal nodes whatever their attributes",
        "export/lowering/graph.py",
        "key = same_node(op_type, sources, wanted, given)",
        'key = same_node(op_type, sources, wanted, {**given, "axis": 0})',
    ),
)
