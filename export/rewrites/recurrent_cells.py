"""Single recurrent steps out of place: torch's own write their gates in place, into views."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor


def gru_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """``torch.nn.GRUCell``'s equations: input [B, F], hx [B, H] -> [B, H]."""
    units = hx.shape[1]
    own = functional.linear(input, w_ih, b_ih).split([2 * units, units], dim=1)
    share = functional.linear(hx, w_hh, b_hh).split([2 * units, units], dim=1)
    r, z = torch.sigmoid(own[0] + share[0]).split([units, units], dim=1)
    n = torch.tanh(own[1] + r * share[1])
    h: Tensor = n + z * (hx - n)
    return h


def lstm_cell(
    input: Tensor,
    hx: tuple[Tensor, Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``torch.nn.LSTMCell``'s equations: input [B, F], hx two [B, H] -> two [B, H]."""
    h, c = hx
    gates = functional.linear(input, w_ih, b_ih) + functional.linear(h, w_hh, b_hh)
    i, f, g, o = gates.split([h.shape[1]] * 4, dim=1)
    cell = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell
