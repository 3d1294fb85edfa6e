"""Sizes that data decide (masks), and slices of tables up to a free size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import export
from device_sdk import BatchError, GraphRunError, NonFiniteStep, Trainer
from tests.export.recorded import assert_as_torch, recorded


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _graph(edges: int) -> Tensor:
    return torch.randint(5, (2, edges), generator=torch.Generator().manual_seed(1))


def _set_rows(x: Tensor) -> Tensor:
    h = x * 2
    h[h[:, 0] > 0] = 0.5
    return h


def _set_to_rows(x: Tensor) -> Tensor:
    kept = x[x[:, 1] < 1]
    h, above = torch.zeros_like(kept[:, 0]), kept[:, 0] > 0
    h[above] = kept[above, 1] * 2
    h[kept[:, 2] > 0] = 1.0
    return h.sum() * x


def _without_itself(x: Tensor) -> Tensor:
    scores = x @ x.t()
    scores.fill_diagonal_(-9.0)
    tall = (x[0, :2] * torch.ones(7, 2)).fill_diagonal_(0.5, wrap=True)
    cube = (x[0, 0] * torch.ones(3, 3, 3)).fill_diagonal_(2.0)
    row = x[:1] * 1.0
    row.diagonal(-1).mul_(2.0)  # of no elements
    filled = torch.empty(3, 3).copy_(0.5).sum()
    rest = tall.sum() + (cube**2).sum() + row.sum() + filled
    return scores.logsumexp(1) / len(x) + torch.arange(len(x)) + rest


def _set_by_two(x: Tensor) -> Tensor:
    h = torch.zeros(x.shape[0], 5, 4)
    h[torch.zeros(1, dtype=torch.int64), :, torch.tensor([2, 0, 2])] = x[:1, :5]
    return h * x.sum()


def _without_loops(x: Tensor, edges: Tensor) -> Tensor:
    """Messages along edges that are no loops, and one of each node to itself."""
    kept = edges[:, edges[0] != edges[1]]
    nodes = torch.arange(5)
    source, target = torch.cat([kept, nodes.expand(2, -1)], 1)
    return torch.zeros(5, x.shape[1]).index_add(0, target, x[source])


def _by_group(x: Tensor) -> Tensor:
    """Means of the rows of each distinct number."""
    numbers, place, count = torch.unique(
        (x[:, 0] > 0).long(), return_inverse=True, return_counts=True
    )
    sums = torch.zeros(len(numbers), x.shape[1]).index_add(0, place, x)
    return (sums / count.unsqueeze(1) * numbers.unsqueeze(1)).sum(0)


def _others(x: Tensor) -> Tensor:
    """Each row's likeness to all others, by a mask whose diagonal is false."""
    mask = torch.ones(len(x), len(x), dtype=torch.bool).fill_diagonal_(False)
    return (x @ x.t())[mask].exp().sum() * x


def _kept(x: Tensor) -> Tensor:
    """What a model writes that knows empty selections."""
    rows = (x[:, 0] < 9).nonzero()
    if rows.size(0) > 0:
        return torch.gather(x, 0, rows.expand(rows.size(0), x.size(1))).sum(0)
    return torch.zeros(x.shape[1])


def _set_at_places(x: Tensor) -> Tensor:
    best, h = x[:, 0].argmax(), torch.zeros(3, x.shape[0], 6, 4)
    h[:, best] = x[0].unsqueeze(1) * 2
    h[1, -1 - best, ..., best % 4] = x[0].exp()
    h[..., best % 6, None, :] = x.sum()
    h[best % 3, 0, 2] += x[0, :4]
    h[None, 0, best, 3:, best % 2] = 1
    return h


def _twice_by_one_mask(x: Tensor) -> Tensor:
    """Selections that are compared, which torch does only where it knows that they fit."""
    y, kept = x.flip(1), x[:, 1] > 0
    loss = functional.smooth_l1_loss(x[kept], y[kept])
    loss = loss + functional.huber_loss(x[x[:, 2] < 0], y[x[:, 2] < 0])
    wide = torch.masked_select(x, kept[:, None]), y.masked_select(kept[:, None])
    z = x * 2
    above = z[z[:, 0] > 0]
    z[:, 0] += 1
    return loss + functional.smooth_l1_loss(*wide) + above.sum() + z[z[:, 0] > 0].sum()


