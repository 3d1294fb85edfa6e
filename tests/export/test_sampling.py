"""Pictures read at places of a grid: torch's values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import export


class Transformer(nn.Module):
    """Moves pictures by a matrix that it learns; the grid reaches beyond them."""

    def __init__(self, align: bool, **given: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.where = nn.Linear(4, 6)
        self.picture = nn.Conv2d(2, 3, 3)
        self.align, self.given = align, given

    def forward(self, x: Tensor) -> Tensor:
        move = self.where(x[:, 0, :2, :2].flatten(1)).view(-1, 2, 3) * 0.7 + torch.eye(2, 3)
        h = self.picture(x)
        grid = F.affine_grid(move, [*h.shape[:2], 5, 4], align_corners=self.align)
        return F.grid_sample(h, grid, align_corners=self.align, **self.given)


@pytest.mark.parametrize(
    ("align", "given"),
    [
        (False, {}),
        (True, {}),
        (True, {"padding_mode": "border"}),
        (False, {"mode": "nearest"}),
    ],
    ids=["zeros", "corners", "border", "nearest"],
)
def test_grid_sample(
    align: bool, given: dict[str, str], assert_parity: Callable[..., export.Exported]
) -> None:
    x = torch.randn(5, 2, 8, 9, generator=torch.Generator().manual_seed(1))
    assert_parity(Transformer(align, **given), {"x": x})
