"""The segmented optimizer beside an oracle written from the equations: in torch, and as a graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import export
from device_sdk import Trainer
from export.optimizers import Segmented
from tests.export.segmented_oracle import SegmentedOracle

SIZES = (7, 5)


class _TwoVectors(nn.Module):
    """Its gradient is the batch entry ``slope``; two parameters, so that totals span both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, SIZES[0]))
        self.second = nn.Parameter(torch.linspace(2, 3, SIZES[1]))


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    assert isinstance(model, _TwoVectors)
    return (torch.cat([model.first, model.second]) * batch["slope"]).sum()


def _export(folder: Path, optimizer: Segmented) -> Trainer:
    export.train_step(
        _TwoVectors(),
        _loss,
        {"slope": torch.linspace(-1, 2, sum(SIZES))},
        optimizer=optimizer,
        dynamic={},
        directory=folder,
    )
    return Trainer(folder, providers="cpu")


def _slopes(rng: np.random.Generator, steps: int) -> np.ndarray:
    """Gradients with a common direction, noise, an element that is always 0 and one seldom not."""
    slopes = 1.0 + 0.8 * rng.standard_normal((steps, sum(SIZES)))
    slopes[:, 3] = 0
    slopes[:, 4] *= np.arange(steps) % 5 == 2
    return slopes.astype(np.float32)


def _oracle(optimizer: Segmented) -> SegmentedOracle:
    return SegmentedOracle(
        optimizer.lr, optimizer.window, optimizer.mu1, optimizer.sigma, optimizer.xi, optimizer.eps
    )


def _run_torch(optimizer: Segmented, slopes: np.ndarray, split: bool) -> list[np.ndarray]:
    """Through ``update`` alone, in float64, with one parameter tensor or two."""
    start = torch.cat([p.detach().double() for p in _TwoVectors().parameters()])
    cuts = list(SIZES) if split else [sum(SIZES)]
    parameters = list(start.split(cuts))
    state = {
        spec.name: [torch.zeros(n, dtype=torch.float64) for n in cuts]
        if spec.per_parameter
        else [torch.zeros((), dtype=torch.int64 if "at" in spec.name[-3:] else torch.float64)]
        for spec in optimizer.state()
    }
    hyper = {k: torch.tensor(v, dtype=torch.float64) for k, v in optimizer.hyper().items()}
    found = []
    for step, slope in enumerate(slopes):
        gradients = list(torch.from_numpy(slope).double().split(cuts))
        update = optimizer.update(parameters, gradients, state, torch.tensor(step), hyper)
        parameters, state = update.parameters, update.state
        found.append(torch.cat(parameters).numpy())
    return found


CASES = {
    "never switches": Segmented(lr=0.01, window=3, mu1=0.9, sigma=0.9, xi=0.0),
    "switches": Segmented(lr=0.01, window=2, mu1=0.9, sigma=0.7, xi=2e-4),
    "window of one": Segmented(lr=0.05, window=1, mu1=0.99, sigma=0.5, xi=1e-3),
    "window of five": Segmented(lr=0.02, window=5, mu1=0.5, sigma=0.8, xi=1e-4),
}


@pytest.mark.parametrize("case", CASES)
def test_parameters_rates_and_switch_follow_the_equations(tmp_path: Path, case: str) -> None:
    optimizer = CASES[case]
    slopes = _slopes(np.random.default_rng(3), 60)
    trainer, oracle = _export(tmp_path / "a", optimizer), _oracle(optimizer)
    w = np.concatenate([trainer.parameters["first"], trainer.parameters["second"]]).astype(float)
    exact = {split: _run_torch(optimizer, slopes, split) for split in (False, True)}
    for step, slope in enumerate(slopes):
        w = oracle.step(w, slope)
        trainer.step({"slope": slope})
        state = trainer.state
        assert state["segmented.switched_at"] == oracle.switched_at, f"at step {step + 1}"
        np.testing.assert_allclose(state["segmented.eta"], oracle.eta, rtol=2e-4)
        np.testing.assert_allclose(state["segmented.eta_sgd"], oracle.eta_sgd, rtol=2e-4)
        got = np.concatenate([trainer.parameters["first"], trainer.parameters["second"]])
        np.testing.assert_allclose(got, w, rtol=1e-4, atol=1e-5)
        for run in exact.values():
            np.testing.assert_allclose(run[step], w, rtol=1e-12, atol=1e-12)
    if case == "never switches":
        assert oracle.switched_at == 0
    else:
        assert 1 < oracle.switched_at < 50, "choose a case that switches and goes on"


def test_a_step_against_the_gradient_is_taken_but_estimates_nothing(tmp_path: Path) -> None:
    optimizer = Segmented(lr=0.01, window=3, mu1=0.9, sigma=0.6, xi=10.0)
    ahead = np.full((1, sum(SIZES)), 1.0, np.float32)
    # delta'R < 0 at steps 2 and 3: the window still points ahead while the gradient points back.
    slopes = np.concatenate([5 * ahead, -ahead, -ahead, ahead])
    trainer, oracle = _export(tmp_path / "a", optimizer), _oracle(optimizer)
    w = np.concatenate([trainer.parameters["first"], trainer.parameters["second"]]).astype(float)
    switched = []
    for slope in slopes:
        w = oracle.step(w, slope)
        trainer.step({"slope": slope})
        state = trainer.state
        switched.append(int(state["segmented.switched_at"]))
        np.testing.assert_allclose(state["segmented.average"], oracle.average, rtol=1e-5)
        np.testing.assert_allclose(state["segmented.eta"], oracle.eta, rtol=1e-5)
        got = np.concatenate([trainer.parameters["first"], trainer.parameters["second"]])
        np.testing.assert_allclose(got, w, rtol=1e-5)
    # xi would let every step switch; the first may not, and the two skipped ones do not.
    assert switched == [0, 0, 0, 4]


def test_a_zero_gradient_moves_nothing(tmp_path: Path) -> None:
    trainer = _export(tmp_path / "a", Segmented())
    start = trainer.parameters
    trainer.step({"slope": np.zeros(sum(SIZES), np.float32)})
    for name, value in trainer.parameters.items():
        np.testing.assert_array_equal(value, start[name])
    assert trainer.state["segmented.eta"] == 0


def test_wrong_settings_are_refused() -> None:
    for wrong, message in (
        ({"window": 0}, "window"),
        ({"mu1": 1.0}, "mu1"),
        ({"sigma": -0.1}, "sigma"),
        ({"xi": -1.0}, "xi"),
        ({"eps": 0.0}, "eps"),
        ({"lr": -1.0}, "lr"),
    ):
        with pytest.raises(ValueError, match=message):
            Segmented(**wrong)  # type: ignore[arg-type]
