"""Branches on data that choose between two values: recorded both ways, taken as the data say."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import export
from device_sdk import Trainer
from device_sdk.errors import DeviceError
from export.lowering.graph import every_node
from tests.export.recorded import assert_as_torch, recorded, with_gradients

PLACES = 6


def _batch(n: int) -> tuple[Tensor]:
    return (torch.randn(n + 4, 4, generator=torch.Generator().manual_seed(n)),)


def _written(x: Tensor) -> Tensor:
    """Either way's slices fit in that way only; what only logs changes nothing."""
    at = int((x[:, 0] > 0).sum())
    written = x * 2
    if at + 2 >= x.shape[0]:
        written[at:] = x[: x.shape[0] - at] * 3
    else:
        written[at : at + 2] = x[:2].exp()
    if torch.isnan(written).any():
        print("not a number")
    return written * x


def _in_turn(x: Tensor) -> Tensor:
    """One question after another, of which the second is asked in one way only."""
    spread = x.softmax(0)
    for _ in range(2):
        spread = spread / spread.sum(1, keepdim=True)
        if (spread.sum(0) - spread.mean()).abs().max() < 2.0:
            break
    if x.mean().item() > 0.1 and bool(x[0, 0] < x[0, 1]):
        return spread * x
    return spread - x


def _asked_again(x: Tensor) -> Tensor:
    """The same is asked three times: there are two ways, and one of them divides by 0."""
    chosen = x[:, 0] > 1
    count = chosen.sum()
    y = x.exp() if count == 0 else x / count + x[chosen].mean()
    if count != 0:
        y = y * 2
    return y * 3 if chosen.sum() == 0 else y


def _largest(x: Tensor) -> Tensor:
    """Python's own choose by the truth of a comparison."""
    return max(x.mean().exp(), x.std(0).max()) * min(x.sum(), x[0, 0]) * x


def _equals(x: Tensor) -> Tensor:
    up = x.relu()
    y = x.exp() if torch.equal(up[:2], x[:2]) else x * 2
    return y if not torch.allclose(up.mean(), x.mean(), rtol=0.5) else y.tanh()


@pytest.mark.parametrize(
    ("function", "branches"),
    [(_written, 1), (_in_turn, 5), (_asked_again, 1), (_largest, 3), (_equals, 3)],
)
def test_each_way_is_as_in_torch(function: Callable[[Tensor], Tensor], branches: int) -> None:
    model = assert_as_torch(function, _batch, sizes=range(1, 7))
    every = list(every_node(model.graph))
    assert sum(node.op_type == "If" for node in every) <= branches
    assert sum(node.op_type == "Softmax" for node in every) <= 1, "what is shared is there once"


def test_what_only_logs_leaves_no_branch() -> None:
    def logged(x: Tensor) -> Tensor:
        if x.max() > 3:
            print("large")
        return x.exp()

    model = assert_as_torch(logged, _batch, sizes=(2,))
    assert not any(node.op_type in ("If", "Greater") for node in model.graph.node)


