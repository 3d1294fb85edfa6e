"""The torch functions that random train steps are made of, and how their arguments are drawn.

An operation is a template of Python source: an expression, or statements that assign to ``out``.
What stands in braces is drawn from left to right: one of several words (``{sum|mean}``), or what
the :class:`Drawer` has under that name (``{x}``, ``{dim}``). Arguments need only be valid often:
what torch refuses is drawn again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

NAMES = re.compile(r"\{([^{}]*)\}")
LATER_RATHER = 2
"""Of how many places the last is taken: programs shall be deep."""


class Drawer:
    """Draws names of tensors, and arguments that fit the tensor that was named last.

    tensors: what the program holds so far. free: sizes that have a name, and the example's.
    """

    def __init__(
        self, rng: np.random.Generator, tensors: Mapping[str, Tensor], free: Mapping[str, int]
    ) -> None:
        self._rng = rng
        self._tensors = tensors
        self._free = free
        self._shape: tuple[int, ...] = ()
        self._axis = 0
        self._drawn: Mapping[str, Callable[[], str]] = {
            "x": lambda: self._taken(torch.float32),
            "int": lambda: self._taken(torch.int64),
            "bool": lambda: self._taken(torch.bool),
            "any": lambda: self._taken(None),
            "vector": lambda: self._taken(torch.float32, (1,)),
            "matrix": lambda: self._taken(torch.float32, (2,)),
            "cube": lambda: self._taken(torch.float32, (3,)),
            "many": lambda: self._taken(torch.float32, (1, 2, 3, 4)),
            "like": self._like,
            "same": lambda: self._of(torch.float32, f"torch.full({self._sizes()}, 0.7)"),
            "mask": lambda: self._of(torch.bool, f"({self.drawn('{same}')} > 0.3)"),
            "indices": lambda: self.drawn(f"{{same}}.argsort({self._axis})"),
            "places": self._places,
            "dim": self._dim,
            "dims": self._dims,
            "size": lambda: self._pick([*self._free, "1", "2"]),
            "new": lambda: self._between(-len(self._shape) - 1, len(self._shape) + 1),
            "axis": lambda: str(self._axis),
            "length": lambda: self._size(self._shape[self._axis]),
            "order": lambda: ", ".join(map(str, self._rng.permutation(len(self._shape)))),
            "shape": self._sizes,
            "last": lambda: self._sizes(self._shape[-1:]),
            "key": self._key,
            "reshaped": self._reshaped,
            "expanded": lambda: self._sizes([1, *(s if s > 1 else 3 for s in self._shape)]),
            "times": lambda: ", ".join(self.drawn("{1|1|2|3}") for _ in self._shape),
            "number": lambda: self.drawn("{0.3|-0.7|1.5|2.0|0.05|-1.0}"),
            "flag": lambda: self.drawn("{True|False}"),
        }

    def drawn(self, template: str) -> str:
        """The template with everything in braces drawn; LookupError where nothing fits."""
        while NAMES.search(template):
            template = NAMES.sub(lambda found: self._one(found[1]), template)
        return template

    def _one(self, name: str) -> str:
        words = name.split("|")
        return self._pick(words) if len(words) > 1 else self._drawn[name]()

    def _pick(self, words: Sequence[str]) -> str:
        return words[int(self._rng.integers(len(words)))]

    def _between(self, first: int, end: int) -> str:
        return str(self._rng.integers(first, end))

    def _named(self, fits: Callable[[Tensor], bool]) -> str:
        found = [name for name, tensor in self._tensors.items() if fits(tensor)]
        if not found:
            raise LookupError("no such tensor")
        return found[int(max(self._rng.integers(len(found), size=LATER_RATHER)))]

    def _taken(self, dtype: torch.dtype | None, ranks: Sequence[int] = range(9)) -> str:
        name = self._named(lambda t: t.dtype == (dtype or t.dtype) and t.dim() in ranks)
        self._shape = tuple(self._tensors[name].shape)
        return name

    def _of(self, dtype: torch.dtype, otherwise: str) -> str:
        """Of the last tensor's shape."""
        try:
            return self._named(lambda t: t.dtype == dtype and t.shape == self._shape)
        except LookupError:
            return otherwise

    def _like(self) -> str:
        """What may be combined with the last tensor."""

        def fits(tensor: Tensor) -> bool:
            pairs = zip(tensor.shape[::-1], self._shape[::-1], strict=False)
            return tensor.dtype == torch.float32 and all(
                1 in pair or len({*pair}) == 1 for pair in pairs
            )

        return self._named(fits) if self._rng.random() < 0.85 else self.drawn("{number}")

    def _places(self) -> str:
        """A vector of indices along the last axis that was drawn."""
        try:
            vector = self._named(lambda t: t.dtype == torch.int64 and t.dim() == 1)
        except LookupError:
            vector = "torch.arange(3)"
        return f"({vector} % {self.drawn('{length}')})"

    def _dim(self) -> str:
        rank = len(self._shape)
        if not rank:
            raise LookupError("a number has no axis")
        self._axis = int(self._rng.integers(-rank, rank))
        return str(self._axis)

    def _dims(self) -> str:
        rank = len(self._shape)
        if rank < 2 or self._rng.random() < 0.5:
            return self._dim()
        chosen = self._rng.permutation(rank)[: int(self._rng.integers(1, rank + 1))]
        return str(tuple(int(each) - rank * int(self._rng.integers(2)) for each in chosen))

    def _size(self, number: int) -> str:
        for name, size in self._free.items():
            if number and number % size == 0:
                return name if number == size else f"{number // size} * {name}"
        return str(number)

    def _sizes(self, shape: Sequence[int] | None = None) -> str:
        return (
            f"({''.join(f'{self._size(s)}, ' for s in (self._shape if shape is None else shape))})"
        )

    def _key(self) -> str:
        one = "{:|:|1:|:-1|::2|1::2|-2:|:2|-3:-1|:1|-1:|0|0|-1|1|None, :}"
        parts = [self.drawn(one) for _ in range(int(self._rng.integers(len(self._shape) + 1)))]
        if self._rng.random() < 0.2:
            parts.insert(int(self._rng.integers(len(parts) + 1)), "...")
        return ", ".join(parts) or "None"

    def _reshaped(self) -> str:
        """Axes merged, cut and added, perhaps with one -1."""
        shape = list(self._shape)
        for _ in range(int(self._rng.integers(1, 4))):
            at = int(self._rng.integers(len(shape) + 1))
            if at + 1 < len(shape) and self._rng.random() < 0.4:
                shape[at : at + 2] = [shape[at] * shape[at + 1]]
            elif at < len(shape) and shape[at] not in self._free.values():
                ways = [k for k in range(1, shape[at] + 1) if shape[at] % k == 0]
                first = ways[int(self._rng.integers(len(ways)))]
                shape[at : at + 1] = [first, shape[at] // first]
            else:
                shape.insert(at, 1)
        named = [self._size(each) for each in shape]
        if named and self._rng.random() < 0.5:
            named[int(self._rng.integers(len(named)))] = "-1"
        return f"({''.join(f'{each}, ' for each in named)})"


_POSITIVE = "({x}.abs() + 0.3)"

ELEMENTWISE = (
    "{x}.{tanh|sigmoid|exp|neg|abs|sin|cos|relu|square|erf|atan|sinh|expm1|asinh|cosh|logit}()",
    "{x}.{sign|floor|ceil|round|trunc|frac|detach|clone|contiguous|rad2deg|reciprocal}()",
    _POSITIVE + ".{log|sqrt|rsqrt|log1p|lgamma|log2|log10|digamma}()",
    _POSITIVE + " ** {number}",
    "functional.{gelu|silu|softplus|elu|selu|hardtanh|mish|leaky_relu|softsign|relu6}({x})",
    "functional.{hardswish|hardsigmoid|logsigmoid|celu|tanhshrink|softshrink|hardshrink}({x})",
    "{x} {+|-|*|*|+} {like}",
    "{x} {+|-|*|*|+} {like}",
    "{number} {+|-|*} {x}",
    "torch.{minimum|maximum|atan2|logaddexp}({x}, {same})",
    "{x} / ({like}.abs() + 0.3)",
    "{x} {%|//} {0.7|1.3|-0.9}",
    "{x} ** {0|1|2|3}",
    "2.0 ** {x}",
    "{x}.clamp({-0.5|-1.0|None}, {0.4|1.0})",
    "{x}.clamp(min={same})",
    "torch.lerp({x}, {same}, {0.3|{same}})",
    "torch.addcmul({x}, {same}, {like}, value={number})",
    "torch.addcdiv({x}, {same}, {same}.abs() + 0.5, value={number})",
    "functional.threshold({x}, 0.1, {number})",
    "torch.where({x} > {number}, {same}, {like})",
    "torch.where({bool}, {x}, {number})",
    "{x}.masked_fill({mask}, {number})",
    "functional.glu({many}, {dim})",
    "functional.dropout({x}, 0.3, self.training)",
    "torch.nan_to_num({x} / ({same} > -99))",
    "{x} {*|+} {mask}",
    "{x} * {int}.float() + {int}",
    "torch.{add|sub}({x}, {like}, alpha={number})",
    "torch.rsub({x}, {like}, alpha={number})",
    "{x}.clamp({0.5|-0.2}, {0.1|-0.5})",
    "{x}.masked_fill({mask}, -torch.inf).{softmax|logsumexp|amax}({dim}).nan_to_num(0, 0, 0)",
    "{x} * {1.5 if|0.5 if not} {length} {>|==|<} {1|2|{size}} else {x}",
    "{x} / max({length} - 1, 1)",
)

REDUCTIONS = (
    "{x}.{sum|mean|amax|amin|logsumexp|sum|mean}({dims}, keepdim={flag})",
    "{x}.norm({1|2|3}, {dims}, keepdim={flag})",
    "{x}.{sum|mean|amax|norm|prod|max|min}()",
    "{x}.{sum|prod|cumsum|softmax|log_softmax|argsort|logcumsumexp|cumprod|argmax|argmin}({dim})",
    "{x}.{max|min|median}({dim}, keepdim={flag})[{0|0|1}]",
    "{x}.{var|std}({dims}, unbiased={flag}, keepdim={flag})",
    "{x}.{cummax|cummin}({dim}).values",
    "torch.{var_mean|std_mean}({x}, {dim}, keepdim=True)[{0|1}]",
    "{bool}.{any|all|sum}({dim}, keepdim={flag})",
    "{int}.{sum|cumsum|prod}({dim})",
    "{x}.topk({1|2}, {dim}, largest={flag})[{0|0|1}]",
    "{x}.kthvalue({1|2}, {dim}).values",
    "{x}.sort({dim}, descending={flag})[{0|0|1}]",
    "functional.normalize({x}, dim={dim})",
    "functional.cosine_similarity({x}, {same}, {dim})",
    "torch.linalg.vector_norm({x}, {1|2|3}, {dims})",
    "torch.nanmean({x}, {dim})",
    "torch.count_nonzero({x} > 0, {dim})",
    "torch.searchsorted({vector}.sort().values, {x})",
    "torch.bucketize({x}, torch.tensor([-0.5, 0.1, 0.9]))",
    "torch.cdist({matrix}, {matrix})",
    "torch.diff({x}, dim={dim})",
    "{x}.{argmax|argmin}(keepdim={flag})",
    "{x}.{sum|mean|amax}({dim}).squeeze({axis})",
    "{many}.unsqueeze({new}).{sum|mean|amax|prod}({dim}).squeeze({axis})",
    "{many}.flatten({dim}).{sum|mean}({-1|0})",
    "a = {x}; out = a.{softmax|cumsum|flip}({dim}) - a.{softmax|cumsum|flip}({dim})",
    "a = {x}; out = a.{sum|amax}({dims}, keepdim=True) * a.{mean|sum}({dims}, keepdim=True)",
    "({x}.reshape(1, -1) * torch.linspace(0.1, 2, {4099|8192})[:, None]).{sum|mean}({0|1})",
    "{x}.reshape(-1).expand(64, 99, -1).flatten({0|1}, {1|-1}).cos().{sum|mean}({0|-1})",
    "({x}.reshape(-1, 1) * torch.linspace(0, 1, {200|640})).repeat(90, 1)[:160].{sum|mean}(0)",
)

VIEWS = (
    "{any}.{reshape|view}({reshaped})",
    "{x}.reshape({reshaped})",
    "{any}.{transpose|movedim|flatten|swapaxes}({dim}, {dim})",
    "{any}.permute({order})",
    "{any}.unsqueeze({new})",
    "{any}.squeeze({dim})",
    "{any}.expand({expanded})",
    "{any}.{repeat|tile}({times})",
    "{x}.repeat_interleave({2|3}, {dim})",
    "{x}.unflatten({dim}, ({-1, 2|2, -1|1, -1|3, -1|-1, 1}))",
    "torch.cat([{x}, {same}], {dim})",
    "torch.cat([{x}, {like}], {dim})",
    "torch.cat([{vector}, {vector}])",
    "torch.stack([{x}, {same}], {new})",
    "torch.{hstack|vstack|column_stack}([{x}, {same}])",
    "torch.cat({x}.{chunk|split|tensor_split}({2|3}, {dim}), {{axis}|{dim}})",
    "torch.cat({x}.split({1|2}, {dim})[::-1], {{axis}|{dim}})",
    "torch.cat([{2|0.5|b} * b for b in {x}.{chunk|split}({1|2|3}, {dim})], {{axis}|{dim}})",
    "torch.cat([0.5 + b for b in {x}.{chunk|split}({1|2|3}, {dim})], {{axis}|{dim}})",
    "torch.stack([part * {2|part} for part in {x}.unbind({dim})], {{axis}|{new}})",
    "{any}.{chunk|split}({2|3}, {dim})[{0|-1|1}]",
    "{any}.unbind({dim})[{0|-1|1}]",
    "{any}.narrow({dim}, {0|1}, {1|2})",
    "{any}.select({dim}, {0|1|-1})",
    "{any}[{key}]",
    "{x}[{key}]",
    "{x}[{key}]",
    "{any}.roll({1|-1|2|7}, {dim})",
    "{any}.flip({dims})",
    "{x}.diagonal({0|1|-1}, {dim}, {dim})",
    "torch.diag_embed({vector}, {0|1|-1})",
    "torch.{tril|triu}({matrix}, {0|1|-1})",
    "{x}.mT",
    "{x}.unfold({dim}, {1|2}, {1|2})",
    "functional.pad({x}, ({0|1|2|-1}, {0|1}), value={number})",
    "functional.pad({cube}, (1, {0|1}), mode='{reflect|replicate|circular}')",
    "torch.broadcast_tensors({x}, {like})[0]",
    "torch.meshgrid({vector}, {vector}, indexing='{ij|xy}')[{0|1}]",
    "torch.rot90({x}, {1|2|3}, (0, 1))",
    "torch.cat([b.{reshape(-1)|mT.reshape(-1)} for b in {x}.{chunk|split}({1|2|3}, {dim})])",
    "torch.cat([b.unsqueeze({0|1|-1}) for b in {vector}.chunk({2|3})], {0|1|-1})",
    "{x}.unsqueeze({new}).{repeat|tile}(({times}, {1|2|3}))",
    "{x}[None].expand(2, *{shape}).expand(3, 2, *{shape})",
    "a = {x}[None]; out = a.expand(3, *{shape}) * a.cos().expand(3, *{shape})",
    "{any}.permute({order}).transpose({dim}, {dim})",
    "{any}.permute({order}).reshape(-1)",
    "{x}.permute({order}).contiguous().view(-1, {1|2|3})",
    "{cube}.permute({order}).permute({1, 2, 0|2, 0, 1|0, 2, 1})",
    "{x}.movedim({dim}, 0)[{-{length}:|1 - {length}:|: {length} - 1|-{length}|{length} // 2:}]",
    "{x}.narrow({dim}, {length} // 2, {length} - {length} // 2)",
    "torch.{cat|stack}([{x}, {mask}, {same}], {dim})",
    "functional.pad({matrix}, ({0|1|-1}, {0|1|2}, {0|1|-1}, {0|1|2}), value={number})",
)

INDEXING = (
    "{x}.gather({dim}, {indices})",
    "torch.take_along_dim({x}, {x}.argsort({dim}), {axis})",
    "{x}.index_select({dim}, {places})",
    "{x}.scatter({dim}, {indices}, {{same}|{number}})",
    "{x}.scatter_add({dim}, {indices}, {same})",
    "{x}.scatter_reduce({dim}, {indices}, {same}, '{sum|mean|amax}')",
    "{x}.index_add({dim}, torch.arange({length}).flip(0), {same})",
    "{x}.index_fill({dim}, {places}, {number})",
    "{many}.movedim({dim}, 0)[{places}]",
    "{many}.movedim({dim}, 0)[{places}.reshape(-1, 1)]",
    "{x}[{mask}].{sum|mean}()",
    "{matrix}[{|:, }[0, -1]]",
    "{matrix}[[[0], [-1]], [0, -1]]",
    "{cube}[{:|0|[0, -1]}, [0, -1], {0|:|[0, -1]|:1|[0]}]",
    "{cube}[[0, -1], :, {0|[0, -1]|:1|[0]}]",
    "functional.embedding(({int} % 2), {matrix}.repeat(2, 1))",
    "functional.embedding_bag({int}.view(-1, 1) % 2, {matrix}.tile(2, 1), mode='{sum|mean|max}')",
    "functional.one_hot({int}.abs() % 3, 3)",
    "torch.tensor([0.5, -1.0, 2.0])[{int}.abs() % 3]",
    "torch.bincount({int}.reshape(-1).abs() % 4, minlength=4)",
    "{x}.index_{copy|add}({dim}, torch.arange({length}).roll(1), {same})",
    "{x}.index_reduce({dim}, {places}[:1], {x}.narrow({axis}, 0, 1), '{amax|mean|prod}')",
    "{x}.scatter_reduce({dim}, {indices} // 2, {same}, '{sum|mean|amax}', include_self={flag})",
    "{x}.gather({dim}, {indices}.narrow({axis}, 0, 1))",
    "{matrix}[{[0, 0, -1], [0, 0, 0]|[[0], [0]], [-1, 0]|[0, -1], 0}]",
    "{cube}[{[0, 0], :, [0, 0]|:, [0, 0], [-1, -1]|[0], :, [[0], [-1]]}]",
    "{many}.permute({order})[..., {places}]",
    "{many}[{many}.flatten(1).sum(1) > 0].{sum|mean|amax}()",
)

WRITES = (
    "out = {x}.clone(); out[{key}] {+=|-=|*=|=|=} {number}",
    "out = {x}.clone(); out[{key}] {+=|-=|*=|=|=} {like}",
    "out = {x}.clone(); part = out[{key}]; part {+=|*=|-=} 0.5 * part",
    "out = {x} * 1.0; out {+=|*=|-=} {like}",
    "out = {x}.clone(); out.{tanh|sigmoid|relu|neg|exp|zero}_()",
    "out = {x} + 0; view = out.{reshape(-1)|transpose(0, -1)|flatten()|diagonal()}; view += 1.0",
    "out = {x} + 0; view = out.{mT|unsqueeze(0)|select(0, 0)|narrow(-1, 0, 1)}; view *= 2.0",
    "out = {x}.clone(); out.masked_fill_({mask}, {number})",
    "out = {x}.clone(); out.copy_({like})",
    "out = {x}.clone(); out[{mask}] {=|*=} {number}",
    "out = {x}.clone(); out.add_({like}, alpha={number}).sub_({number})",
    "out = torch.zeros_like({x}); out[{key}] = {like}",
    "out = torch.empty_like({x}); out[:] = {like}; out[{key}] += 1.0",
    "out = {many}.clone(); out[{0|-1|1:}] = out[{0|-1|1:}] * 2",
    "out = {matrix}.clone(); out[:, {0|-1}] += out[:, {0|-1}]",
    "out = {many}.clone(); out[..., 1:] = out[..., :-1].clone()",
    "out = {matrix}.clone(); out.fill_diagonal_({number})",
    "out = {many}.clone(); out[[0, -1]] = {number}",
    "out = {many}.clone(); a, b = out.chunk(2, {dim}); a *= 2.0; b += 1.0",
    "self.b0.mul_(0.9).add_({x}.detach().mean(), alpha=0.1); out = self.b0 * 1.0",
    "self.b0[{0|-1|1:}] = {x}.detach().mean(); out = self.b0.clone()",
    "self.b1 += 1; out = self.b1 * 1",
    "out = {cube}.clone(); out[:, {[0, -1]|[-1, 0]|[0, 0]}{|, :1|, 0}] {=|*=} {number}",
    "out = {cube}.clone(); out[:, [-1, 0]] = out[:, [0, -1]] * 2",
    "out = {many}.clone(); out[..., [0, -1]] += {number}",
    "out = {many}.clone(); out[out.flatten(1).sum(1) > 0] {=|*=|+=} {number}",
    "out = {many}.clone(); out[out.movedim(-1, 0).flatten(1).sum(1) > 0] = 0.1",
    "out = {matrix}.clone(); out.diagonal({0|1|-1}).{mul_(2.0)|copy_(0.5)|add_({number})}",
    "out = {x}.clone(); out.index_{add|copy}_({dim}, torch.arange({length}).roll(1), {same})",
    "out = {x}.clone(); out.scatter_({dim}, {indices}, {number})",
    "out = {x}.clone(); out.permute({order})[{0|-1|:1}] {=|*=} {number}",
    "out = {x}.clone(); [part.mul_(2.0) for part in out.{split|chunk}(2, {dim})[1:]]",
)

PRODUCTS = (
    "{x} @ {many}{|.mT}",
    "torch.einsum('{ij,jk->ik|ij,kj->ik|ij,ij->i|ij,kl->ikjl|ij,kj->k}', {matrix}, {matrix})",
    "torch.einsum('{bij,bjk->bik|bij,bkj->bik|bij,bij->bj|bij,cij->bc}', {cube}, {cube})",
    "torch.einsum('{bij,jk->bik|bij,bj->bi|bij,ij->b|bij,bi->j}', {cube}, {matrix})",
    "torch.bmm({cube}, {cube}{|.mT})",
    "torch.baddbmm({cube}, {cube}, {cube}, alpha={number}, beta={number})",
    "torch.addmm({vector}, {matrix}, {matrix}, beta={number})",
    "functional.linear({many}, {matrix}, {None|{vector}})",
    "torch.{outer|dot}({vector}, {vector})",
    "torch.mv({matrix}, {vector})",
    "torch.tensordot({x}, {x}, {1|2})",
    "torch.kron({matrix}, {matrix})",
    "functional.conv1d({cube}, {cube}, padding={0|1|2}, stride={1|2}, dilation={1|2})",
    "functional.conv2d({cube}[:, None], {cube}[:, None], padding={0|1|(1, 0)})",
    "functional.conv_transpose1d({cube}, {cube}, stride={1|2})",
    "functional.scaled_dot_product_attention({cube}, {same}, {same}, is_causal={flag})",
    "a = {cube}; out = torch.baddbmm(a @ a.mT, a, a.mT, alpha={number}, beta={number})",
    "a = {matrix}; out = {a.mT @ a|a @ a.mT|a.mT @ a @ a.mT}",
    "a = {matrix}; out = torch.addmm(a @ a.mT, a, a.mT, alpha={number}, beta={number})",
    "a = {matrix}; out = torch.{mv(a.mT, a[:, 0])|mv(a, a[0])|addmv(a[0], a.mT, a[:, 0])}",
    "{cube}.permute({order}) @ {same}.permute({order})",
    "functional.conv2d(({cube} + 1)[:, None], {cube}[:1, None], padding={(0, 1)|(1, 2)})",
    "functional.conv1d({cube}, {same}.mean(0, keepdim=True).mT[..., :1], stride={1|2}, padding=1)",
    "a = torch.stack([{cube}, {same}]); b = torch.tanh(a).mean((0, 2, 3)); "
    "a = functional.conv2d(a, (b[:, None] - 0.5 * b)[:, :, None, None]).{relu|tanh|sin}(); "
    "out = a.{sum|mean|amax}({1|0|3|(0, 2)|(2, 3)|(1, 2)}, keepdim={flag})",
)

LAYERS = (
    "functional.{max_pool1d|avg_pool1d|adaptive_avg_pool1d|adaptive_max_pool1d}({cube}, {1|2})",
    "functional.{avg|max}_pool2d({cube}, 2, stride={1|2}, padding={0|1}, ceil_mode={flag})",
    "functional.{layer|rms}_norm({many}, {last})",
    "functional.layer_norm({x}, {shape})",
    "functional.group_norm({cube}, {1|2|3})",
    "functional.{instance_norm({cube})|batch_norm({many}, None, None, training=True)}",
    "functional.{softmax|softmin|log_softmax}({x}, {dim})",
    "functional.cross_entropy({matrix}, {matrix}.argmax(1), reduction='{mean|sum|none}')",
    "functional.cross_entropy({matrix}, {same}.softmax(1), label_smoothing={0.0|0.1})",
    "functional.{mse|huber|smooth_l1|l1}_loss({x}, {same}, reduction='{mean|sum|none}')",
    "functional.binary_cross_entropy_with_logits({x}, {mask}.float(), reduction='{mean|none}')",
    "functional.binary_cross_entropy({x}.sigmoid(), {mask}.float())",
    "functional.kl_div({x}.log_softmax(-1), {same}.softmax(-1), reduction='{batchmean|none}')",
    "functional.interpolate({cube}, scale_factor={2|0.5}, mode='{nearest|linear}')",
    "functional.max_pool{1d|2d}({cube}.masked_fill({mask}, -torch.inf), {1|2}).nan_to_num(0, 0, 2)",
    "functional.avg_pool1d({cube}, {2|3}, stride={1|2}, padding=1, count_include_pad={flag})",
    "functional.avg_pool2d({cube}, {2|3}, {1|2}, {0|1}, count_include_pad={flag})",
    "functional.{max|avg}_pool2d({cube}, ({1|2}, {1|2}), ({1|2}, {1|2}), ({0|1}, 0))",
    "functional.batch_norm({cube}, None, None, {same}.mean((0, 2)), training=True)",
    "functional.dropout{|1d|2d}({cube}, {0.3|0.6}, self.training)",
    "functional.nll_loss({matrix}.log_softmax({0|1}), {same}.argmax(1), reduction='{mean|none}')",
)

OTHER_TYPES = (
    "{x} {>|<|>=|<=} {like}",
    "{int} {>|==|!=|*|+|-|%|//|&|^} {1|2|3}",
    "{bool} {&|^|==|*} {bool}",
    "{any}.{float|long|int|bool|double}()",
    "~{bool}",
    "{int} * {int}",
    "{int} / 3",
    "torch.where({bool}, {int}, {0|-1})",
    "{int}.clamp(0, 1)",
    "torch.linspace(-1, 1, {x}.shape[-1]) * {x}",
    "torch.ones_like({x}).cumsum({dim}) * {same}",
    "torch.eye({2|3}) * {x}.mean()",
    "({int} - 2) {//|%|*|/|>|<=} {2|3|-2|0.5|-1.5}",
    "({int} - 2).{relu|abs|sign|neg|square|float}()",
    "torch.div({int} - 2, {2|3|-2}, rounding_mode={'floor'|'trunc'|None})",
    "({x} * 2).{trunc|floor|frac|round}() * {same}",
    "({x}.double() {+|*|-} {same}).float()",
    "{int}.int() {*|+} {x}",
    "torch.where({mask}, {same}, {int})",
)

FAMILIES = {
    ELEMENTWISE: 0.22,
    REDUCTIONS: 0.15,
    VIEWS: 0.24,
    INDEXING: 0.09,
    WRITES: 0.11,
    PRODUCTS: 0.07,
    LAYERS: 0.06,
    OTHER_TYPES: 0.06,
}


def draw_operation(rng: np.random.Generator) -> str:
    """A template."""
    family = list(FAMILIES)[int(rng.choice(len(FAMILIES), p=list(FAMILIES.values())))]
    return family[int(rng.integers(len(family)))]
