"""What to use instead of an operator that cannot be exported."""

from __future__ import annotations

_HINTS: tuple[tuple[str, str], ...] = (
    ("rrelu", "torch.nn.LeakyReLU, or torch.nn.PReLU"),
    ("exponential", "random numbers as a batch input (for gumbel_softmax: the Gumbel noise)"),
    ("uniform_", "random numbers as a batch input"),
    ("replication_pad", "torch.cat of the edge slices, or padding mode 'reflect' or 'constant'"),
    ("as_strided", "slices, reshape or Tensor.unfold"),
    ("median", "torch.sort and an index"),
    ("kthvalue", "torch.sort and an index, or torch.topk"),
    ("mode", "counts by one_hot and sum, then argmax"),
    ("cummax", "an amax over a masked square, or a sort"),
    ("cummin", "an amin over a masked square, or a sort"),
    ("logcumsumexp", "torch.log(torch.cumsum(torch.exp(x - x.amax(...)), ...))"),
    ("erfc", "1 - torch.erf(x)"),
    ("erfinv", "values computed before the step, given as a batch input"),
    ("gamma", "values computed before the step, given as a batch input"),
    ("hypot", "torch.sqrt(x * x + y * y)"),
    ("copysign", "torch.where(y < 0, -x.abs(), x.abs())"),
    ("signbit", "torch.where(y < 0, -x.abs(), x.abs())"),
    ("searchsorted", "torch.bucketize, or comparisons and a sum"),
    ("put", "gather, or indexing of the flattened tensor"),
    ("complex", "two tensors, the real and the imaginary part"),
    ("bernoulli", "torch.nn.Dropout or torch.nn.functional.dropout, whose mask comes from a seed"),
    ("rand", "random numbers as a batch input; torch.nn.Dropout for masks"),
    ("normal", "random numbers as a batch input"),
    ("multinomial", "sampling outside the step, given as a batch input"),
    ("native_dropout", "torch.nn.functional.dropout called by its full name"),
    ("cdist", "torch.sqrt of the sum of squared differences"),
    ("grid_sampler", "a fixed resampling before the step"),
    ("upsample", "torch.nn.ConvTranspose2d, or repeat_interleave by reshape and expand"),
    ("ctc", "a cross-entropy per step"),
    ("linalg", "products and sums; decompositions belong outside the step"),
    ("svd", "products and sums; decompositions belong outside the step"),
    ("inverse", "products and sums; decompositions belong outside the step"),
    ("fft", "torch.nn.Conv1d with fixed weights"),
    ("nonzero", "torch.where, or multiplying by a mask"),
    ("masked_select", "torch.where, or multiplying by a mask"),
    ("unique", "distinct values found before the step, given as a batch input"),
    ("_embedding_bag", "torch.nn.EmbeddingBag with mode sum or mean"),
    ("_thnn", "torch.nn.GRU or torch.nn.LSTM"),
    ("rnn", "torch.nn.GRU or torch.nn.LSTM"),
)


def instead_of(operator: str) -> str:
    """A hint for the operator's name, with a general one where none fits."""
    for part, hint in _HINTS:
        if part in operator:
            return hint
    return "other operators (`tessera-export operators` lists those that can be exported)"
