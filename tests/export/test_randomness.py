"""Random numbers inside a step: one stream for torch's reference and for the graph."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from scipy import stats
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
    draw: Callable[[Tensor, Tensor], dict[str, Tensor]],
    like: Tensor,
    free: Sequence[int],
    folder: Path,
) -> Callable[[Tensor, int, int], dict[str, np.ndarray]]:
    """Runs a graph whose outputs are ``draw(parameter, batch entry)``, at any seed and step."""
    model = nn.Linear(1, 1, bias=False)
    export.train_step(
        model,
        lambda m, b: ((m.weight**2).sum(), draw(m.weight, b["x"])),
        {"x": like},
        optimizer=export.Sgd(0.0),
        dynamic={"x": {axis: f"n{axis}" for axis in free}} if free else {},
        directory=folder,
        verify=False,
    )
    graph = onnx.load(folder / "train.onnx")
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])

    def run(x: Tensor, seed: int, step: int) -> dict[str, np.ndarray]:
        feeds = {
            "state.packed": np.ones(1, np.float32),
            "state.step": np.array(step),
            "seed": np.array(seed),
            "batch.x": x.numpy(),
            "hyper.lr": np.array(0, np.float32),
        }
        names = {port.name for port in session.get_inputs()}
        given = {name: value for name, value in feeds.items() if name in names}
        drawn = [port.name for port in session.get_outputs() if port.name.startswith("output.")]
        arrays = session.run(drawn, given)
        return {n.removeprefix("output."): a for n, a in zip(drawn, arrays, strict=True)}

    return run


@pytest.mark.sampled(3)
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

    def masks(weight: Tensor, x: Tensor) -> dict[str, Tensor]:
        drawn = [torch.nn.functional.dropout(x, 1 - share, True) != 0 for share in calls]
        return {"masks": torch.stack(drawn).to(torch.float32)}

    run = _drawing(masks, torch.ones(shape), free, tmp_path / "artifact")
    for seed, step in ((0, 0), (-1, 1), (2**31 - 1, 2**31), (2**62 + 11, 2**40 + 5), (77, 3)):
        sizes = [5 * size + seed % 3 if axis in free else size for axis, size in enumerate(shape)]
        for given in (list(shape), sizes):
            draw = _randomness(seed, step)
            expected = [draw.keep_mask(given, 1 - (1 - share)).numpy() for share in calls]
            got = run(torch.ones(given), seed, step)["masks"]
            np.testing.assert_array_equal(got, np.stack(expected).astype(np.float32))


def test_no_64_bit_arithmetic_touches_the_elements(tmp_path: Path) -> None:
    """onnxruntime divides and masks 64-bit numbers several times more slowly."""
    run = _drawing(
        lambda weight, x: {"drawn": nn.functional.dropout(x, 0.1, True)},
        torch.ones(4, 6),
        (0,),
        tmp_path / "artifact",
    )
    assert run(torch.ones(9, 6), 1, 1)["drawn"].shape == (9, 6)
    kinds = {node.op_type for node in onnx.load(tmp_path / "artifact" / "train.onnx").graph.node}
    assert kinds.isdisjoint({"Div", "Mod", "BitwiseAnd"})
    trainer = Trainer(tmp_path / "artifact")
    trainer.step({"x": np.ones((3, 6), np.float32)})


ROWS, SEEDS = 400, range(20)
LEAST = 1e-4
"""Of each p-value. With right draws the least of the 300 or so below is about 3e-3."""


@dataclass(frozen=True)
class Drawn:
    """A call of torch's, and what it should draw: a distribution, or each value's share."""

    call: Callable[[Tensor, Tensor], Tensor]
    shares: Mapping[Any, float] = field(default_factory=dict)
    continuous: Any = None

    def p_value(self, drawn: np.ndarray) -> float:
        """That right draws were as far off: Kolmogorov and Smirnov's test, or Pearson's."""
        if self.continuous is not None:
            return float(stats.kstest(drawn.ravel(), self.continuous.cdf).pvalue)
        rows = drawn if isinstance(next(iter(self.shares)), tuple) else drawn.reshape(-1, 1)
        counts = Counter(map(tuple, rows.tolist()))
        values = [value if isinstance(value, tuple) else (value,) for value in self.shares]
        assert set(counts) <= set(values), set(counts) - set(values)
        found = np.array([counts[value] for value in values])
        return float(stats.chisquare(found, found.sum() * np.array([*self.shares.values()])).pvalue)


def _weights(x: Tensor) -> Tensor:
    return x * torch.tensor([0.0, 1, 1, 2, 0])


def _permuted(n: int, places: int) -> dict[tuple[float, ...], float]:
    every = list(itertools.permutations(map(float, range(n)), places))
    return dict.fromkeys(every, 1 / len(every))


DRAWN = {
    "rand": Drawn(lambda w, x: torch.rand(x.shape), continuous=stats.uniform()),
    "rand_like": Drawn(lambda w, x: torch.rand_like(x), continuous=stats.uniform()),
    "uniform_": Drawn(
        lambda w, x: torch.empty_like(x).uniform_(-1, 3), continuous=stats.uniform(-1, 4)
    ),
    "randn": Drawn(
        lambda w, x: torch.randn(x.shape[0], x.shape[1]), continuous=stats.norm()
    ),
    "randn_like": Drawn(lambda w, x: torch.randn_like(x), continuous=stats.norm()),
    "normal_": Drawn(
        lambda w, x: torch.empty_like(x).normal_(2, 3), continuous=stats.norm(2, 3)
    ),
    "normal": Drawn(lambda w, x: torch.normal(x, 2.0), continuous=stats.norm(1, 2)),
    "log_normal_": Drawn(
        lambda w, x: torch.empty_like(x).log_normal_(0, 0.5), continuous=stats.lognorm(0.5)
    ),
    "exponential_": Drawn(
        lambda w, x: torch.empty_like(x).exponential_(2.0), continuous=stats.expon(scale=0.5)
    ),
    "bernoulli": Drawn(lambda w, x: torch.bernoulli(x * 0.3), {0.0: 0.7, 1.0: 0.3}),
    "bernoulli_": Drawn(
        lambda w, x: torch.empty_like(x).bernoulli_(0.3), {0.0: 0.7, 1.0: 0.3}
    ),
    "dropout": Drawn(lambda w, x: torch.dropout(x, 0.25, True) * 0.75, {0.0: 0.25, 1.0: 0.75}),
    "geometric_": Drawn(
        lambda w, x: torch.empty_like(x).geometric_(0.5).clamp(max=8),
        {float(n): 0.5 ** min(n, 7) for n in range(1, 9)},
    ),
    "randint": Drawn(
        lambda w, x: torch.randint(2, 6, x.shape).float(),
        dict.fromkeys((2.0, 3.0, 4.0, 5.0), 1 / 4),
    ),
    "randint_like": Drawn(
        lambda w, x: torch.randint_like(x, 4), dict.fromkeys((0.0, 1.0, 2.0, 3.0), 1 / 4)
    ),
    # Of a few at once, since a permutation is not as long as the batch.
    "randperm": Drawn(
        lambda w, x: torch.stack([torch.randperm(4) for _ in range(8)]).float() + 0 * x[0, 0],
        _permuted(4, 4),
    ),
    "multinomial": Drawn(
        lambda w, x: torch.multinomial(_weights(x), 1, True).float(),
        {1.0: 1 / 4, 2.0: 1 / 4, 3.0: 1 / 2},
    ),
    "multinomial_of_two": Drawn(
        lambda w, x: torch.multinomial(_weights(x), 2).float(),
        {
            (1.0, 2.0): 1 / 12, (1.0, 3.0): 1 / 6, (2.0, 1.0): 1 / 12,
            (2.0, 3.0): 1 / 6, (3.0, 1.0): 1 / 4, (3.0, 2.0): 1 / 4,
        },
    ),
}  # fmt: skip


def test_random_functions_draw_from_their_distributions(tmp_path: Path) -> None:
    """In a graph, at another batch size than the export's, for each seed and for all together."""
    run = _drawing(
        lambda w, x: {name: each.call(w, x) for name, each in DRAWN.items()},
        torch.ones(8, 5),
        (0,),
        tmp_path / "artifact",
    )
    x = torch.ones(ROWS, 5)
    by_seed = [run(x, seed, 1) for seed in SEEDS]
    again, later = run(x, SEEDS[0], 1), run(x, SEEDS[0], 2)
    for name, each in DRAWN.items():
        np.testing.assert_array_equal(again[name], by_seed[0][name])
        assert not np.array_equal(later[name], by_seed[0][name]), name
        assert not np.array_equal(by_seed[1][name], by_seed[0][name]), name
        drawn = [found[name] for found in by_seed]
        # Of 8 permutations a seed no share can be told.
        apart = [] if name == "randperm" else [each.p_value(one) for one in drawn]
        together = each.p_value(np.concatenate(drawn))
        assert min([*apart, together]) > LEAST, (name, apart, together)
        # Draws that are too even are as wrong: right ones have p-values of every size.
        assert not apart or stats.kstest(apart, "uniform").pvalue > LEAST, (name, apart)


