"""Click models' fields: what they are, how they are embedded, and encoded by attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from export.short_gradients import ShortGradient

SCALE = 0.1
"""Standard deviation of initial embeddings."""


@dataclass(frozen=True)
class SampleFields:
    """What one sample holds.

    categorical: (name, number of values) each; multi_valued: (name, size of the vocabulary) each;
    numeric: names. ``history`` names the categorical field whose earlier values a sample may bring
    along (the movies a user saw before), for models that read them.

    As batch entries: ``categories`` int64 [b, len(categorical)], each column counting from 0; each
    multi-valued field by its name, float32 [b, vocabulary] of 0 and 1; ``numbers`` float32
    [b, len(numeric)], scaled to about -1 to 1; ``history`` int64 [b, any length], -1 where there
    is none. ValueError for no field at all, a name used twice, or a size below 1.
    """

    categorical: tuple[tuple[str, int], ...] = ()
    multi_valued: tuple[tuple[str, int], ...] = ()
    numeric: tuple[str, ...] = ()
    history: str | None = None

    def __post_init__(self) -> None:
        if not self.categorical:
            raise ValueError("there is no categorical field; expected at least one, (name, values)")
        reserved = ["categories", "numbers", "history", "label", "teacher", "has_teacher"]
        twice = {n for n in (*self.names, *reserved) if (*self.names, *reserved).count(n) > 1}
        if twice:
            raise ValueError(f"the field name {sorted(twice)[0]!r} is taken twice or reserved")
        for name, size in (*self.categorical, *self.multi_valued):
            if size < 1:
                raise ValueError(f"field {name!r} has {size} values; expected at least 1")
        if self.history is not None and self.history not in dict(self.categorical):
            raise ValueError(
                f"history is of {self.history!r}, which is no categorical field; expected one of "
                f"{', '.join(dict(self.categorical))}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """All r fields, in the order of the embedded map: categorical, multi-valued, numeric."""
        return (*dict(self.categorical), *dict(self.multi_valued), *self.numeric)

    @property
    def offsets(self) -> dict[str, int]:
        """First row of each categorical field in the common table."""
        start, found = 0, {}
        for name, size in self.categorical:
            found[name] = start
            start += size
        return found


class FieldEmbedding(nn.Module):
    """A batch to its embedded fields [b, r, dim].

    AFD (papers/afd), section 2.4 (1): a categorical field is its value's vector, a multi-valued one
    the sum of its values' vectors, a numeric one its value times a vector. All categorical fields
    share one table, and the history reads its rows, so that a step gathers once.

    ``extra`` numbers more a value come along, [b, r, dim + extra]: first-order weights, say.
    """

    def __init__(self, fields: SampleFields, dim: int, *, extra: int = 0) -> None:
        super().__init__()
        if dim < 1 or extra < 0:
            raise ValueError(f"dim is {dim} and extra {extra}; expected at least 1 and 0")
        self.fields = fields
        self.dim = dim
        width = dim + extra
        self.table = nn.Embedding(sum(size for _, size in fields.categorical), width)
        self.multi_valued = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(size, width)) for name, size in fields.multi_valued}
        )
        self.numeric = nn.Parameter(torch.empty(len(fields.numeric), width))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=SCALE)
        self.register_buffer("offsets", torch.tensor(list(fields.offsets.values())))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """[b, r, dim + extra]."""
        embedded, _ = self._all(batch, None)
        return embedded

    def with_history(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Fields [b, r, dim + extra], history [b, length, dim + extra], and its mask [b, length].

        The mask is 1.0 where there is a value; vectors elsewhere mean nothing.
        """
        if self.fields.history is None:
            raise ValueError("these fields have no history; set SampleFields(history=...)")
        history = batch["history"]
        rows = history.clamp(min=0) + self.fields.offsets[self.fields.history]
        embedded, earlier = self._all(batch, rows)
        return embedded, earlier, (history >= 0).to(embedded.dtype)

    def _all(self, batch: dict[str, Tensor], rows: Tensor | None) -> tuple[Tensor, Tensor]:
        ids = batch["categories"] + self.offsets  # type: ignore[operator]
        count = ids.shape[1]
        gathered = self.table(ids if rows is None else torch.cat([ids, rows], 1))
        parts = [gathered[:, :count]]
        if self.fields.multi_valued:
            sums = [batch[name] @ table for name, table in self.multi_valued.items()]
            parts.append(torch.stack(sums, 1))
        if self.fields.numeric:
            parts.append(batch["numbers"].unsqueeze(-1) * self.numeric)
        embedded = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        return embedded, gathered[:, count:]


