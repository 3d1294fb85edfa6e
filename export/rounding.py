"""Monte Carlo arithmetic: what rounding alone may be worth, in the loss and in all else.

(D. S. Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997.)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from export.arguments import changed
from export.insides import TorchDispatchMode, decomposition_table

YARDSTICK = 10.0
"""Of what rounding was measured to be worth: more than this is no rounding."""

_INEXACT = frozenset(getattr(torch.ops.aten, name) for name in (
    "add", "addmm", "baddbmm", "bmm", "cos", "cumsum", "div", "erf", "exp", "expm1", "log", "log1p",
    "mean", "mm", "mul", "pow", "rsqrt", "sigmoid", "sin", "sqrt", "sub", "sum", "tanh", "var_mean",
))  # fmt: skip
"""The functions whose results are rounded; what selects or moves values is exact."""


class _Rounding(TorchDispatchMode):
    """Below autograd, float32 results are ulps off at random, fused functions part by part."""

    def __init__(self, rng: np.random.Generator, ulps: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rng = rng
        self._ulps = ulps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _INEXACT and not func._schema.is_mutable:
            return changed(self._rounded, func(*args, **kwargs))
        if (parts := decomposition_table.get(func)) is not None:
            with self:
                result = parts(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    def _rounded(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        ulps = torch.from_numpy(self._rng.uniform(-self._ulps, self._ulps, tuple(value.shape)))
        moved = (value * (1 + 2.0**-23 * ulps)).float()
        return torch.where(value == value.round(), value, moved)  # counts stay whole


def rounded_anew(rng: np.random.Generator, *, ulps: float = 1.0) -> AbstractContextManager[object]:
    """Inside, each result of float32 arithmetic is moved by up to so many ulps, at random.

    It shows what rounding alone may be worth, where a run happens to be close: the loss of a sure
    classifier is the logarithm of a number near 1, and moving its inputs hardly moves it.
    """
    return _Rounding(rng, ulps)