def test_draws_depend_on_no_other(tmp_path: Path) -> None:
    """Of calls one after the other, of neighbouring elements, steps and seeds."""
    run = _drawing(
        lambda w, x: {"first": torch.randn_like(x), "second": torch.randn_like(x)},
        torch.ones(8, 5),
        (0,),
        tmp_path / "artifact",
    )
    x = torch.ones(ROWS, 5)
    p_values = []
    for seed in SEEDS:
        here = run(x, seed, 1)
        first = here["first"].ravel()
        others = (here["second"], run(x, seed, 2)["first"], run(x, seed + 1, 1)["first"])
        pairs = [(first, other.ravel()) for other in others] + [(first[:-1], first[1:])]
        # Their squares, too: the size of one must not tell the size of the other.
        p_values += [stats.pearsonr(a**n, b**n).pvalue for a, b in pairs for n in (1, 2)]
    assert min(p_values) > LEAST, p_values
    assert stats.kstest(p_values, "uniform").pvalue > LEAST, p_values


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


def test_random_layers_train_beside_torch(
    assert_parity_of_each: Callable[..., export.Exported],
) -> None:
    torch.manual_seed(0)
    models = {name.replace(".", "_"): _Noisy(noise) for name, noise in NOISES.items()}
    assert_parity_of_each(models, {"x": torch.randn(6, 6)})


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
