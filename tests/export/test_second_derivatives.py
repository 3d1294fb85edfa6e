"""What has a gradient of its own is differentiated twice as torch does it, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import export
from export.models import fields, mf
from export.rewrites.patch import trainable
from export.rewrites.randomness import Randomness
from export.short_gradients import ShortGradient
from tests.export.recorded import Make, assert_as_torch, recorded

Function = Callable[..., Tensor]
Batch = dict[str, Tensor]


def _drawn(*shapes: Sequence[Any], seed: int = 0) -> Make:
    """Numbers of these shapes, "n" the free size."""

    def make(n: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        sizes = [[n if size == "n" else size for size in shape] for shape in shapes]
        return [torch.randn(size, generator=generator) for size in sizes]

    return make


def _labelled(n: int) -> list[Tensor]:
    return [_drawn((n, 5))(n)[0], torch.arange(n) % 5]


def _recurrent(kind: type[nn.RNNBase], **how: Any) -> tuple[Function, Make]:
    layer = kind(3, 2, **how)
    names = [name for name, _ in layer.named_parameters()]
    shapes = [tuple(p.shape) for p in layer.parameters()]

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        named = dict(zip(names, weights, strict=True))
        result, last = torch.func.functional_call(layer, named, (x,))
        return torch.cat([result.flatten(), last[-1].flatten()])

    return run, _drawn((2, "n", 3), *shapes)


def _attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, bias)


def _positive(x: Tensor) -> Tensor:
    return x @ x.transpose(-1, -2) + torch.eye(3)


def _turned(x: Tensor, *weights: Tensor) -> Tensor:
    """Sequences of their own lengths, through a layer that also runs from their ends."""
    lengths = torch.full([x.shape[0]], 2)
    named = dict(zip(_NAMES, weights, strict=True))
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, False)
    result, _ = torch.func.functional_call(_BOTH_WAYS, named, (packed,))
    return nn.utils.rnn.pad_packed_sequence(result, True)[0]


_BOTH_WAYS = nn.RNN(2, 2, batch_first=True, bidirectional=True)
_NAMES = [name for name, _ in _BOTH_WAYS.named_parameters()]


CASES: dict[str, tuple[Function, Make]] = {
    "_BatchNormalise": (
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, True),
        _drawn(("n", 3, 2), (3,), (3,)),
    ),
    "_LayerNormalise": (
        lambda x, w, b: functional.layer_norm(x, [4], w, b),
        _drawn(("n", 4), (4,), (4,)),
    ),
    "_LayerNormalise, of groups": (
        lambda x, w: functional.group_norm(x, 2, w),
        _drawn(("n", 4, 3), (4,)),
    ),
    "_Gelu": (functional.gelu, _drawn(("n", 3))),
    "_GeluByTanh": (lambda x: functional.gelu(x, approximate="tanh"), _drawn(("n", 3))),
    "_OfLogits": (functional.cross_entropy, _labelled),
    "_Losses": (functional.binary_cross_entropy_with_logits, _drawn(("n", 3), ("n", 3))),
    "_Euclidean": (
        lambda x, y: torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist"),
        _drawn(("n", 3), (2, 3)),
    ),
    "_Running": (lambda x: torch.cumprod(x, 1), _drawn(("n", 4))),
    "_Inverse": (lambda x: torch.linalg.inv(_positive(x)), _drawn(("n", 3, 3))),
    "_Inverse, of a determinant": (lambda x: torch.logdet(_positive(x)), _drawn(("n", 3, 3))),
    "_Cholesky": (lambda x: torch.linalg.cholesky(_positive(x)), _drawn(("n", 3, 3))),
    "_Repeated": (
        lambda x: functional.interpolate(x.square(), scale_factor=2),
        _drawn(("n", 2, 3, 2)),
    ),
    "_Along": (
        lambda x: functional.interpolate(x.square(), size=(5, 4), mode="bilinear"),
        _drawn(("n", 2, 3, 2)),
    ),
    "_Attention": (_attention, _drawn(("n", 2, 3, 4), ("n", 2, 5, 4), ("n", 2, 5, 4), (3, 5))),
    "_Rnn": _recurrent(nn.RNN, nonlinearity="tanh"),
    "_Rnn, relu": _recurrent(nn.RNN, nonlinearity="relu", bidirectional=True),
    "_Gru": _recurrent(nn.GRU, bidirectional=True),
    "_Lstm": _recurrent(nn.LSTM),
    "_Turned": (_turned, _drawn(("n", 3, 2), *(p.shape for p in _BOTH_WAYS.parameters()))),
    "_Rounded": (
        lambda x: torch.fake_quantize_per_tensor_affine(x.square(), 0.1, 0, 0, 15),
        _drawn(("n", 3)),
    ),
    "_NumberedRows": (
        lambda table, x: (table[: x.shape[0]].square() * x).sum(1),
        _drawn((9, 3), ("n", 3)),
    ),
}


def penalty(function: Function) -> Function:
    """The gradient of a function's weighted sum, to be differentiated again."""

    def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
        result = function(*tensors)
        weights = torch.cos(torch.arange(result.numel())).reshape(result.shape)
        wanted = [each for each in tensors if each.requires_grad]
        loss = (result * weights).sum()
        return torch.autograd.grad(loss, wanted, create_graph=True)

    return gradients


