"""What an author has hung on parameters and optimizers, which torch runs in each step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from export.errors import ExportError

Hooks = Mapping[str, tuple[Callable[[Tensor], Tensor | None], ...]]
"""By the name of a parameter, what is called with its gradient, and may give another."""

_TORCH = str(Path(torch.__file__).parent)


def hooks_of(model: nn.Module, trained: Collection[str]) -> Hooks:
    """The hooks on the gradients of these parameters of the model.

    Raises ExportError for those that are given a gradient where it lies, in ``p.grad``: a recorded
    step has none there.
    """
    found: dict[str, tuple[Callable[[Tensor], Tensor | None], ...]] = {}
    for name, parameter in model.named_parameters():
        if name not in trained:
            continue
        after = parameter._post_accumulate_grad_hooks or {}
        own = parameter._backward_hooks or {}
        for hook in after.values():
            raise _refusal(name, f"({_named(hook)}) that runs when its gradient is in p.grad")
        for hook in own.values():
            if _named(hook).startswith("register_multi_grad_hook"):
                raise _refusal(name, "of the gradients of several tensors at once")
        if own:
            found[name] = tuple(own.values())
        elif not _gets_what_it_is_given(parameter):
            raise _refusal(name, "on its node of autograd's graph that changes its gradient")
    return found


def _refusal(name: str, what: str) -> ExportError:
    return ExportError(
        f"the parameter {name!r} has a hook {what}, which an exported step would not run",
        instead="parameter.register_hook(lambda gradient: ...), which is recorded",
    )


def _gets_what_it_is_given(parameter: nn.Parameter) -> bool:
    """Whether backward leaves a gradient as it is: a node's own hooks are listed nowhere."""
    before, values = parameter.grad, parameter.data
    parameter.grad = None
    # Of one number: it costs nothing, and what a hook would write into is not the parameter.
    parameter.data = values.new_zeros(()).expand(values.shape)
    try:
        with torch.enable_grad():
            given = values.new_full((), _GIVEN).expand(values.shape)
            torch.autograd.backward([parameter.view_as(parameter)], [given])
        got: Tensor | None = parameter.grad
        return got is not None and bool((got == _GIVEN).all())
    except Exception:  # a hook that is about something else than this gradient
        return False
    finally:
        parameter.data, parameter.grad = values, before


# More than what a gradient is clipped to.
_GIVEN = 1000.0


def refuse_memory(
    hooks: Hooks, like: Mapping[str, Tensor], rewrites: Callable[[], AbstractContextManager[None]]
) -> None:
    """Raise ExportError for a hook that gives another gradient when it is called again.

    ``like`` are tensors of the gradients' shapes; ``rewrites`` lets each call draw the same.
    """
    for name, several in hooks.items():
        for hook in several:
            try:
                once, again = (_called(hook, like[name], rewrites) for _ in range(2))
            except Exception:  # recording says what is wrong with it
                continue
            if not torch.equal(once, again):
                raise ExportError(
                    f"the hook ({_named(hook)}) on the parameter {name!r} gives another gradient "
                    "when it is called again: it goes by something that it changes, which the "
                    "exported step would hold at its first value for ever",
                    instead="a buffer of the model that the loss moves (self.count.add_(1))",
                )


def _called(
    hook: Callable[[Tensor], Tensor | None],
    like: Tensor,
    rewrites: Callable[[], AbstractContextManager[None]],
) -> Tensor:
    gradient = torch.cos(torch.arange(like.numel(), dtype=like.dtype)).reshape(like.shape)
    with rewrites(), torch.no_grad():
        given = hook(gradient)
    return gradient if given is None else given


def hung_on(
    leaves: Mapping[str, Tensor],
    hooks: Hooks,
    inside: Callable[[], AbstractContextManager[object]],
) -> None:
    """Put the hooks on the tensors of these names.

    ``inside``, where they run, what the model holds is the step's: a hook may use a mask of it.
    """
    for name, tensor in leaves.items():
        for hook in hooks.get(name, ()):
            tensor.register_hook(partial(_run_inside, inside, hook))


def _run_inside(
    inside: Callable[[], AbstractContextManager[object]],
    hook: Callable[[Tensor], Tensor | None],
    gradient: Tensor,
) -> Tensor | None:
    with inside():
        return hook(gradient)


def refuse_changed(optimizer: torch.optim.Optimizer) -> None:
    """Raise ExportError for an optimizer that does more than its class says.

    By hooks, or by a method that was replaced.
    """
    for when, hooks in _step_hooks(optimizer):
        for hook in hooks.values():
            raise _not_seen(f"has a hook ({_named(hook)}) that runs {when} each step")
    for name, function in vars(optimizer).items():
        if callable(getattr(type(optimizer), name, None)) and not _is_torchs(function):
            raise _not_seen(f"has another {name} than its class ({_named(function)})")


def _not_seen(what: str) -> ExportError:
    return ExportError(
        f"the optimizer {what}, which an exported step would not run",
        instead="what it does to gradients by parameter.register_hook, export.Clipped(...) or a "
        "gradient rule; what it does to weights in the loss (with torch.no_grad(): w.clamp_(...))",
    )


def _step_hooks(optimizer: Any) -> Iterator[tuple[str, Mapping[int, Any]]]:
    everywhere: Any = sys.modules[torch.optim.Optimizer.__module__]
    yield "before", optimizer._optimizer_step_pre_hooks
    yield "after", optimizer._optimizer_step_post_hooks
    yield "before", everywhere._global_optimizer_pre_hooks
    yield "after", everywhere._global_optimizer_post_hooks


def _is_torchs(function: Any) -> bool:
    """Whether torch put it there, with all that it is wrapped in: what counts steps, say."""
    while function is not None:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCH):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _named(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))