def example_fields(
    fields: SampleFields, *, batch: int, history: int, seed: int = 0
) -> dict[str, Tensor]:
    """Random entries, to trace and verify with; ``history`` is its length, 0 for none."""
    g = torch.Generator().manual_seed(seed)
    columns = [torch.randint(size, (batch,), generator=g) for _, size in fields.categorical]
    entries = {"categories": torch.stack(columns, 1)}
    for name, size in fields.multi_valued:
        entries[name] = (torch.rand(batch, size, generator=g) < 0.3).float()
    if fields.numeric:
        entries["numbers"] = torch.rand(batch, len(fields.numeric), generator=g) * 2 - 1
    if history and fields.history is not None:
        sizes = dict(fields.categorical)
        entries["history"] = torch.randint(-1, sizes[fields.history], (batch, history), generator=g)
    return entries


_EPS = 1e-6
_START = 0.02


class FieldAttention(nn.Module):
    """Embedded fields [b, r, dim] to their re-weighted map and its sum.

    AFD (papers/afd), equations 7 to 9 and section 2.4 (2), where this reading fills what is open:

    * Query Q [b, 1, dim]: a learned map of the direction of the mean field embedding.
    * Keys S [b, r, dim], apart from the values: the direction of a field's embedding, plus a
      learned vector of the field, scaled to unit length again. Embeddings start at a tenth: their
      bare products are about 1e-3, whose softmax is uniform, and which hardly train. The field's
      vector lets a query look for a field whatever its value. The map to Q starts close to 0, so
      that training starts from uniform weights and their gradient does not depend on how large
      embeddings are.
    * P = Q S^T, [b, 1, r] (equation 7).
    * Widened to m channels by a learned vector, [b, m, r]; softmax over the fields of each channel
      (equation 8 lacks the exponential); the mean over channels gives the weights a [b, r], which
      add up to 1. A softmax before a linear widening would make the channels' mean a mere scalar
      factor; after it, each channel is as sharp, or as contrary, as it learns to be.
    * Values V are the embeddings. The map is r * a_i * V_i: uniform weights leave it as it was, so
      the model behind need not make up for a factor of 1 / r. Its sum, sum a_i V_i, is equation 9.

    count: r, the number of fields.
    """

    def __init__(self, count: int, dim: int, channels: int = 32) -> None:
        super().__init__()
        if count < 1 or dim < 1 or channels < 1:
            raise ValueError(
                f"there are {count} fields, dim is {dim} and channels {channels}; "
                "expected at least 1 each"
            )
        self.query = nn.Linear(dim, dim)
        for parameter in self.query.parameters():
            nn.init.normal_(parameter, std=_START)
        self.place = nn.Parameter(torch.randn(count, dim) * dim**-0.5)
        # Between flat and sharp; equal channels would learn the same.
        self.widen = nn.Parameter(torch.linspace(0.25, 4.0, channels))

    def forward(self, fields: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The map [b, r, dim], its sum [b, dim] and the weights [b, r]."""
        query = self.query(_unit(fields.mean(1)))
        scores = (query.unsqueeze(1) * self._keys(fields)).sum(-1)
        weights: Tensor = _ChannelMean.apply(scores, self.widen)
        summed = weights.unsqueeze(-1) * fields
        return summed * fields.shape[1], summed.sum(1), weights

    def interactions(self, fields: Tensor) -> Tensor:
        """[r, r]: how much field i, as the query, looks at field j; mean over the batch.

        The picture of the paper's figure 7. Rows add up to 1.
        """
        scores = self.query(_unit(fields)) @ self._keys(fields).transpose(1, 2)
        channels = scores.unsqueeze(1) * self.widen.reshape(1, -1, 1, 1)
        return torch.softmax(channels, -1).mean(1).mean(0)

    def _keys(self, fields: Tensor) -> Tensor:
        return _unit(_unit(fields) + self.place)


def _unit(vectors: Tensor) -> Tensor:
    """Vectors [..., dim] at length 1; a zero vector, such as a sample's without genres, stays."""
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + _EPS)


class _ChannelMean(ShortGradient):
    """mean over c of softmax(widen_c * scores): scores [b, r], widen [m] to [b, r].

    The gradient in closed form has two products of whole tensors in place of eight. With
    p [b, m, r] the softmaxes, g [b, r] the gradient of the mean, and s_c = sum_r g p_c:
    d / d(widen_c scores) = p_c (g - s_c) / m.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, widen: Tensor) -> Tensor:
        p = torch.softmax(scores.unsqueeze(1) * widen.reshape(1, -1, 1), -1)
        ctx.save_for_backward(scores, widen, p)
        return p.mean(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        scores, widen, p = ctx.saved_tensors
        g = grad / widen.shape[0]
        # [b, m, 3]: sums over fields of p times g, times g * scores, and times scores.
        s, of_both, of_scores = (p @ torch.stack([g, g * scores, scores], -1)).unbind(-1)
        # [b, 2, r]: sums over channels of widen * p and widen * s * p.
        plain, weighted = (torch.stack([widen.expand(s.shape), widen * s], 1) @ p).unbind(1)
        return g * plain - weighted, (of_both - s * of_scores).sum(0)