def inner_loop(function: Function) -> Function:
    """The loss after two steps down its own gradient, from where it is differentiated."""

    def after(first: Tensor, *tensors: Tensor) -> Tensor:
        moved = first
        for _ in range(2):
            loss = function(moved, *tensors).square().mean()
            (gradient,) = torch.autograd.grad(loss, [moved], create_graph=True)
            moved = moved - 0.1 * gradient
        return function(moved, *tensors).square().mean()

    return after


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_differentiated_as_in_torch(name: str) -> None:
    function, make = CASES[name]
    assert_as_torch(penalty(function), make, sizes=[5], atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["_BatchNormalise", "_Rnn"])
def test_an_inner_loop_is_differentiated_as_in_torch(name: str) -> None:
    function, make = CASES[name]
    assert_as_torch(inner_loop(function), make, sizes=[5], atol=1e-4)


def _bpr(u: Tensor, items: Tensor) -> Tensor:
    settings = [torch.tensor(number, dtype=u.dtype) for number in (1.0, 1.0, 0.1, 0.2)]
    weight, offset = u.new_tensor([0.5, 1, 2]), u.new_tensor([0.1, -0.2, 0])
    own: Any = mf._Bpr
    loss: Tensor = own.apply(u, items, weight, offset, *settings)
    return loss


def _channel_mean(scores: Tensor, widen: Tensor) -> Tensor:
    own: Any = fields._ChannelMean
    mean: Tensor = own.apply(scores, widen)
    return mean


# Functions that torch has not, and their arguments' shapes.
OURS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "_Bpr": (_bpr, ((3, 2), (6, 2))),
    "_ChannelMean": (_channel_mean, ((3, 4), (2,))),
}


@pytest.mark.parametrize("name", OURS)
def test_a_gradient_is_differentiated_as_finite_differences_say(name: str) -> None:
    function, shapes = OURS[name]
    tensors = [each.double().requires_grad_() for each in _drawn(*shapes)(0)]
    assert torch.autograd.gradgradcheck(function, tensors)


def test_every_function_with_a_gradient_of_its_own_is_among_them() -> None:
    every = {kind.__name__ for kind in ShortGradient.__subclasses__()}
    assert every == {name.partition(",")[0] for name in (*CASES, *OURS)} | {"_Ctc"}


class Small(nn.Module):
    """What has gradients of its own, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(functional.gelu(self.norm(self.first(x))))
        return result


def _inner(model: nn.Module, batch: Batch, parameters: dict[str, Tensor]) -> Tensor:
    logits = torch.func.functional_call(model, parameters, (batch["x"],))
    return functional.cross_entropy(logits, batch["label"])


def _by_autograd(model: nn.Module, batch: Batch) -> Tensor:
    own = dict(model.named_parameters())
    found = torch.autograd.grad(_inner(model, batch, own), list(own.values()), create_graph=True)
    moved = {n: p - 0.5 * g for (n, p), g in zip(own.items(), found, strict=True)}
    return _inner(model, batch, moved)


def _by_torch_func(model: nn.Module, batch: Batch) -> Tensor:
    own = dict(model.named_parameters())
    gradient = torch.func.grad(partial(_inner, model, batch))(own)
    return _inner(model, batch, {name: p - 0.5 * gradient[name] for name, p in own.items()})


@pytest.mark.parametrize("loss", [_by_autograd, _by_torch_func])
def test_an_inner_loop_of_meta_learning(loss: Any, tmp_path: Path) -> None:
    batch = {"x": torch.randn(6, 4), "label": torch.arange(6) % 3}
    done = export.train_step(
        Small(), loss, batch, optimizer=export.Sgd(0.1),
        dynamic={}, directory=tmp_path / "made",
    )  # fmt: skip
    assert done.report is not None


def _refused(function: Function, make: Make) -> str:
    with pytest.raises(export.ExportError) as refusal:
        recorded(function, make)
    return str(refusal.value)


def _ctc(logits: Tensor) -> Tensor:
    labels = torch.tensor([[1, 2]])
    return functional.ctc_loss(torch.log_softmax(logits, 2), labels, (4,), (2,))


def test_what_has_none_twice_is_refused_by_name() -> None:
    said = _refused(penalty(_ctc), _drawn((4, 1, 3)))
    assert "a second derivative of ctc: torch has none either" in said
    layer, _ = _recurrent(nn.GRU)
    shapes = [tuple(p.shape) for p in nn.GRU(3, 2).parameters()]
    said = _refused(penalty(layer), _drawn(("n", 2, 3), *shapes))
    assert "a second derivative of gru" in said
    assert "its number of steps is free" in said


def test_it_may_stand_beside_what_is_differentiated_twice() -> None:
    """``create_graph`` alone asks for no second derivative of all."""

    def loss(logits: Tensor, x: Tensor) -> Tensor:
        both = _ctc(logits) + functional.gelu(x).square().sum()
        of_logits, of_x = torch.autograd.grad(both, [logits, x], create_graph=True)
        return both + of_logits.detach().sum() + of_x.square().sum()

    assert_as_torch(loss, _drawn((4, 1, 3), ("n", 2)), sizes=[5])


def test_an_input_that_was_written_into_is_no_silent_matter() -> None:
    def loss(x: Tensor) -> Tensor:
        y = x * 1
        z = functional.gelu(y)
        y.add_(1)
        return (z * y).sum()

    with trainable(Randomness(*[torch.zeros((), dtype=torch.int64)] * 2)):
        x = torch.randn(3, requires_grad=True)
        torch.autograd.grad(loss(x), x)
        with pytest.raises(export.ExportError, match="of gelu, whose input was written into"):
            torch.autograd.grad(loss(x), x, create_graph=True)
