"""Random numbers inside a step: one stream for torch's reference and for the graph."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import export
from device_sdk import Trainer
from export.rewrites.randomness import Randomness

# What the masks were when they were drawn in 64-bit numbers: seed, step, shape, share kept; the
# hash of 70 calls' packed masks. A device in the field draws these.
RECORDED = [
    (0, 0, (3, 5), 0.5, "dbabc09cc074755a"),
    (12345, 7, (2, 3, 4), 0.9, "542d817fdcb3f447"),
    (-1, 2**40, (100,), 0.25, "08854960b8c28142"),
    (2**62 + 11, 3, (17, 1, 1), 0.75, "3380064659784341"),
    (2**31 - 1, 2**31, (1, 1000), 1 / 3, "9f293e3709dc595b"),
]


def _randomness(seed: int, step: int) -> Randomness:
    return Randomness(torch.tensor(seed), torch.tensor(step))


def _mix_in_python(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def _bits_in_python(seed: int, step: int, call: int, elements: int) -> list[int]:
    key = _mix_in_python((seed + 0x9E3779B9 * call) % 2**32)
    key = _mix_in_python((key + step * 0x85EBCA77) % 2**32)
    return [_mix_in_python((i * 0x9E3779B1 + key) % 2**32) for i in range(elements)]


@pytest.mark.parametrize(("seed", "step", "shape", "share", "digest"), RECORDED)
def test_masks_are_those_of_earlier_versions(
    seed: int, step: int, shape: tuple[int, ...], share: float, digest: str
) -> None:
    draw = _randomness(seed, step)
    masks = [draw.keep_mask(shape, share).numpy() for _ in range(70)]
    packed = b"".join(np.packbits(mask).tobytes() for mask in masks)
    assert hashlib.sha256(packed).hexdigest()[:16] == digest
    for call in (1, 64, 65):
        bits = _bits_in_python(seed, step, call, int(np.prod(shape)))
        assert masks[call - 1].ravel().tolist() == [b < round(share * 2**32) for b in bits]


def _drawing(
    draw: Callable[[Tensor, Tensor], Tensor], like: Tensor, free: Sequence[int], folder: Path
) -> Any:
    """Runs a graph whose output is ``draw(parameter, batch entry)``, at any seed and step."""
    model = nn.Linear(1, 1, bias=False)
    export.train_step(
        model,
        lambda m, b: ((m.weight**2).sum(), {"drawn": draw(m.weight, b["x"])}),
        {"x": like},
        optimizer=export.Sgd(0.0),
        dynamic={"x": {axis: f"n{axis}" for axis in free}} if free else {},
        directory=folder,
        verify=False,
    )
    graph = onnx.load(folder / "train.onnx")
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])

    def run(x: Tensor, seed: int, step: int) -> np.ndarray:
        feeds = {
            "state.packed": np.ones(1, np.float32),
            "state.step": np.array(step),
            "seed": np.array(seed),
            "batch.x": x.numpy(),
            "hyper.lr": np.array(0, np.float32),
        }
        names = {port.name for port in session.get_inputs()}
        given = {name: value for name, value in feeds.items() if name in names}
        drawn: np.ndarray = session.run(["output.drawn"], given)[0]
        return drawn

    return run


@pytest.mark.parametrize(
    ("shape", "free", "repeats"),
    [
        ((3, 5), (0,), 1),
        ((2, 3, 4), (0, 2), 1),
        ((7,), (0,), 1),
        ((1, 1000), (), 11),
        ((17, 1, 1), (0,), 1),
    ],
)
def test_the_graph_draws_the_same_masks(
    shape: tuple[int, ...], free: tuple[int, ...], repeats: int, tmp_path: Path
) -> None:
    """Of every seed, step and call, at the sizes of the export and at others."""
    shares = (0.5, 0.9, 0.1, 1 / 3, 1 - 1e-9, 1 - 1e-12)
    calls = [share for share in shares for _ in range(repeats)]

    def masks(weight: Tensor, x: Tensor) -> Tensor:
        drawn = [torch.nn.functional.dropout(x, 1 - share, True) != 0 for share in calls]
        return torch.stack(drawn).to(torch.float32)

    run = _drawing(masks, torch.ones(shape), free, tmp_path / "artifact")
    for seed, step in ((0, 0), (-1, 1), (2**31 - 1, 2**31), (2**62 + 11, 2**40 + 5), (77, 3)):
        sizes = [5 * size + seed % 3 if axis in free else size for axis, size in enumerate(shape)]
        for given in (list(shape), sizes):
            draw = _randomness(seed, step)
            expected = [draw.keep_mask(given, 1 - (1 - share)).numpy() for share in calls]
            got = run(torch.ones(given), seed, step)
            np.testing.assert_array_equal(got, np.stack(expected).astype(np.float32))


def test_no_64_bit_arithmetic_touches_the_elements(tmp_path: Path) -> None:
    """onnxruntime divides and masks 64-bit numbers several times more slowly."""
    run = _drawing(
        lambda weight, x: nn.functional.dropout(x, 0.1, True),
        torch.ones(4, 6),
        (0,),
        tmp_path / "artifact",
    )
    assert run(torch.ones(9, 6), 1, 1).shape == (9, 6)
    kinds = {node.op_type for node in onnx.load(tmp_path / "artifact" / "train.onnx").graph.node}
    assert kinds.isdisjoint({"Div", "Mod", "BitwiseAnd"})
    trainer = Trainer(tmp_path / "artifact")
    trainer.step({"x": np.ones((3, 6), np.float32)})


SAMPLE = 400

DRAWN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float, float]] = {
    "rand": (lambda w, x: torch.rand(x.shape), 1 / 2, 1 / 12),
    "rand_like": (lambda w, x: torch.rand_like(x), 1 / 2, 1 / 12),
    "uniform_": (lambda w, x: torch.empty_like(x).uniform_(-1, 3), 1, 16 / 12),
    "randn": (lambda w, x: torch.randn(x.shape[0], x.shape[1]), 0, 1),
    "randn_like": (lambda w, x: torch.randn_like(x), 0, 1),
    "normal_": (lambda w, x: torch.empty_like(x).normal_(2, 3), 2, 9),
    "normal": (lambda w, x: torch.normal(x, 2.0), 1, 4),
    "log_normal_": (lambda w, x: torch.empty_like(x).log_normal_(0, 0.5), 1.1331, 0.3647),
    "bernoulli": (lambda w, x: torch.bernoulli(x * 0.3), 0.3, 0.21),
    "bernoulli_": (lambda w, x: torch.empty_like(x).bernoulli_(0.3), 0.3, 0.21),
    "exponential_": (lambda w, x: torch.empty_like(x).exponential_(2.0), 0.5, 0.25),
    "geometric_": (lambda w, x: torch.empty_like(x).geometric_(0.5), 2, 2),
    "randint": (lambda w, x: torch.randint(2, 6, x.shape).float(), 3.5, 1.25),
    "randint_like": (lambda w, x: torch.randint_like(x, 4), 1.5, 1.25),
    "randperm": (
        lambda w, x: torch.stack([torch.randperm(5), torch.randperm(5)]).float() + 0 * x[0, 0],
        2,
        2,
    ),
    "multinomial": (
        lambda w, x: torch.multinomial(x * torch.tensor([0.0, 1, 1, 2, 0]), 1, True).float(),
        2.25,
        0.6875,
    ),
    "multinomial of several": (
        lambda w, x: torch.multinomial(x * torch.tensor([0.0, 1, 1, 2, 0]), 2).float(),
        2.09,
        0.6,
    ),
    "torch.dropout": (lambda w, x: torch.dropout(x, 0.25, True), 1, 1 / 3),
}


@pytest.mark.parametrize("name", DRAWN)
def test_random_functions_draw_from_their_distribution(name: str, tmp_path: Path) -> None:
    """In the graph, at another batch size; reproducibly from seed and step."""
    draw, mean, variance = DRAWN[name]
    run = _drawing(draw, torch.ones(8, 5), (0,), tmp_path / "artifact")
    x = torch.ones(SAMPLE, 5)
    first = run(x, 3, 1)
    drawn = np.stack([run(x, 3, step) for step in range(1, 9)]).astype(np.float64)
    np.testing.assert_array_equal(first, drawn[0])
    assert not np.array_equal(first, run(x, 4, 1))
    room = 5 / np.sqrt(drawn.size)
    assert abs(drawn.mean() - mean) <= room * max(np.sqrt(variance), 0.3)
    assert drawn.var() == pytest.approx(variance, rel=8 * room, abs=0.02)


class _Noisy(nn.Module):
    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self._noise = noise

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self._noise(torch.tanh(self.first(x))))
        return out


def _reparametrised(x: Tensor) -> Tensor:
    return x + torch.randn_like(x) * torch.exp(0.5 * x)


def _stochastic_depth(x: Tensor) -> Tensor:
    """As timm writes it."""
    kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.8)
    kept.div_(0.8)
    return x + x.sin() * kept


_D = torch.distributions

NOISES: dict[str, Callable[[Tensor], Tensor]] = {
    "variational": _reparametrised,
    "without axes": lambda x: x * torch.rand(()) + torch.randn(()) + torch.bernoulli(x[0, 0] ** 2),
    "stochastic depth": _stochastic_depth,
    "gumbel": lambda x: nn.functional.gumbel_softmax(x, tau=0.7),
    "gumbel hard": lambda x: nn.functional.gumbel_softmax(x, hard=True),
    "rrelu": lambda x: nn.functional.rrelu(x, training=True),
    "rrelu in place": lambda x: nn.functional.rrelu(x * 1, training=True, inplace=True),
    "alpha dropout": lambda x: nn.functional.alpha_dropout(x, 0.2, True),
    "feature alpha dropout": lambda x: nn.functional.feature_alpha_dropout(
        x[:, :, None], 0.2, True
    ).squeeze(-1),
    "feature dropout": lambda x: torch.feature_dropout(x[:, :, None], 0.2, True).squeeze(-1),
    "torch.dropout": lambda x: torch.dropout(x, 0.2, True),
    "normal of a tensor": lambda x: x + torch.normal(x, x.abs() + 0.1),
    "bernoulli of a tensor": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "Normal": lambda x: _D.Normal(x, torch.exp(x)).rsample(),
    "Independent": lambda x: _D.Independent(_D.Normal(x, torch.exp(x)), 1).rsample(),
    "LogNormal": lambda x: _D.LogNormal(x, torch.exp(x)).rsample(),
    "Laplace": lambda x: _D.Laplace(x, torch.exp(x)).rsample(),
    "Gumbel": lambda x: _D.Gumbel(x, torch.exp(x)).rsample(),
    "Uniform": lambda x: _D.Uniform(x - 1, x + 1).rsample(),
    "Exponential": lambda x: _D.Exponential(torch.exp(x)).rsample(),
    "RelaxedBernoulli": lambda x: _D.RelaxedBernoulli(torch.tensor(0.5), logits=x).rsample(),
    "Bernoulli": lambda x: x * _D.Bernoulli(logits=x).sample(),
    "Categorical": lambda x: (
        x.gather(1, _D.Categorical(logits=x).sample().unsqueeze(1)) * torch.ones(8)
    ),
    "ELBO": lambda x: (
        x + _D.kl_divergence(_D.Normal(x, torch.exp(x)), _D.Normal(torch.zeros(8), torch.ones(8)))
    ),
}


@pytest.mark.parametrize("name", NOISES)
def test_random_layers_train_beside_torch(
    name: str, assert_parity: Callable[..., export.Exported]
) -> None:
    torch.manual_seed(0)
    assert_parity(_Noisy(NOISES[name]), {"x": torch.randn(6, 6)})


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        (lambda x: x + torch.randn(x.shape, generator=torch.Generator()), "no generator="),
        (lambda x: x * torch.poisson(x.abs()), "batch entry"),
        (lambda x: x + torch.randint(2**30, x.shape), "2^23"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    noise: Callable[[Tensor], Tensor], said: str, assert_parity: Callable[..., export.Exported]
) -> None:
    with pytest.raises(export.ExportError, match=said.replace("^", r"\^")) as refused:
        assert_parity(_Noisy(noise), {"x": torch.randn(6, 6)})
    assert "model itself" in str(refused.value)