MASKED: dict[str, Callable[..., Any]] = {
    "elements": lambda x: x[x > 0].exp().sum(),
    "rows": lambda x: (x[x[:, 0] > 0] * 2).sum(0),
    "columns": lambda x: (x[:, x[0] > 0] * 2).sum(1),
    "nothing": lambda x: x[x > 99].sum() + x,
    "mean of nothing": lambda x: x[x[:, 0] > 99].mean(0) * x.sum(),
    "nonzero": lambda x: x[torch.nonzero(x[:, 0] > 0)[:, 0]].sum(0),
    "masked_select": lambda x: x.masked_select(x[:, :1] > 0).pow(2).sum(),
    "masked_select of rows": lambda x: (
        x.masked_select((x[:, 1] < 1).view(-1, 1)).view(-1, 6) * x[x[:, 1] < 1]
    ).sum(0),
    "by group": _by_group,
    "distinct": lambda x: x[torch.unique(x.argmax(1) % len(x))].sum(0),
    "others": _others,
    "kept": _kept,
    "masked_scatter": lambda x: x.masked_scatter(x[:, :1] > 0, x.flip(0) + 1),
    "rows set": _set_rows,
    "set to rows": _set_to_rows,
    "without itself": _without_itself,
    "index_put": lambda x: x.index_put((x[:, 1] > 0,), x[0] * 3),
    "axes apart": lambda x: (x[:, :, None] * x[:, None])[:, [0, 2, 1]][:1, :, [3]],
    "indices apart": lambda x: (x[:, :, None] * x[:, None])[[0, 0], :, [2, 4]],
    "set by two": _set_by_two,
    "twice by one mask": _twice_by_one_mask,
    "set at places": _set_at_places,
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", MASKED)
def test_masks(name: str) -> None:
    assert_as_torch(MASKED[name], lambda n: (_numbers(n, 6),))


def test_edges_of_a_graph() -> None:
    assert_as_torch(_without_loops, lambda n: (_numbers(5, 3), _graph(n)))


def _last_set(x: Tensor, y: Tensor) -> Tensor:
    z = y * 2
    z[-len(x) :] = x * 3
    z[-len(x)] = x[0]
    return z


FREE_PLACES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the last": lambda x, y: x + y[-len(x) :] * 2,
    "all": lambda x, y: x + (x * y[: len(x)])[-len(x) :],
    "the last before": lambda x, y: y[-len(x) - 2 : -2] * 2 + x,
    "written": _last_set,
    "one": lambda x, y: y[-len(x)] * y[len(y) // 2] + x[len(x) - 1, :5],
    "one behind an ellipsis": lambda x, y: (y[len(x), ..., None, 1:] * x[..., -1, 1:]).sum(0),
    "each second": lambda x, y: [(x[::2] ** 2).sum(), (y[2:-1:3] ** 3).sum(), y[-len(x) :: 2]],
}


def test_logits_of_all_places_but_the_last() -> None:
    """Flattened, as a language model's loss has them: torch asks whether n - 1 is 1."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        logits = (x @ weight)[:, :-1].reshape(-1, 6)
        return functional.cross_entropy(logits, x.argmax(-1)[:, 1:].reshape(-1), reduction="none")

    assert_as_torch(run, lambda n: (_numbers(3, n, 4), _numbers(4, 6)))
    assert_as_torch(run, lambda n: (_numbers(n, n + 1, 4), _numbers(4, 6)))


@pytest.mark.parametrize("name", FREE_PLACES)
def test_places_along_a_free_axis(name: str) -> None:
    assert_as_torch(FREE_PLACES[name], lambda n: (_numbers(n, 5), _numbers(n + 9, 5)))


def test_slices_that_a_short_axis_ends_before() -> None:
    """Their numbers are torch's at every length, 1 as well, where less than was asked for is."""

    def run(x: Tensor) -> list[Tensor]:
        ends = [x[:, -3:] + x[:, -3:] ** 2, x[-6:] ** 2, x[..., -2:, :] ** 3, x[:, -3::2] * 2]
        ends.append(x[:, -6:].reshape(-1, 3) ** 2)
        starts = [
            x[:, :3] ** 2,
            (x[:, :-1][:, :6] ** 2).sum(1),
            torch.cat([x[:, :2], x[:, -2:]], 1),
        ]
        return [*ends, *starts, (x[:, 3:] ** 2).sum(1), (x[:, -5:-2] ** 2).sum(1)]

    assert_as_torch(run, lambda n: (_numbers(2, n, 3),), sizes=(1, 2, 3, 4, 7))
    assert_as_torch(run, lambda n: (_numbers(n, n, 3),), sizes=(1, 2, 3, 4, 7))


def test_a_slice_that_has_to_be_of_its_length_sets_a_least_size() -> None:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return x[:, -3:].reshape(-1, 9) @ weight

    def make(n: int) -> tuple[Tensor, Tensor]:
        return _numbers(2, n, 3), _numbers(9, 2)

    assert recorded(run, make)[1].check_axes() == {"n4_7": 3}
    assert_as_torch(run, make, sizes=(3, 4, 7))


def test_a_selection_that_may_not_be_empty_refuses_the_step(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        kept = batch["x"][batch["label"] >= 0]
        scores = model(kept) if kept.size(0) > 0 else torch.stack([])  # raises
        labels = batch["label"][batch["label"] >= 0]
        return functional.cross_entropy(scores, labels), {"scores": scores}

    batch = {"x": _numbers(4, 2), "label": torch.tensor([0, -1, 2, 1])}
    exported = export.train_step(
        nn.Linear(2, 3),
        loss,
        batch,
        optimizer=export.Sgd(0.1),
        dynamic={"x": {0: "b"}, "label": {0: "b"}},
        directory=tmp_path / "artifact",
    )
    trainer = Trainer(exported.directory)
    given = {name: tensor.numpy() for name, tensor in batch.items()}
    trainer.step(given)
    assert trainer.predict(given)["scores"].shape == (3, 3)
    given["label"] = np.full(4, -1)
    with pytest.raises(NonFiniteStep):
        trainer.step(given)
    with pytest.raises(GraphRunError):
        trainer.predict(given)


TABLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": lambda x, t: x + t[: x.shape[1]],
    "rows behind an axis": lambda x, t: x + t[None, : x.shape[1]],
    "rows from the second": lambda x, t: x + t[1 : x.shape[1] + 1],
    "square": lambda x, t: (t @ t.T)[: x.shape[1], : x.shape[1]] @ x,
    "behind an ellipsis": lambda x, t: x + t.T[..., : x.shape[1]].T,
    "one column": lambda x, t: x + t[: x.shape[1], 0, None],
    "a place that data name": lambda x, t: x[x[:, 0, 0].argmax()] * t[:2].sum(),
    "places among slices": lambda x, t: (
        x[..., x.sum((0, 1)).argmax(), None] * t[: x.shape[1], t[0].argmin(), None]
    ),
    "a place from the end": lambda x, t: (x[None, -1 - x[:, 0, 0].argmax()] + t[0, 0]) ** 2,
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_up_to_a_free_size(name: str) -> None:
    assert_as_torch(TABLES[name], lambda n: (_numbers(2, n, 4), _numbers(9, 4)))


class Positions(nn.Module):
    """Learned positions and a mask that were made for 12 places."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(7, 8)
        self.place = nn.Parameter(_numbers(1, 12, 8))
        self.out = nn.Linear(8, 7)
        self.register_buffer("numbers", torch.arange(12).expand(1, -1))
        self.register_buffer("seen", torch.ones(12, 12).tril().bool(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        h = self.token(tokens) + self.place[:, :n] + functional.one_hot(self.numbers[:, :n] % 8, 8)
        scores = (h @ h.transpose(1, 2)).masked_fill(~self.seen[:n, :n], float("-inf"))
        result: Tensor = self.out(scores.softmax(-1) @ h)
        return result


class Asserting(Positions):
    """Says how many places it has, as GPTs do (minGPT's ``assert`` is another to pytest)."""

    def forward(self, tokens: Tensor) -> Tensor:
        batch, n = tokens.size()
        if n > 11 or not batch < 6000:
            raise ValueError(f"{n} tokens for 11 places")
        return super().forward(tokens)


@pytest.mark.parametrize(
    ("model", "longest", "refusal"),
    [(Positions, 12, GraphRunError), (Asserting, 11, NonFiniteStep)],
)
def test_a_table_that_is_too_short_refuses_the_step(
    model: type[Positions], longest: int, refusal: type[Exception], tmp_path: Path
) -> None:
    tokens = torch.randint(7, (3, 9), generator=torch.Generator().manual_seed(1))
    exported = export.train_step(
        model(),
        lambda m, b: functional.cross_entropy(m(b["tokens"]).flatten(0, 1), b["tokens"].flatten()),
        {"tokens": tokens},
        optimizer=export.Sgd(0.1),
        dynamic={"tokens": {0: "batch", 1: "length"}},
        directory=tmp_path / "artifact",
    )
    trainer = Trainer(exported.directory)
    for length in (1, 4, longest):
        trainer.step({"tokens": np.ones((2, length), np.int64)})
    before = trainer.state
    with pytest.raises(refusal):
        trainer.step({"tokens": np.ones((2, longest + 1), np.int64)})
    for name, value in trainer.state.items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize(
    ("rows", "fits", "below"),
    [
        (lambda table, n: table[n - 4 : n], 4, 3),
        (lambda table, n: table[: n - 3], 3, 2),
        (lambda table, n: table[: n - 1], 1, None),
    ],
)
def test_an_end_that_falls_below_zero_refuses_the_step(
    rows: Callable[[Tensor, int], Tensor], fits: int, below: int | None, tmp_path: Path
) -> None:
    """torch would count it from the table's end."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.linspace(-1.0, 1.0, 20).reshape(10, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x.mean() * self.table.mean() + rows(self.table, x.shape[1]).square().sum()

    model = Model()
    exported = export.train_step(
        model, lambda m, b: m(b["x"]), {"x": torch.randn(2, 6)}, optimizer=export.Sgd(0.1),
        dynamic={"x": {1: "n"}}, directory=tmp_path / "artifact", verify=False,
    )  # fmt: skip
    trainer = Trainer(exported.directory)
    x = torch.ones(2, fits)
    assert trainer.step({"x": x.numpy()}) == pytest.approx(model(x).item(), abs=1e-6)
    if below is not None:
        with pytest.raises((BatchError, GraphRunError)):
            trainer.step({"x": np.ones((2, below), np.float32)})
