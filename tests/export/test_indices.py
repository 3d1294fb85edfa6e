"""An index that torch refuses is refused by the step, wherever it comes from the batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import one_hot as imported

import export
from device_sdk import BatchError, GraphRunError, NonFiniteStep, Trainer

CLASSES = 4
Pick = Callable[[Tensor, Tensor], Tensor]
"""Logits [b, CLASSES] and labels int64 [b] to what the loss is the mean of."""


def _bag(o: Tensor, y: Tensor) -> Tensor:
    return functional.embedding_bag(y.unsqueeze(1), o.T, mode="sum")


# Where torch raises for every label outside 0 to CLASSES - 1.
FROM_ZERO: dict[str, Pick] = {
    "one_hot": lambda o, y: functional.one_hot(y, CLASSES) * torch.log_softmax(o, 1),
    "one_hot_imported": lambda o, y: o * imported(y, num_classes=o.shape[1]).float(),
    "gather": lambda o, y: torch.log_softmax(o, 1).gather(1, y.unsqueeze(1)),
    "margin": lambda o, y: functional.multi_margin_loss(o, y),
    "index_select": lambda o, y: o.T.index_select(0, y),
    "embedding": lambda o, y: functional.embedding(y, o.T),
    "embedding_int32": lambda o, y: functional.embedding(y.to(torch.int32), o.T),
    "embedding_bag": _bag,
    "scatter": lambda o, y: o * o.detach().scatter(1, y.unsqueeze(1), 2.0),
    "scatter_source": lambda o, y: o.scatter(1, y.unsqueeze(1), o[:, :1] * 3) ** 2,
    "scatter_add": lambda o, y: o.scatter_add(1, y.unsqueeze(1), o[:, :1] * 3) ** 2,
    "scatter_reduce": lambda o, y: o.scatter_reduce(1, y.unsqueeze(1), o[:, :1] * 3, "sum") ** 2,
    "index_add": lambda o, y: torch.zeros(CLASSES, CLASSES).index_add(0, y, o) ** 2,
    "index_copy": lambda o, y: o.T.index_copy(0, y[:1], o[:1, :1].expand(1, o.shape[0])) ** 2,
    "computed": lambda o, y: o.gather(1, 3 - (3 - y.unsqueeze(1))),
    "two_of_them": lambda o, y: o.gather(1, y.unsqueeze(1)) + functional.embedding(y % 2, o.T)[0],
}
# Where torch counts negative ones from the end.
FROM_THE_END: dict[str, Pick] = {
    "brackets": lambda o, y: o.T[y],
    "brackets_twice": lambda o, y: o[torch.arange(o.shape[0]), y],
    "take": lambda o, y: o[0, 0] * o[0].detach().take(y),
    "index_put": lambda o, y: (
        o.index_put((torch.arange(o.shape[0]), y), torch.tensor(3.0, dtype=o.dtype)) ** 2
    ),
    "index_fill": lambda o, y: o.index_fill(1, y[:1], 3.0) ** 2,
}
WRONG = (CLASSES, CLASSES + 5, -1, -CLASSES, -CLASSES - 1, -9, -100, 10**12, -(2**63), 2**63 - 1)


def exported(pick: Pick, folder: Path) -> tuple[torch.nn.Linear, Trainer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, CLASSES)
    dynamic = {"x": {0: "batch"}, "label": {0: "batch"}}
    export.train_step(
        model,
        lambda m, b: pick(m(b["x"]), b["label"]).mean(),
        {"x": torch.randn(8, 6), "label": torch.arange(8) % CLASSES},
        optimizer=export.Sgd(lr=0.1),
        dynamic=dynamic,
        predict=lambda m, b: {"picked": pick(m(b["x"]), b["label"])},
        directory=folder,
    )
    return model, Trainer(folder)


def samples(*labels: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((len(labels), 6), dtype=np.float32)
    return {"x": x, "label": np.array(labels)}


def of_torch(model: torch.nn.Module, pick: Pick, batch: dict[str, np.ndarray]) -> float | None:
    """Torch's loss, or None where it raises."""
    try:
        loss = pick(model(torch.from_numpy(batch["x"])), torch.from_numpy(batch["label"])).mean()
    except (RuntimeError, IndexError):
        return None
    return loss.item()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*FROM_ZERO, *FROM_THE_END])
