"""Every operator that `tessera-export operators` lists is exported and gives what torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from export.cli.operators import listed
from export.lowering import registry
from export.lowering.walk import instead_of
from tests.export.recorded import assert_as_torch
from tests.export.test_axes_from_the_end import CALLS as WITH_AXES

aten = torch.ops.aten

# In (0.1, 0.9), inside every function's domain; as whole numbers 0, 3, 6 or 9.
X = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(1)) * 0.8 + 0.1


def _whole(x: Tensor) -> Tensor:
    return (x * 3).round().to(torch.int64) * 3


def _largest(x: Tensor, rank: int) -> Any:
    """Largest elements of windows and the gradient that they pass back."""
    one = x.reshape(1, *x.shape) if rank == 2 else x.reshape(1, 1, *x.shape)
    pool = getattr(aten, f"max_pool{rank}d_with_indices").default
    back = getattr(aten, f"max_pool{rank}d_with_indices_backward").default
    value, index = pool(one, [2] * rank, [1] * rank)
    return value, back(value * 2, one, [2] * rank, [1] * rank, [0] * rank, [1] * rank, False, index)


def _mean(x: Tensor, rank: int) -> Any:
    one = x.reshape(1, *x.shape) if rank == 2 else x.reshape(1, 1, *x.shape)
    back = getattr(aten, f"avg_pool{rank}d_backward").default
    value = getattr(aten, f"avg_pool{rank}d").default(one, [2] * rank, [1] * rank)
    more = ([2] * rank, [1] * rank, [0] * rank, False, True, None)
    return value, back(value * 2, one, *more)


def _adaptive(x: Tensor) -> Any:
    one = x[:, :, :4].reshape(1, 3, 4, 4)
    mean = aten._adaptive_avg_pool2d(one, [2, 2])
    value, index = aten.adaptive_max_pool2d(one, [2, 2])
    back = aten.adaptive_max_pool2d_backward(value * 2, one, index)
    deep = one.unsqueeze(2)
    highest, index = aten.adaptive_max_pool3d(deep, [1, 2, 2])
    back = back + aten.adaptive_max_pool3d_backward(highest * 2, deep, index).squeeze(2)
    return value, back, mean, aten._adaptive_avg_pool2d_backward(mean * 2, one)


def _convolution(x: Tensor) -> Any:
    one, weight = x.reshape(1, 3, 4, 5), x[:, :3, :3].reshape(3, 3, 3, 1)
    how = ([1, 1], [1, 0], [1, 1], False, [0, 0], 1)
    y = aten.convolution(one, weight, x[0, 0, :3], *how)
    return y, *aten.convolution_backward(y * 2, one, weight, [3], *how, [True, True, True])


def _shifted(x: Tensor) -> Any:
    n = _whole(x)
    return (
        aten.__lshift__(n, 2), aten.__lshift__(n, n), aten.__rshift__(n, 1), aten.__rshift__(n, n),
        aten.bitwise_left_shift(n, n), aten.bitwise_right_shift(n, n),
    )  # fmt: skip


def _bits(x: Tensor) -> Any:
    n, m, t = _whole(x), _whole(x.flip(0)), x > 0.5
    pairs = [op(a, b) for op in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor)
             for a, b in ((n, m), (n, 5), (t, t.flip(0)))]  # fmt: skip
    return *pairs, aten.bitwise_not(n), aten.bitwise_not(t)


def _written(x: Tensor) -> Any:
    i, j = torch.tensor([0, 2, 0]), torch.tensor([1, 3, 1])
    return (
        aten.index(x, [i, j]), aten.index_put(x, [i, j], x[:, 0], True),
        aten._unsafe_index_put(x, [None, j[:2]], x[:, :2] * 2),
    )  # fmt: skip


def _embedded(x: Tensor) -> Any:
    index = _whole(x) // 3
    return aten.embedding(x[0], index), aten.embedding_dense_backward(
        x, index[..., 0], 4, -1, False
    )


def _empty(x: Tensor, size: list[int]) -> list[Tensor]:
    return [
        aten.empty(size),
        aten.new_empty(x, size),
        aten.empty_like(x),
        aten.empty_strided(size, [3, 1]),
        aten.new_empty_strided(x, size, [3, 1]),
    ]


def _made(x: Tensor) -> Any:
    size = [2, 3]
    return (
        aten.full(size, 1.5), aten.new_full(x, size, 1.5), aten.ones(size), aten.new_ones(x, size),
        aten.zeros(size), aten.new_zeros(x, size),
        # Nothing is said of what stands in these before something is written there.
        *map(aten.zero, _empty(x, size)),
    )  # fmt: skip


def _divided(x: Tensor) -> Any:
    return [aten.div(a, b, rounding_mode=mode) for mode in ("floor", "trunc")
            for a, b in ((x - 0.5, 0.2), (x - 0.5, x.flip(0)), (_whole(x) - 5, 4))]  # fmt: skip


def _triangles(x: Tensor) -> Any:
    return aten.tril_indices(3, 4), aten.triu_indices(4, 3, 1)


# Arguments that cannot be told from an operator's schema, several operators in one call.
TOGETHER: list[Callable[[Tensor], Any]] = [
    _adaptive, _convolution, _shifted, _bits, _written, _embedded, _made, _divided, _triangles,
    lambda x: (*_largest(x, 2), *_largest(x, 3), *_mean(x, 2), *_mean(x, 3)),
    lambda x: (aten.addmm(x[0], x[1][:, :4], x[2]), aten.mm(x[0], x[1].T), aten.t(x[0])),
    lambda x: (aten.bmm(x, x.transpose(1, 2)), aten.baddbmm(x, x[:, :, :4], x, beta=2, alpha=3)),
    lambda x: (aten.dot(x[0, 0], x[1, 0]), aten.mv(x[0], x[1, 0])),
    lambda x: (aten.bucketize(x, torch.tensor([0.2, 0.5])), aten.round(x, decimals=1)),
    lambda x: aten.div.Scalar_mode(x - 0.5, 0.2, rounding_mode="floor"),
    # In place, without a decomposition of torch's for that form.
    lambda x: (aten.clamp_min_(x * 1, x.flip(0)), aten.hardtanh_(x * 3), aten.fill_(x * 1, 2.0)),
    lambda x: (aten.clamp_max_(x * 1, x[0, 0, 0]), aten.floor_divide_(x * 9, 2), aten.t_(x[0] * 1)),
    lambda x: (aten.clamp(x, 0.3, 0.6), aten.clamp(x, x.flip(0), x.flip(1))),
    lambda x: (aten.constant_pad_nd(x, [1, -1, 0, 2], 3.0), aten.repeat(x, [2, 1, 3])),
    lambda x: (aten.expand(x[:, :1], [3, 4, 5]), aten.view(x, [12, 5]), aten.reshape(x, [-1, 4])),
    lambda x: (aten._reshape_copy(x, [5, 12]), aten._unsafe_view(x, [5, 12])),
    lambda x: (aten.fill(x, x[0, 0, 0]), aten.where(x > 0.5, x, x * 2)),
    lambda x: (*aten._unique2(_whole(x), True, True, True), aten._unique2(_whole(x).int())[0]),
    lambda x: aten.unique_dim(_whole(x[0]), 0, True, True, True),
    lambda x: (aten.where(x > 0.5, x > 0.3, x < 0.7), aten.masked_fill(x > 0.5, x > 0.3, False)),
    lambda x: (aten.masked_fill(x, x > 0.5, 3.0), aten.masked_fill(x, x > 0.5, x[0, 0, 0])),
]  # fmt: skip


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Which operators a function calls."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.operators.add(func)
        return func(*args, **(kwargs or {}))


def _listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _called() -> set[Any]:
    with Seen() as seen:
        for call in TOGETHER:
            call(X)
    return seen.operators | set(WITH_AXES)


CALLED = _called()
LOWERED = [op for op in listed() if op in registry.operators()]
PLAIN = [op for op in LOWERED if op not in CALLED]
_GIVEN = {"Tensor": X, "number": 2, "int": 1, "bool": False, "float": 2.0}


@pytest.mark.parametrize("number", range(len(TOGETHER)))
def test_operators_together(number: int) -> None:
    assert_as_torch(lambda x: _listed(TOGETHER[number](x.detach())), lambda n: (X,), sizes=(1,))


@pytest.mark.parametrize("operator", PLAIN, ids=str)
def test_operator_on_plain_arguments(operator: Any) -> None:
    needed = [a for a in operator._schema.arguments if not a.has_default_value()]

    def call(x: Tensor) -> list[Tensor]:
        given = [x if str(a.type) == "Tensor" else _GIVEN[str(a.type)] for a in needed]
        return _listed(operator(*given))

    assert_as_torch(lambda x: call(x.detach()), lambda n: (X,), sizes=(1,))


def test_a_hint_is_of_the_operator_that_it_names() -> None:
    assert instead_of("aten.special_erfc.default") == "1 - torch.erf(x)"
    assert "other operators" in instead_of("aten.special_erfcx.default")
    assert "other operators" in instead_of("aten.compute.default")


def test_what_the_exporter_breaks_into_others_is_listed() -> None:
    assert {aten.lgamma.default, aten.exp.default} <= set(listed())
