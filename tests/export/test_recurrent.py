"""Recurrent layers against torch: every option, gradients into inputs and first states too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import export
from export.rewrites.recurrent import Weights, with_gradient

Parity = Callable[..., export.Exported]


class Sequence(nn.Module):
    """A layer behind a linear one, so that its input needs a gradient; all its results matter."""

    def __init__(
        self,
        kind: Any,
        *,
        features: int = 5,
        units: int = 6,
        learned_state: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.before = nn.Linear(3, features)
        self.layer = kind(features, units, **settings)
        rows = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        sizes = [units] if kind is not nn.LSTM else [settings.get("proj_size") or units, units]
        self.first = (
            nn.ParameterList([nn.Parameter(torch.randn(rows, 1, size)) for size in sizes])
            if learned_state
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, 3] -> all outputs and last states of each sequence, side by side."""
        batch = x.shape[0]
        x = self.before(x)
        states = None
        if self.first is not None:
            wide = tuple(state.expand(-1, batch, -1) for state in self.first)
            states = wide if len(wide) > 1 else wide[0]
        y, last = self.layer(x if self.layer.batch_first else x.transpose(0, 1), states)
        y = y if self.layer.batch_first else y.transpose(0, 1)
        ends = last if isinstance(last, tuple) else (last,)
        return torch.cat(
            [y.reshape(batch, -1), *(end.transpose(0, 1).reshape(batch, -1) for end in ends)], dim=1
        )


KINDS: dict[str, Any] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
OPTIONS: dict[str, dict[str, Any]] = {
    "everything": {
        "num_layers": 2,
        "bidirectional": True,
        "batch_first": True,
        "learned_state": True,
        "dropout": 0.4,
    },
    "no_bias": {"bias": False},
    # In both directions they are in test_packed.py.
    "projected": {
        "num_layers": 2,
        "learned_state": True,
        "dropout": 0.4,
        "proj_size": 2,
    },
    "projected, no bias": {"bias": False, "proj_size": 4, "batch_first": True},
}
CASES = [
    (options, kind)
    for options, chosen in OPTIONS.items()
    for kind in (("lstm",) if "proj_size" in chosen else ("gru", "lstm"))
]


def _sequences(batch: int, steps: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, steps, 3, generator=torch.Generator().manual_seed(1))}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("options", "kind"), CASES)
def test_layer_matches_torch(options: str, kind: str, assert_parity: Parity) -> None:
    torch.manual_seed(0)
    assert_parity(Sequence(KINDS[kind], **OPTIONS[options]), _sequences(4, 7))


def test_relu_rnn_matches_torch(assert_parity: Parity) -> None:
    torch.manual_seed(0)
    model = Sequence(nn.RNN, nonlinearity="relu", learned_state=True, bidirectional=True)
    assert_parity(model, _sequences(4, 7))


# Layers above each other and both ways are in OPTIONS.
@settings(max_examples=2)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    features=st.integers(1, 9),
    units=st.integers(1, 17),
    bias=st.booleans(),
    batch_first=st.booleans(),
    learned_state=st.booleans(),
    batch=st.integers(1, 9),
    steps=st.integers(1, 12),
)
# Its loss is 1/64 of the two numbers that it is the difference of.
@example(
    kind="rnn", features=8, units=16, bias=True, batch_first=False, learned_state=False,
    batch=2, steps=1,
)  # fmt: skip
def test_any_configuration_matches_torch(
    kind: str,
    features: int,
    units: int,
    bias: bool,
    batch_first: bool,
    learned_state: bool,
    batch: int,
    steps: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    torch.manual_seed(0)
    model = Sequence(
        KINDS[kind],
        features=features,
        units=units,
        bias=bias,
        batch_first=batch_first,
        learned_state=learned_state,
    )
    exported = export.train_step(
        model,
        lambda m, b: (m(b["x"]) ** 2).mean() + m(b["x"]).mean(),
        _sequences(batch, steps),
        optimizer=export.Sgd(lr=0.1),
        dynamic={"x": {0: "batch"}},
        directory=tmp_path_factory.mktemp("fuzz") / "artifact",
    )
    assert exported.report is not None and exported.report.worst.excess <= 1


def test_time_may_be_a_named_axis(assert_parity: Parity) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 6, bidirectional=True, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)[0]
            return y.mean(1) + y[:, -1]

    torch.manual_seed(0)
    assert_parity(Mean(), _sequences(4, 7), dynamic={"x": {0: "batch", 1: "steps"}})


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_one_sequence_without_a_batch_axis(kind: str, assert_parity: Parity) -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = KINDS[kind](3, 6)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)[0]
            return y

    torch.manual_seed(0)
    assert_parity(Alone(), {"x": torch.randn(7, 3)}, dynamic={})


@pytest.mark.parametrize("kind", ["RNNCell", "GRUCell", "LSTMCell"])
def test_cell_in_a_loop_matches_torch(kind: str, assert_parity: Parity) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = getattr(nn, kind)(3, 6)

        def forward(self, x: Tensor) -> Tensor:
            state: Any = None
            for step in range(x.shape[1]):
                state = self.cell(x[:, step], state)
            end: Tensor = torch.cat(state, 1) if isinstance(state, tuple) else state
            return end

    torch.manual_seed(0)
    assert_parity(Loop(), _sequences(4, 3))


def test_a_layer_without_gradient_may_feed_one_with(assert_parity: Parity) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fixed = nn.LSTM(3, 4, bidirectional=True, batch_first=True)
            self.layer = nn.GRU(8, 5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                inner = self.fixed(x)[0]
            last: Tensor = self.layer(inner)[1][0]
            return last

    torch.manual_seed(0)
    assert_parity(Frozen(), _sequences(4, 7))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_two_layers_of_128_units_over_48_steps_stay_small(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    export.train_step(
        Sequence(KINDS[kind], features=64, units=128, num_layers=2, batch_first=True),
        lambda model, batch: model(batch["x"]).square().mean(),
        _sequences(4, 48),
        optimizer=export.Adam(),
        dynamic={"x": {0: "batch"}},
        directory=tmp_path / "artifact",
        verify=False,
    )
    assert _count(onnx.load(tmp_path / "artifact" / "train.onnx").graph) < 600


def _count(graph: onnx.GraphProto) -> int:
    inner = [a.g for n in graph.node for a in n.attribute if a.type == onnx.AttributeProto.GRAPH]
    return len(graph.node) + sum(_count(body) for body in inner)


def _double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kind", ["rnn_tanh", "gru", "lstm"])
def test_gradients_agree_with_finite_differences(kind: str, backwards: bool) -> None:
    torch.manual_seed(0)
    blocks = {"rnn_tanh": 1, "gru": 3, "lstm": 4}[kind]
    states = [_double(2, 2) for _ in range(2 if kind == "lstm" else 1)]
    tensors = [_double(2 * blocks, 2), _double(2 * blocks, 2), *(_double(2 * blocks),) * 2]

    def layer(x: Tensor, *given: Tensor) -> Any:
        first, held = given[: len(states)], Weights(*given[len(states) :])
        h, last = with_gradient(kind.upper())(x, first, held, backwards)
        return h, *last[1:]

    assert torch.autograd.gradcheck(layer, (_double(3, 2, 2), *states, *tensors))