class Agent(nn.Module):
    """A network, one that is set to it at every second step, and a queue that begins anew."""

    count: Tensor
    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.zeros(PLACES, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def loss(self, x: Tensor) -> Tensor:
        found = self.net(x)
        wanted = self.target(x + self.queue.mean(0))
        loss = F.smooth_l1_loss(found, wanted + 1)
        with torch.no_grad():
            self.count += 1
            if self.count.item() % 2 == 0:
                self.target.load_state_dict(self.net.state_dict())
            at, n = int(self.place), x.shape[0]
            if at + n >= PLACES:
                self.queue[at:] = x[: PLACES - at]
                self.place[0] = 0
            else:
                self.queue[at : at + n] = x
                self.place[0] = at + n
        return loss


def _export(
    model: nn.Module,
    loss: Callable[[Any, Tensor], Tensor],
    x: Tensor,
    directory: Path,
    optimizer: Any = None,
    **more: Any,
) -> export.Exported:
    return export.train_step(
        copy.deepcopy(model), lambda m, b: loss(m, b["x"]), {"x": x},
        optimizer=optimizer or export.Sgd(0.1), dynamic={},
        predict=lambda m, b: {"y": next(m.parameters()).sum()}, directory=directory, **more,
    )  # fmt: skip


def _assert_trained(
    model: Any, loss: Callable[[Any, Tensor], Tensor], optimizer: Any, trainer: Trainer, x: Tensor
) -> None:
    optimizer.zero_grad()
    expected = loss(model, x)
    expected.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert trainer.step({"x": x.numpy()}) == pytest.approx(expected.item(), rel=1e-5)
    held = {**trainer.parameters, **trainer.buffers}
    for name, tensor in model.state_dict().items():
        np.testing.assert_allclose(held[name], tensor.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


def test_five_steps_that_take_each_way(tmp_path: Path) -> None:
    """Optimizer state, and buffers that the example batch's way leaves alone, are as torch's."""
    model = Agent()
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randn(2, 4, generator=draw) for _ in range(5)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # verification finds batches for each way
        _export(model, Agent.loss, batches[0], tmp_path / "agent", export.Adam(lr=0.05))
    trainer = Trainer(tmp_path / "agent", seed=0)
    optimizer = torch.optim.Adam(model.net.parameters(), lr=0.05)
    for x in batches:
        _assert_trained(model, Agent.loss, optimizer, trainer, x)


class Heads(nn.Module):
    """Trains one head or the other, by the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

    def loss(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return F.dropout(self.first(x), 0.0).exp().mean()
        return self.second(x).exp().mean()


def test_parameters_that_one_way_has_a_gradient_for(tmp_path: Path) -> None:
    """Which of them the example batch trains makes no difference."""
    model, x = Heads(), torch.ones(3, 4)
    _export(model, Heads.loss, x, tmp_path / "heads")
    trainer = Trainer(tmp_path / "heads", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for sign in (1, -1, -1):
        _assert_trained(model, Heads.loss, optimizer, trainer, x * sign)


def test_weights_that_one_way_writes_into(tmp_path: Path) -> None:
    """The optimizer starts from them, with its state; the example batch leaves them alone."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 2)), torch.ones(3, 4)

    def loss(model: Any, x: Tensor) -> Tensor:
        if x.sum() < 0:
            model[0].weight.data.clamp_(-0.3, 0.3)
        return (model(x) if x[0, 0] < 1.5 else model(x) * 2).exp().mean()

    _export(model, loss, x, tmp_path / "clipped", export.Sgd(0.1, momentum=0.9))
    trainer = Trainer(tmp_path / "clipped", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for sign in (1, -1, 2, -1, 1):
        _assert_trained(model, loss, optimizer, trainer, x * sign)


def test_a_prediction_that_branches(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export.train_step(
            model, lambda m, b: m(b["x"]).exp().mean(), {"x": torch.randn(3, 4)},
            optimizer=export.Sgd(0.1), dynamic={"x": {0: "batch"}},
            predict=lambda m, b: {"y": m(b["x"]) if b["x"].sum() > 0 else b["x"]},
            directory=tmp_path / "guess",
        )  # fmt: skip
    trainer = Trainer(tmp_path / "guess", seed=0)
    for sign in (1, -1):
        x = torch.ones(2, 4) * sign
        expected = model(x).detach() if sign > 0 else x
        got = trainer.predict({"x": x.numpy()})["y"]
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5)


def _passing(model: Heads, x: Tensor) -> Tensor:
    """The first head in one way, the second in both or in the other only."""
    if x.sum() > 0:
        return model.first(x).exp().mean()
    if x[0, 0] > -2:
        return model.second(x).exp().mean() + model.first(x).mean()
    return model.second(x).exp().mean()


_BIASES = (["first.weight", "second.weight"], ["first.bias", "second.bias"])


def _by_names(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [{"params": [named[n] for n in names]} for names in _BIASES]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (export.NAdam(lr=0.05), lambda m: torch.optim.NAdam(m.parameters(), 0.05)),
        (
            export.Adagrad(lr=0.1, lr_decay=0.3),
            lambda m: torch.optim.Adagrad(m.parameters(), 0.1, lr_decay=0.3),
        ),
        (
            export.Groups(export.AdamW(lr=0.05), export.Group("*.bias", {"weight_decay": 0.5})),
            lambda m: torch.optim.AdamW(
                [_by_names(m)[0], {**_by_names(m)[1], "weight_decay": 0.5}], 0.05
            ),
        ),
    ],
)
def test_parameters_without_a_gradient_are_passed_over(
    ours: Any, theirs: Any, tmp_path: Path
) -> None:
    """With their state and their count of steps, whichever are passed over together."""
    model, x = Heads(), torch.tensor([[1.0], [-1.0], [-3.0]]).expand(3, 4)
    around = export.Averaged(ours, decay=0.5)
    _export(model, _passing, x[:1], tmp_path / "heads", around, verify=False)
    trainer = Trainer(tmp_path / "heads", seed=0)
    optimizer = theirs(model)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    average.update_parameters(model)
    for row in (0, 0, 2, 2, 1, 0, 2):
        _assert_trained(model, _passing, optimizer, trainer, x[row : row + 1])
        average.update_parameters(model)
    for name, value in average.module.named_parameters():
        np.testing.assert_allclose(trainer.averages[name], value.detach(), rtol=1e-4, atol=1e-6)


def test_verification_passes_over_as_the_step_does(tmp_path: Path) -> None:
    model, x = Heads(), torch.tensor([[1.0], [-1.0], [-3.0]]).expand(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export.train_step(
            model, lambda m, b: _passing(m, b["x"]), {"x": x},
            optimizer=export.Adam(lr=0.05), dynamic={"x": {0: "batch"}},
            predict=lambda m, b: {"y": m.first(b["x"])}, directory=tmp_path / "heads",
        )  # fmt: skip


def test_gradients_without_memory_accumulate_over_what_is_passed_over(tmp_path: Path) -> None:
    model, x = Heads(), torch.ones(3, 4)
    _export(model, Heads.loss, x, tmp_path / "h", export.Accumulated(export.Sgd(0.1), every=2))
    trainer, optimizer = Trainer(tmp_path / "h", seed=0), torch.optim.SGD(model.parameters(), 0.1)
    for number, sign in enumerate((1, 1, 1, -1, -1, -1)):
        (Heads.loss(model, x * sign) / 2).backward()  # type: ignore[no-untyped-call]
        trainer.step({"x": (x * sign).numpy()})
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.named_parameters():
        np.testing.assert_allclose(trainer.parameters[name], value.detach(), rtol=1e-5)


@pytest.mark.parametrize("every", [2, 3])
def test_a_way_that_an_optimizer_cannot_pass_over_is_refused(every: int, tmp_path: Path) -> None:
    """Whether one had no gradient in all of some steps is not known; what is refused is said."""
    model, x = Heads(), torch.ones(3, 4)

    def loss(model: Heads, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return model.loss(x) + model.second(x).mean()
        return model.second(x).exp().mean()

    optimizer = export.Accumulated(export.Adam(lr=0.1), every=every)
    with pytest.warns(UserWarning, match=r"x.sum.. > 0:` is False, 2 parameters \(first.bias"):
        _export(model, loss, x, tmp_path / "heads", optimizer, verify=False)
    trainer = Trainer(tmp_path / "heads", seed=0)
    trainer.step({"x": x.numpy()})
    before = trainer.state
    with pytest.raises(DeviceError):
        trainer.step({"x": -x.numpy()})
    for name, value in trainer.state.items():
        np.testing.assert_array_equal(value, before[name])


def _forced(model: nn.Module, x: Tensor) -> Tensor:
    """One way draws more than the other before both draw."""
    y = model(x)
    if torch.rand(()) < 0.5:
        y = F.dropout(y, 0.5) + torch.rand(2)
    return (y * torch.randn(2)).exp().mean()


def test_numbers_drawn_in_one_way_only(tmp_path: Path) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    exported = _export(nn.Linear(4, 2), _forced, x, tmp_path / "forced")
    assert exported.report is not None and exported.report.worst.excess <= 1


def test_a_way_that_no_batch_takes_is_named(tmp_path: Path) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return y.exp().mean() if (x * x).sum() < 1e9 else y.mean()

    with pytest.warns(UserWarning, match=r"no step in which `test_.*1e9 else y.mean\(\)` is False"):
        _export(nn.Linear(4, 2), loss, torch.randn(3, 4), tmp_path / "rare")


def test_a_sum_in_a_branch_that_races_runs_in_one_thread(tmp_path: Path) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        rows = torch.tensor([0, 2, 0])
        y = model(x)
        return y[rows].exp().mean() if x.sum() > 0 else y.mean()

    exported = _export(nn.Linear(4, 2), loss, torch.randn(3, 4), tmp_path / "rows", verify=False)
    assert exported.manifest.sequential
    Trainer(tmp_path / "rows", seed=0).step({"x": np.ones((3, 4), np.float32)})


def test_more_ways_than_can_be_recorded_are_refused(tmp_path: Path) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        for i in range(5):
            y = y.exp() if y[0, 0] > i else y.tanh()
        return y.mean()

    with pytest.raises(export.ExportError, match=r"more than 16 ways.*at test_branches.py:\d+: "):
        _export(nn.Linear(4, 2), loss, torch.randn(3, 4), tmp_path / "loop", verify=False)


class Experts(nn.Module):
    """One that no row of the batch chooses is passed by."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def loss(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(1).max(1)
        found = torch.zeros(x.shape[0], 2)
        for number, expert in enumerate(self.experts):
            rows = torch.where(choice == number)[0]
            if rows.numel() == 0:
                continue
            found.index_add_(0, rows, expert(x[rows]) * weight[rows, None])
        return found.exp().mean()


def test_selections_that_may_be_empty(tmp_path: Path) -> None:
    """All are not at once: the way of that has no gradient, and is refused."""
    model, x = Experts(), torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    chosen = model.gate(x).argmax(1)
    assert 0 < chosen.sum() < len(x)
    with pytest.warns(UserWarning, match="the loss depends on no parameter"):
        _export(model, Experts.loss, x, tmp_path / "experts", verify=False)
    trainer = Trainer(tmp_path / "experts", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in (0, 1):
        rows = x[chosen == number][:1].repeat(len(x), 1)
        for each in (rows, x):
            _assert_trained(model, Experts.loss, optimizer, trainer, each)


def test_a_loss_of_no_gradient_in_any_way_is_refused(tmp_path: Path) -> None:
    def loss(model: nn.Module, x: Tensor) -> Any:
        return model(x).detach().mean() if x.sum() > 0 else 0.0

    with pytest.raises(export.ExportError, match="does not depend on any parameter"):
        _export(nn.Linear(4, 2), loss, torch.ones(3, 4), tmp_path / "none", verify=False)


# Ways that raise, numbers as conditions, constants, and loops whose rounds data count.


def _pieces(model: nn.Module, x: Tensor) -> list[Tensor]:
    rows = model(x)
    chosen = [x[:, 0] > 0, x[:, 1] > 0]
    return [rows[each].exp().mean() for each in chosen if each.any()]


def _of_a_mean(model: nn.Module, x: Tensor) -> Tensor:
    found = _pieces(model, x)
    return sum(found) / len(found)  # type: ignore[return-value]


def _of_none(model: nn.Module, x: Tensor) -> Tensor:
    """The first recording, in which all answers are yes, is the one that raises."""
    loss = None
    if not (x[:, 0] > 0).sum():
        x = x * 2
    else:
        loss = model(x).exp().mean()
    return loss + model(x).mean()


@pytest.mark.parametrize(
    "loss",
    [_of_a_mean, lambda model, x: torch.stack(_pieces(model, x)).mean(), _of_none],
    ids=["sum over length", "stack", "none"],
)
def test_a_way_in_which_the_code_raises_is_refused_by_the_device(loss: Any, tmp_path: Path) -> None:
    model, x = nn.Linear(4, 2), torch.tensor([[1.0, -1], [-1, -1]]).repeat(1, 2)
    with pytest.warns(UserWarning, match=r"the code raises .*: a device refuses such a step"):
        _export(model, loss, x, tmp_path / "made", verify=False)
    trainer = Trainer(tmp_path / "made", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        _assert_trained(model, loss, optimizer, trainer, x)
        before = trainer.state
        with pytest.raises(DeviceError):
            trainer.step({"x": -torch.ones(2, 4).numpy()})
        for name, value in trainer.state.items():
            np.testing.assert_array_equal(value, before[name])


def _caught(model: nn.Module, x: Tensor) -> Tensor:
    try:
        return _of_few(model, x)
    except ValueError:
        return model(x).square().mean()


def _of_few(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.set_detect_anomaly(False):
        if (x[:, 0] > 0).sum() > 1:
            raise ValueError("too many")
    result: Tensor = model(x).exp().mean()
    return result


def test_what_the_author_catches_is_a_way_like_others(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 2), torch.tensor([[1.0, -1], [-1, -1]]).repeat(1, 2)
    _export(model, _caught, x, tmp_path / "made")
    trainer = Trainer(tmp_path / "made", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in (x, x.abs(), x):
        _assert_trained(model, _caught, optimizer, trainer, batch)


def test_code_that_raises_in_every_way_is_refused(tmp_path: Path) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return (y.exp() if x.sum() > 0 else y).mean() * (1 / len([]))

    with pytest.raises(export.ExportError, match="ZeroDivisionError"):
        _export(nn.Linear(4, 2), loss, torch.ones(2, 4), tmp_path / "none", verify=False)


def _of_truths(x: Tensor) -> Tensor:
    count, share = (x > 0.5).sum(), (x > 0.8).float().mean().item()
    y = x.exp() if count else x
    if not torch.count_nonzero(x < 0):
        y = y * 2
    return y.tanh() if share else y


def test_a_number_is_true_where_it_is_not_zero() -> None:
    scale = {1: 1.0, 2: 0.1, 3: -1.0}
    assert_as_torch(
        _of_truths, lambda n: [torch.linspace(0.2, 1, 5) * scale.get(n, 1.0)], sizes=(1, 2, 3)
    )


class Chosen(nn.Module):
    """Goes by constants: tensors of its own, a buffer that no step changes, and numbers."""

    flags: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)
        self.weights = torch.tensor([1.0, 0, 2, 0, 0, 3])
        self.register_buffer("flags", torch.tensor([1, 0, 1, 1, 0, 1]))

    def loss(self, x: Tensor) -> Tensor:
        y = self.net(x)
        total = y.mean()
        for number, weight in enumerate(self.weights):
            if weight and self.flags[number]:
                total = total + (number + weight) * y.exp().mean()
        for _ in range(int(self.flags.sum())):
            total = total * 0.9
        written = torch.zeros(3)
        written[1] = 1
        if written[1] > 0:
            total = total + y[:, self.flags.tolist().index(0)].square().mean()
        return total


def test_branches_on_constants_are_no_branches_on_data(tmp_path: Path) -> None:
    model, x = Chosen(), torch.randn(3, 4)
    made = _export(model, Chosen.loss, x, tmp_path / "chosen")
    graph = onnx.load(made.directory / "train.onnx").graph
    assert not any(node.op_type == "If" for node in graph.node)
    trainer = Trainer(tmp_path / "chosen", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        _assert_trained(model, Chosen.loss, optimizer, trainer, x)


def _of_counts(x: Tensor) -> Tensor:
    total = x.mean()
    for number in range(int((x > 1).sum())):
        total = total + x[number].exp()
    for row in x[x < -1]:
        total = total * row
    return total


def test_loops_whose_rounds_data_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.trace.MOST_ROUNDS", (15, 2))
    with pytest.warns(UserWarning, match="up to 2, and a device refuses one of more"):
        model, trace = recorded(_of_counts, lambda n: [torch.zeros(4)])
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for x in ([0, 0, 0, 0.5], [2, 0, 0, 0], [2, -2, 3, 0], [0, -2, 0, -3]):
        expected = with_gradients(_of_counts, [torch.tensor(x, dtype=torch.float32)])
        got = session.run(trace.outputs, {"batch.0": np.array(x, np.float32)})
        for name, value in zip(trace.outputs, got, strict=True):
            np.testing.assert_allclose(value, expected[name].numpy(), rtol=1e-5, err_msg=str(x))


def test_a_step_of_more_rounds_than_are_recorded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.trace.MOST_ROUNDS", (4,))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        y = model(batch["x"]).exp().sum(1)
        total = y.mean()
        for number in range(len(batch["on"].nonzero())):
            total = total + y[number]
        return total

    model = nn.Linear(4, 2)
    with pytest.warns(UserWarning, match=r"`test_branches.*up to 4, and a device refuses"):
        export.train_step(
            model, loss, {"x": torch.randn(3, 4), "on": torch.ones(3, dtype=torch.bool)},
            optimizer=export.Sgd(0.01), dynamic={"x": {0: "rows"}, "on": {0: "rows"}},
            directory=tmp_path / "made", verify=False,
        )  # fmt: skip
    trainer = Trainer(tmp_path / "made", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for rows, count in ((2, 2), (1, 0), (9, 4)):
        batch = {"x": torch.randn(rows, 4), "on": torch.arange(rows) < count}
        optimizer.zero_grad()
        expected = loss(model, batch)
        expected.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        got = trainer.step({name: each.numpy() for name, each in batch.items()})
        assert got == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(DeviceError):
        trainer.step({"x": np.ones((9, 4), np.float32), "on": np.arange(9) < 5})
