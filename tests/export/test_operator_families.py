"""Operators that users reach for, many in one model; a failure names the branch that differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

Family = dict[str, Callable[[Tensor], Tensor]]

_MASK = {
    "product of truths": lambda x: ((x > 0) * (x < 1)) * x,
    "sum of truths": lambda x: ((x > 0) + (x < -1)) * x,
    "largest truth": lambda x: (x > 0).max(1, keepdim=True).values * x,
    "nan_to_num": lambda x: torch.nan_to_num(x / (x > -99), nan=0.5),
    "isfinite": lambda x: torch.where(torch.isfinite(x), x, 0.0),
    "logaddexp": lambda x: torch.logaddexp(x, -x),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0, 1]).to(x.dtype)) * x,
    "shifts": lambda x: ((x.argsort(1) << 2) + ((x.argsort(1) - 3) >> 1)) * x,
    "scatter_reduce": lambda x: torch.zeros_like(x).scatter_reduce(1, x.argsort(1), x, "sum"),
}
_STATISTICS = {
    "var": lambda x: x.var(1, keepdim=True) * x,
    "std": lambda x: x.std((0, 1), keepdim=True, unbiased=False) * x,
    "var_mean": lambda x: torch.var_mean(x, 1, keepdim=True)[0] * x,
    "prod": lambda x: x.prod(1, keepdim=True) * x,
    "stable sort": lambda x: torch.sort(x, dim=1, stable=True).values * torch.arange(6),
    "softplus": lambda x: functional.softplus(x, beta=3, threshold=1.0),
    "mv": lambda x: x.T.mv(x[:, 0])[None] * x,
}
_FUNCTIONS = {
    "exp2": torch.exp2,
    "log2": lambda x: (x.abs() + 0.1).log2(),
    "log10": lambda x: (x.abs() + 0.1).log10(),
    "trunc": lambda x: (3 * x).trunc() * x,
    "frac": lambda x: (3 * x).frac(),
    "decimals": lambda x: x.round(decimals=1) * x,
    "atan2": lambda x: torch.atan2(x, x.flip(1) - 0.2),
}
_PICKED = {
    "diagonal": lambda x: (x[:, :, None] * x[:, None, :]).diagonal(dim1=1, dim2=2),
    "diagonal of the batch": lambda x: (x @ x.T).diag()[:, None] * x,
    "side diagonal": lambda x: (
        (x.detach()[:, :, None] * x[:, None].detach()).diagonal(1, 1, 2) * x[:, 1:]
    ),
    "diag_embed": lambda x: torch.diag_embed(x).flatten(1),
    "trace": lambda x: (x.T @ x).trace() * 0.01 * x,
    "windows": lambda x: (x.unfold(1, 3, 2) * torch.arange(3)).flatten(1),
}
FAMILIES: dict[str, Family] = {
    "truths and whole numbers": _MASK,
    "statistics": _STATISTICS,
    "functions": _FUNCTIONS,
    "picked elements": _PICKED,
}


class Branches(nn.Module):
    def __init__(self, family: Family) -> None:
        super().__init__()
        self.family = family
        self.branches = nn.ModuleDict({name: nn.Linear(6, 6) for name in family})

    def forward(self, x: Tensor) -> Tensor:
        parts = [function(self.branches[name](x)) for name, function in self.family.items()]
        return torch.cat([part.reshape(x.shape[0], -1) for part in parts], 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, assert_parity: Any) -> None:
    torch.manual_seed(0)
    exported = assert_parity(Branches(FAMILIES[name]), {"x": torch.randn(9, 6)})
    assert exported.report.unmoved == ()
