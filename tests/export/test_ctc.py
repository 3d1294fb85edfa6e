"""CTC's loss and its gradient: every form of the targets, of the lengths and of the reduction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.export.recorded import assert_as_torch

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _batch(n: int) -> tuple[Tensor, ...]:
    """Log probabilities of 9 steps, 5 classes and n samples; labels with pairs; lengths."""
    g = torch.Generator().manual_seed(n)
    return (
        torch.randn(9, n, 5, generator=g).log_softmax(-1),
        torch.randint(1, 5, (n, 4), generator=g),
        torch.randint(8, 10, (n,), generator=g),
        torch.randint(0, 5, (n,), generator=g),
    )


LOSSES: dict[str, Loss] = {
    "mean": lambda p, t, i, n: functional.ctc_loss(p, t, i, n),
    "sum": lambda p, t, i, n: functional.ctc_loss(p, t, i, n, reduction="sum"),
    "none": lambda p, t, i, n: functional.ctc_loss(p, t, i, n, reduction="none"),
    "blank": lambda p, t, i, n: functional.ctc_loss(p, t - 1, i, n, blank=4),
    "impossible": lambda p, t, i, n: functional.ctc_loss(p, t, i - 6, n, zero_infinity=True),
    "one row": lambda p, t, i, n: functional.ctc_loss(p, t[:, :2].flatten(), i, n * 0 + 2),
    "one sample": lambda p, t, i, n: functional.ctc_loss(p[:, 0], t[0, :2], i[0], n[0] * 0 + 2),
    "free steps": lambda p, t, i, n: functional.ctc_loss(
        p[1:], t, torch.full((p.shape[1],), p.shape[0] - 1), n.to(torch.int32)
    ),
    "module": lambda p, t, i, n: torch.nn.CTCLoss()(p, t, i, n),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOSSES)
def test_ctc(name: str) -> None:
    assert_as_torch(LOSSES[name], _batch)


def test_lengths_as_numbers() -> None:
    def loss(p: Tensor, t: Tensor) -> Tensor:
        return functional.ctc_loss(p.log_softmax(-1), t, (9, 8, 9), (2, 1, 2))

    assert_as_torch(loss, lambda n: (_batch(3)[0].repeat(n, 1, 1)[: 9 + n], _batch(3)[1]))
