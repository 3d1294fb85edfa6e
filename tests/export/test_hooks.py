"""What is hung on a model's parameters, modules and optimizer is in the exported step, or refused.

The judge is an ordinary loop of torch: verification computes with the exporter's own step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

import export
from device_sdk import Trainer

STEPS = 3
MASK = (torch.arange(32).reshape(8, 4) % 2).to(torch.float32)
Hung = Callable[[nn.Module, torch.optim.Optimizer], Any]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x).tanh())
        return result


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["label"])


def _made(hung: Hung) -> tuple[Any, torch.optim.Optimizer, Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = {"x": torch.randn(6, 4), "label": torch.arange(6) % 3}
    return model, optimizer, hung(model, optimizer), batch


def _tripled(module: nn.Module, *gradients: Any) -> Any:
    return tuple(None if each is None else each * 3 for each in gradients[0])


def _masked_where_it_lies(gradient: Tensor) -> None:
    gradient.mul_(MASK)


def _of_an_output(module: nn.Module, given: Any, result: Tensor) -> None:
    if result.requires_grad:
        result.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))


def _by_a_count(model: Any, optimizer: Any) -> None:
    def count(module: nn.Module, given: Any) -> None:
        model.count.add_(1)

    model.register_buffer("count", torch.zeros(()))
    model.first.register_forward_pre_hook(count)
    model.first.weight.register_hook(lambda gradient: gradient / model.count)


def _by_a_new_count(model: Any, optimizer: Any) -> None:
    def count(module: nn.Module, given: Any) -> None:
        model.count = model.count + 1

    model.register_buffer("count", torch.zeros(()))
    model.first.register_forward_pre_hook(count)
    model.first.weight.register_hook(lambda gradient: gradient / model.count)


def _by_another_parameter(model: Any, optimizer: Any) -> None:
    model.first.weight.register_hook(lambda gradient: gradient * model.last.weight.abs().mean())


def _by_a_parameter_in_hand(model: Any, optimizer: Any) -> None:
    weight = model.last.weight
    model.first.weight.register_hook(lambda gradient: gradient * weight.abs().mean())


def _hung_in_the_forward(model: Any, optimizer: Any) -> None:
    def hang(module: nn.Module, given: Any, result: Tensor) -> None:
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient * model.last.weight.abs().mean())

    model.first.register_forward_hook(hang)


RECORDED: dict[str, Hung] = {
    "a mask": lambda m, o: m.first.weight.register_hook(lambda g: g * MASK),
    "by a buffer that the loss moves": _by_a_count,
    "by a buffer that the loss sets anew": _by_a_new_count,
    "by another parameter": _by_another_parameter,
    "by a parameter in hand": _by_a_parameter_in_hand,
    "hung in the forward": _hung_in_the_forward,
    "in place": lambda m, o: m.first.weight.register_hook(_masked_where_it_lies),
    "one of two": lambda m, o: (
        m.last.bias.register_hook(lambda g: g + 1),
        m.last.bias.register_hook(lambda g: g * g.sum()),
    ),
    "of a module": lambda m, o: m.last.register_full_backward_hook(_tripled),
    "of a module, before": lambda m, o: m.last.register_full_backward_pre_hook(_tripled),
    "of a module's output": lambda m, o: m.first.register_forward_hook(_of_an_output),
    "of its input": lambda m, o: m.first.register_forward_pre_hook(lambda _, x: (x[0] * 3,)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RECORDED)
def test_a_hook_that_changes_a_gradient_is_recorded(name: str, tmp_path: Path) -> None:
    model, optimizer, _, batch = _made(RECORDED[name])
    export.train_step(
        model, _loss, batch, optimizer=optimizer, dynamic={}, directory=tmp_path / "made",
        verify=name == "a mask",
    )  # fmt: skip
    trainer = Trainer(tmp_path / "made")
    for _ in range(STEPS):
        trainer.step({key: each.numpy() for key, each in batch.items()})
        optimizer.zero_grad()
        _loss(model, batch).backward()
        optimizer.step()
    for key, parameter in model.named_parameters():
        got = torch.from_numpy(trainer.parameters[key])
        torch.testing.assert_close(got, parameter.detach(), rtol=1e-5, atol=1e-6)


def _of_its_node(model: Any, optimizer: Any) -> Any:
    node = get_gradient_edge(model.first.weight).node
    node.register_prehook(lambda gradients: (gradients[0] * MASK,))
    return node


def _stepped(own: Any) -> Any:
    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return step


def _patched(model: Any, optimizer: Any) -> None:
    optimizer.step = _stepped(optimizer.step)


def _counted(model: Any, optimizer: Any) -> None:
    def scaled(gradient: Tensor) -> Tensor:
        model.calls += 1
        return gradient / model.calls

    model.first.weight.register_hook(scaled)


def _counted_on_a_module(model: Any, optimizer: Any) -> None:
    def scaled(module: nn.Module, given: Any, gradients: Any) -> Any:
        model.calls += 1
        return tuple(None if each is None else each * model.calls for each in given)

    model.last.register_full_backward_hook(scaled)


REFUSED: dict[str, tuple[Hung, str]] = {
    "that counts, on a module": (
        _counted_on_a_module,
        r"a second call .* gives another gradient: it goes by .* \(calls changed\)",
    ),
    "accumulated": (
        lambda m, o: m.first.weight.register_post_accumulate_grad_hook(lambda p: None),
        "parameter 'first.weight' has a hook .* when its gradient is in p.grad",
    ),
    "of several": (
        lambda m, o: register_multi_grad_hook([m.first.weight, m.last.weight], lambda g: None),
        "'first.weight' has a hook of the gradients of several tensors at once",
    ),
    "of its node": (_of_its_node, "'first.weight' has a hook on its node of autograd's graph"),
    "that counts": (_counted, "'first.weight' gives another gradient when it is called again"),
    "before a step": (
        lambda m, o: o.register_step_pre_hook(lambda *given: None),
        r"optimizer has a hook \(.*lambda.*\) that runs before each step",
    ),
    "after a step": (
        lambda m, o: o.register_step_post_hook(lambda *given: None),
        "optimizer has a hook .* that runs after each step",
    ),
    "another step": (_patched, "optimizer has another step than its class"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_refused_by_name(name: str, tmp_path: Path) -> None:
    hung, said = REFUSED[name]
    model, optimizer, kept, batch = _made(hung)
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(export.ExportError, match=said):
        export.train_step(
            model, _loss, batch, optimizer=export.Clipped(optimizer, 1.0), dynamic={},
            directory=tmp_path / "made", verify=False,
        )  # fmt: skip
    assert all(map(torch.equal, before, model.parameters()))
    assert all(each.grad is None for each in model.parameters())
    del kept


def test_a_hook_on_every_optimizer_is_one_on_this(tmp_path: Path) -> None:
    model, optimizer, _, batch = _made(lambda m, o: None)
    handle = register_optimizer_step_pre_hook(lambda *given: None)
    try:
        with pytest.raises(export.ExportError, match="that runs before each step"):
            export.train_step(
                model, _loss, batch, optimizer=optimizer, dynamic={}, directory=tmp_path / "made"
            )
    finally:
        handle.remove()