def test_the_step_takes_the_indices_that_torch_takes(name: str, tmp_path: Path) -> None:
    pick = {**FROM_ZERO, **FROM_THE_END}[name]
    model, trainer = exported(pick, tmp_path / "artifact")
    start = trainer.state
    refused = 0
    for label in WRONG:
        for batch in (samples(label, 0, 3), samples(label), samples(label, 1, label)):
            expected = of_torch(model, pick, batch)
            if expected is not None:
                assert trainer.step(batch) == pytest.approx(expected, rel=1e-4), label
                trainer.set_state(start)
                continue
            refused += 1
            with pytest.raises((NonFiniteStep, GraphRunError), match=r"out of|index|indice"):
                trainer.step(batch)
            for key, value in trainer.state.items():
                np.testing.assert_array_equal(value, start[key])
    assert refused >= (3 * len(WRONG) if name in FROM_ZERO and name != "embedding_int32" else 0)
    good = samples(0, 3, 1)
    assert trainer.step(good) == pytest.approx(of_torch(model, pick, good), rel=1e-4)


def test_a_bag_that_begins_beyond_the_input_refuses_the_step(tmp_path: Path) -> None:
    def pick(o: Tensor, y: Tensor) -> Tensor:
        return functional.embedding_bag(torch.arange(3), o.T, y, mode="sum")

    model, trainer = exported(lambda o, y: pick(o, y // 2), tmp_path / "artifact")
    fitting, beyond = samples(0, 4, 6), samples(0, 4, 8)
    torchs = pick(model(torch.from_numpy(fitting["x"])), torch.tensor([0, 2, 3])).mean().item()
    assert trainer.step(fitting) == pytest.approx(torchs, rel=1e-4)
    with pytest.raises(GraphRunError):
        trainer.step(beyond)


def test_a_negative_index_is_named_as_the_cause(tmp_path: Path) -> None:
    _, trainer = exported(FROM_ZERO["gather"], tmp_path / "artifact")
    with pytest.raises(NonFiniteStep, match="indices below 0"):
        trainer.step(samples(0, -1))


@pytest.mark.parametrize("label", [CLASSES, -1])
def test_prediction_makes_zeros_of_a_label_that_is_no_class(label: int, tmp_path: Path) -> None:
    _, trainer = exported(FROM_ZERO["one_hot"], tmp_path / "artifact")
    picked = trainer.predict(samples(0, label))["picked"]
    assert picked[0].any() and not picked[1].any()


@pytest.mark.parametrize(
    ("loss", "checks"),
    [
        (lambda o, y: o.gather(1, torch.zeros(o.shape[0], 1, dtype=torch.int64)), 0),
        (lambda o, y: functional.embedding(torch.arange(o.shape[0]) % 2, o.T), 0),
        (lambda o, y: o[torch.arange(o.shape[0]), y], 0),
        (FROM_ZERO["gather"], 1),
        (FROM_ZERO["two_of_them"], 2),
    ],
)
def test_only_what_the_batch_decides_is_looked_at(loss: Pick, checks: int, tmp_path: Path) -> None:
    exported(loss, tmp_path / "artifact")
    nodes = onnx.load(tmp_path / "artifact/train.onnx").graph.node
    assert [node.op_type for node in nodes].count("ReduceMin") == checks
    last = next(node for node in nodes if "guard" in node.output)
    assert bool(re.match("Where", last.op_type)) == bool(checks)


# By n, the batch's size, to rows of a table of 9; and the sizes that torch refuses.
BY_SIZE: dict[str, tuple[Callable[[Tensor, int], Tensor], tuple[int, ...]]] = {
    "rows before": (lambda t, n: functional.embedding(torch.arange(n - 3, n), t), (1, 2)),
    "no rows": (lambda t, n: t.index_select(0, torch.arange(n - 3)), (1, 2)),
    "backwards": (lambda t, n: functional.embedding(n - 1 - torch.arange(n), t), ()),
    "between": (
        lambda t, n: functional.embedding((torch.arange(n) - 4).clamp(-2, 2) + n - 2, t),
        (1, 2, 3),
    ),
}


@pytest.mark.parametrize("name", BY_SIZE)
def test_an_index_that_a_size_makes_negative_refuses_the_step(name: str, tmp_path: Path) -> None:
    rows, refused = BY_SIZE[name]
    table = nn.Embedding(9, 3)
    export.train_step(
        table,
        lambda m, b: rows(m.weight, b["x"].shape[0]).square().sum() + b["x"].sum(),
        {"x": torch.ones(5)},
        optimizer=export.Sgd(0.1),
        dynamic={"x": {0: "n"}},
        directory=tmp_path / "artifact",
    )
    trainer = Trainer(tmp_path / "artifact")
    start = trainer.state
    for n in (1, 2, 3, 4, 6):
        trainer.set_state(start)
        batch = {"x": np.ones(n, np.float32)}
        if n in refused:
            with pytest.raises((IndexError, RuntimeError)):
                rows(table.weight, n)
            # Fewer rows than any step takes are refused before it, by the artifact's least size.
            with pytest.raises((NonFiniteStep, BatchError), match=r"indices below 0|at least"):
                trainer.step(batch)
        else:
            expected = rows(table.weight, n).square().sum().item() + n
            assert trainer.step(batch) == pytest.approx(expected, rel=1e-5)
