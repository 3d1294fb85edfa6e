"""Verification: batches that torch can take, errors that say what to do, and wrong graphs found."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import export
from export import build, verify
from export.rounding import rounded_anew
from export.step import train_step
from export.write import Graphs

ROWS = 12


def test_labels_and_identities_stay_valid() -> None:
    """Rounding-sized changes are for what is continuous: no label above 1, no other row."""
    rng = np.random.default_rng(0)
    model = nn.BatchNorm1d(4)
    model.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))
    batch = {
        "label": torch.tensor([1.0, 0.0, 0.25, 0.99999994]),
        "id": torch.tensor([3.0, 17.0, 2.0, 5.0]),
        "x": torch.randn(4, 4),
    }
    axes = {name: {0: "batch"} for name in batch}
    problem = build._problem(
        build.Recipe(model, lambda m, b: m(b["x"]).sum(), batch, axes, export.Sgd(0.1))
    )
    state = verify.initial_state(problem, problem.axes.example, rng)
    drawn = verify.draw_batch(problem, problem.axes.example, rng, in_order=True)
    inputs = {**state, **drawn}
    for _ in range(50):
        moved = verify._moved_by_rounding(problem, inputs, rng, verify.ROUNDING)
        np.testing.assert_array_equal(moved["batch.id"], inputs["batch.id"])
        np.testing.assert_array_equal(moved["batch.label"][:2], inputs["batch.label"][:2])
        assert moved["batch.label"].max() <= 1
        assert (moved["batch.x"] != inputs["batch.x"]).any()
        weights = moved["state.packed"]
        assert (weights != inputs["state.packed"]).any()
        assert np.isin([0.0, 1.0], moved["state.buffers"]).all()


def test_offsets_keep_their_order(assert_parity: Callable[..., export.Exported]) -> None:
    """As in DLRM: where each bag begins is no row to be drawn."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(20, 4, mode="sum")
            self.last = nn.Linear(4, 2)

        def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
            out: Tensor = self.last(torch.tanh(self.bag(indices, offsets)))
            return out

    torch.manual_seed(0)
    batch = {"indices": torch.randint(20, (ROWS,)), "offsets": torch.tensor([0, 2, 5, 9, 11])}
    dynamic = {"indices": {0: "total"}, "offsets": {0: "bags"}}
    assert_parity(Bags(), batch, dynamic=dynamic)


def _in_rows(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Fails, when it runs, on rows in another order, and on fewer."""
    first = batch["x"][:, 0]
    if first.device.type != "meta" and not isinstance(first, torch._subclasses.FakeTensor):
        expected = torch.arange(ROWS, dtype=first.dtype) / 7
        if first.shape[0] != ROWS or not torch.allclose(first, expected):
            raise RuntimeError("only whole sequences")
    y: Tensor = model(batch["x"])
    return (y * y).mean()


def _sequence() -> dict[str, Tensor]:
    x = torch.randn(ROWS, 3)
    x[:, 0] = torch.arange(ROWS) / 7
    return {"x": x}


def test_rows_that_depend_on_each_other_are_compared_as_they_stand(
    assert_parity: Callable[..., export.Exported],
) -> None:
    torch.manual_seed(0)
    exported = assert_parity(nn.Linear(3, 2), _sequence(), loss=_in_rows)
    assert exported.report is not None
    assert {c.sizes["batch"] for c in exported.report.comparisons} == {ROWS}
    assert {c.step for c in exported.report.comparisons} >= {0, 1, 2}


def test_torchs_own_failure_is_told(assert_parity: Callable[..., export.Exported]) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not isinstance(batch["x"], torch._subclasses.FakeTensor):
            raise RuntimeError("no such table")
        y: Tensor = model(batch["x"])
        return y.sum()

    with pytest.raises(export.ExportError, match=r"torch itself fails.*no such table.*instead"):
        assert_parity(nn.Linear(3, 2), _sequence(), loss=loss)


@pytest.mark.parametrize("graph", ["train", "gradients", "infer"])
@pytest.mark.parametrize("what", ["wrong", "failing"])
def test_a_wrong_graph_is_refused(
    graph: str,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    assert_parity: Callable[..., export.Exported],
) -> None:
    """Off by 1e-4, or one that onnxruntime stops at."""
    own = build.lower

    def lower(problem: Any, say: Any) -> Graphs:
        graphs = own(problem, say)
        model = getattr(graphs, graph)
        _spoil(model, failing=what == "failing")
        return graphs

    monkeypatch.setattr(build, "lower", lower)
    torch.manual_seed(0)
    said = "differs from torch" if what == "wrong" else "onnxruntime (fails|cannot run)"
    with pytest.raises(export.ExportError, match=said):
        assert_parity(
            nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 2)),
            {"x": torch.randn(ROWS, 5)},
        )


def _spoil(model: onnx.ModelProto, *, failing: bool) -> None:
    """Multiplies a large result by 1.0001, or gives it a shape that it cannot have."""
    names = {each.name for each in model.graph.output}
    chosen = [n for n in names if n in ("new.packed", "gradient.packed", "output.output")]
    node = next(n for n in model.graph.node if chosen[0] in n.output)
    place = list(node.output).index(chosen[0])
    node.output[place] = "spoilt"
    if failing:
        value = onnx.numpy_helper.from_array(np.array([7, 11], np.int64), "factor")
        extra = onnx.helper.make_node("Reshape", ["spoilt", "factor"], [chosen[0]])
    else:
        value = onnx.numpy_helper.from_array(np.array(1.0001, np.float32), "factor")
        extra = onnx.helper.make_node("Mul", ["spoilt", "factor"], [chosen[0]])
    model.graph.initializer.append(value)
    model.graph.node.append(extra)


def test_the_yardstick_is_drawn_as_far_as_needed_and_once_a_step(
    monkeypatch: pytest.MonkeyPatch, assert_parity: Callable[..., export.Exported]
) -> None:
    """Each reference is computed once for all threads; draws end where they suffice."""
    calls: list[str] = []
    own = verify._computed

    def counted(problem: Any, inputs: Any, function: Any) -> Any:
        calls.append(function.__name__)
        return own(problem, inputs, function)

    monkeypatch.setattr(verify, "_computed", counted)
    torch.manual_seed(0)
    assert_parity(
        nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)), {"x": torch.randn(ROWS, 5)}
    )
    assert calls.count("train_step") == 14
    assert calls.count("predict") == 6


@pytest.mark.parametrize("off", [2e-6, 1e-4])
def test_a_kink_within_a_deep_networks_rounding_is_no_difference(
    monkeypatch: pytest.MonkeyPatch, off: float
) -> None:
    """Of a hundred activations' kinks, one lies so far from where torch is in both precisions."""

    def reference(problem: Any, inputs: Any, function: Any) -> dict[str, np.ndarray]:
        weights = inputs["state.w"]
        return {"gradient.w": np.where(weights > 1 + off, 2.0, 1.0)}

    monkeypatch.setattr(verify, "_computed", reference)
    slot = SimpleNamespace(
        kind="parameter", name="w", packed=False, members=[SimpleNamespace(name="w")]
    )
    problem: Any = SimpleNamespace(slots=[slot], parameter_slots=[slot])
    inputs = {"state.w": np.ones(100, np.float32)}
    exact = reference(problem, inputs, train_step)
    jumped = np.where(np.arange(100) == 7, 2.0, exact["gradient.w"])
    results = verify.Results(jumped, exact["gradient.w"], exact["gradient.w"])
    found = verify.compare("gradient of w", results, (0, 1, {}))
    yardstick = verify._Yardstick((problem, problem), inputs, exact, np.random.default_rng(0))
    assert (yardstick.allow([found])[0].excess > 1) == (off == 1e-4)


@pytest.mark.parametrize("off", [5e-5, 1e-2])
def test_the_loss_of_a_sure_classifier_is_as_exact_as_its_logarithm(off: float) -> None:
    """The logarithm of 1.004 is off by what 1.004 is rounded, wherever float32 torch happens to be.

    The logits hardly move it: what the parts of ``log_softmax`` are rounded does.
    """

    def loss(problem: Any, tensors: Any, context: Any) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(tensors["state.w"], torch.tensor([0]))}

    single = SimpleNamespace(
        slots=[], parameter_slots=[SimpleNamespace(name="w", dtype=torch.float32)]
    )
    double = SimpleNamespace(
        slots=[], parameter_slots=[SimpleNamespace(name="w", dtype=torch.float64)]
    )
    inputs = {"state.w": np.array([[6.3, -0.2, 0.1, -1.0]], np.float32)}
    problems: Any = (single, double)
    exact = verify._computed(problems[1], inputs, loss)
    results = verify.Results(exact["loss"] * (1 + off), exact["loss"], exact["loss"])
    found = verify.compare("loss", results, (0, 1, {}))
    yardstick = verify._Yardstick(problems, inputs, exact, np.random.default_rng(0), loss)
    assert (yardstick.allow([found])[0].excess > 1) == (off == 1e-2)


def test_arithmetic_that_is_rounded_anew_keeps_counts_and_what_is_selected() -> None:
    values = torch.tensor([1.1, 2.0, 3.3])
    with rounded_anew(np.random.default_rng(0)):
        assert torch.ones(7).sum() == 7
        assert torch.equal(values.flip(0).max(), values[2])
        assert len({float((values / 3).sum()) for _ in range(9)}) > 1


def test_progress_is_told(assert_parity: Callable[..., export.Exported], tmp_path: Any) -> None:
    said: list[str] = []
    export.train_step(
        nn.Linear(5, 2),
        lambda m, b: functional.mse_loss(m(b["x"]), torch.zeros(b["x"].shape[0], 2)),
        {"x": torch.randn(ROWS, 5)},
        optimizer=export.Sgd(0.1),
        dynamic={"x": {0: "batch"}},
        directory=tmp_path / "artifact",
        progress=said.append,
    )
    kinds = [text.split()[0].rstrip(":") for text in said]
    assert list(dict.fromkeys(kinds)) == ["tracing", "lowering", "verifying", "writing"]
    assert "verifying: step 6 of 6" in said
