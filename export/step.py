"""The train step and the prediction as pure functions of named tensors.

The same functions run eagerly (in float32 or float64, as the reference) and under the tracer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from device_sdk.artifact import MetricSource
from device_sdk.artifact.submodels import Submodel
from export.arguments import changed
from export.axes import Axes, Shape
from export.draws import drawn_so_far, refuse_draws
from export.errors import ExportError
from export.gradient_rules import GradientRule, StepDirection
from export.hooks import Hooks, hung_on, refuse_memory
from export.insides import disable_current_modes, is_fake
from export.layout import LayoutSlot
from export.optimizers import Optimizer
from export.optimizers.passing import passing_over
from export.rewrites.randomness import Randomness
from export.rounding import YARDSTICK, rounded_anew
from export.sizes import Question, questions_of

Batch = dict[str, Tensor]
Outputs = dict[str, Tensor]
Losses = dict[str, Tensor]
Result = Tensor | Losses | tuple[Tensor | Losses, Outputs] | Outputs
LossFunction = Callable[[nn.Module, Batch], Tensor | tuple[Tensor, Outputs]]
LossesFunction = Callable[[nn.Module, Batch], Losses | tuple[Losses, Outputs]]
PredictFunction = Callable[[nn.Module, Batch], Outputs]
Rewrites = Callable[[Randomness], AbstractContextManager[None]]

COARSE_ULPS = 4096.0
"""Of arithmetic that is about as coarse as float16, in which most models still compute the same."""


@dataclass(frozen=True)
class Problem:
    """All that defines one artifact's graphs."""

    name: str
    model: nn.Module
    loss: LossFunction | LossesFunction
    predict: PredictFunction | None
    optimizer: Optimizer
    axes: Axes
    slots: tuple[LayoutSlot, ...]
    batch: Mapping[str, Tensor]
    gradient: GradientRule | None = None
    metrics: Mapping[str, MetricSource] = field(default_factory=dict)
    evaluated_loss: str | None = None
    """Name of the loss that is a metric; None where none is."""
    unused: tuple[str, ...] = ()
    """Names of the parameters that the loss has no gradient for, which stay as they are."""
    written: frozenset[str] = frozenset()
    """Names of the trained parameters that the loss itself writes into before the optimizer."""
    passes: Callable[[], Mapping[str, bool | None]] = dict
    """Whether the optimizer passes over each parameter, as ``optimizers.passing.passes`` says."""
    over: tuple[frozenset[str], ...] = ()
    """The parameters that the optimizer passes over together, and counts the steps of."""
    branches: bool = False
    """Whether the step branches on data: then ``unused`` is so in every way that was recorded."""
    held: Mapping[int, str] = field(default_factory=dict)
    """Names of the parameters and buffers by their ``id``, also of the model this is a copy of."""
    hooks: Hooks = field(default_factory=dict)
    """What is called with the parameters' gradients."""
    submodel: Submodel | None = None
    """Which part of a full model it is."""

    @property
    def parameter_slots(self) -> list[LayoutSlot]:
        return [slot for slot in self.slots if slot.kind == "parameter"]


class NotAsTried(BaseException):
    """One way of a branch on data does what the step on the example batch did not.

    It has gradients for parameters that were ``used`` by none, it ``changed`` what was left alone,
    or it is ``without`` a gradient for parameters that the optimizer has to pass over: the state
    has to be laid out, and the step recorded, anew. No error that code catches.
    """

    def __init__(
        self,
        used: Collection[str] = (),
        changed: Collection[str] = (),
        without: Collection[str] = (),
    ) -> None:
        super().__init__("not as on the example batch")
        self.used, self.changed = frozenset(used), frozenset(changed)
        self.without = frozenset(without)


def held_tensors(model: nn.Module) -> dict[int, str]:
    """The model's parameters and buffers by identity, as ``Problem.held`` has them."""
    own = (*model.named_parameters(), *model.named_buffers())
    return {id(tensor): name for name, tensor in own}


_DATA: Any = Tensor.data


def _set_data(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape != value.shape:
        raise ExportError(
            f"a tensor of shape {list(tensor.shape)} is given data of shape {list(value.shape)}",
            instead="a new tensor of that shape",
        )
    with torch.no_grad():
        tensor.detach().copy_(value)


def _numpy(tensor: Tensor, **how: Any) -> Any:
    """``tensor.numpy()`` of what the model holds beside its state; of what it computes, an error.

    Recording, torch would hand out memory that nobody has written.
    """
    if is_fake(tensor):
        raise RuntimeError(".numpy() is not supported for what a step computes")
    with disable_current_modes():
        return tensor.numpy(**how)


class _Identities(TorchFunctionMode):
    """Inside, a step's tensors stand for the model's own, by whatever way these are reached.

    A list of parameters, a closure, a module that was kept from before. What is written by way of
    ``data`` shows in the version of the tensor itself, and is recorded.
    """

    def __init__(self, held: Mapping[int, str], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = {key: tensors[name] for key, name in held.items() if name in tensors}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = changed(self._current, (args, kwargs or {}))
        if func is Tensor.numpy:
            return _numpy(*args, **kwargs)
        if func == _DATA.__get__:
            return args[0].detach()
        if func == _DATA.__set__:
            return _set_data(*args)
        return func(*args, **kwargs)

    def _current(self, value: Any) -> Any:
        return self._tensors.get(id(value), value) if isinstance(value, Tensor) else value


class _Loss(nn.Module):
    """Gives functional_call a module whose forward is the user's loss, and what follows from it."""

    def __init__(
        self,
        model: nn.Module,
        function: LossFunction | LossesFunction | PredictFunction,
        then: Callable[[Result], Any],
    ) -> None:
        super().__init__()
        self.model = model
        self._function, self._then = function, then

    def forward(self, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        result = self._then(self._function(self.model, batch))
        # Read here, while the model holds this step's tensors: one that the model set anew
        # (self.count = self.count + 1) is not the tensor that went in.
        left = dict(self.model.named_buffers(remove_duplicate=False))
        return result, {**left, **dict(self.model.named_parameters(remove_duplicate=False))}


def _call(
    problem: Problem,
    function: LossFunction | LossesFunction | PredictFunction,
    tensors: Mapping[str, Tensor],
    batch: Batch,
    then: Callable[[Result], Any] = lambda result: result,
) -> tuple[Any, dict[str, Tensor]]:
    """What the function returns, and the model's buffers and parameters as it left them.

    ``then`` makes something of it while the model still holds these tensors: what runs backward
    (hooks, an author's own function) finds in the model what it would find there in torch.
    """
    named = {
        f"model.{place}": tensors[name] for place, name in _places(problem.model) if name in tensors
    }
    module = _Loss(problem.model, function, then)
    with _Identities(problem.held, tensors):
        result: tuple[Any, dict[str, Tensor]] = torch.func.functional_call(
            module, named, (batch,), tie_weights=False
        )
    return result


def _places(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Each place of a parameter or buffer by one path, and the name that the tensor goes by.

    Tied tensors have several places. A module that several paths lead to counts once: what
    functional_call ties itself, it would put back into such a module in place of its own.
    """
    names = held_tensors(model)
    for path, module in model.named_modules():
        own = (*module.named_parameters("", False, False), *module.named_buffers("", False, False))
        for key, tensor in own:
            yield f"{path}.{key}" if path else key, names[id(tensor)]


def _split_loss(problem: Problem, result: Result) -> tuple[Losses, Outputs]:
    found, outputs = result if isinstance(result, tuple) else (result, {})
    several = isinstance(found, dict) and bool(found)
    losses: Losses = dict(found) if several else {"loss": found}  # type: ignore[dict-item]
    if several and problem.gradient is None:
        raise ExportError(
            f"the loss function returned several losses ({', '.join(losses)})",
            instead="one scalar, or gradient= with a rule that makes one step of their gradients",
        )
    for name, loss in losses.items():
        if isinstance(loss, Tensor) and all(size == 1 for size in loss.shape):
            # One element is enough for torch's backward.
            losses[name] = loss = loss.reshape(())
        if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            which = f"the loss {name!r}" if several else "the loss"
            raise ExportError(
                f"{which} is {shape}, not a scalar", instead="a mean or a sum over the batch"
            )
    if not isinstance(outputs, dict) or not all(isinstance(v, Tensor) for v in outputs.values()):
        raise ExportError("the loss's second result is not a dict of tensors")
    return losses, outputs


def _batch(problem: Problem, inputs: Mapping[str, Tensor]) -> Batch:
    return {name: inputs[f"batch.{name}"] for name in problem.batch}


def optimizer_slots(problem: Problem) -> dict[str, list[str]]:
    """Names of the optimizer's state tensors, by kind of state."""
    found: dict[str, list[str]] = {}
    for held in optimizer_tensors(problem):
        found.setdefault(held.kind, []).append(held.name)
    return found


@dataclass(frozen=True)
class OptimizerTensor:
    """A state tensor of the optimizer: ``like`` names the parameter slot that it belongs to."""

    name: str
    kind: str
    dtype: torch.dtype
    shape: Shape
    like: str | None


def optimizer_tensors(problem: Problem) -> list[OptimizerTensor]:
    """The optimizer's state tensors, kind after kind, in the order of the parameter slots."""
    found = []
    parameters = problem.parameter_slots
    for spec in problem.optimizer.state():
        prefix = f"{problem.optimizer.name}.{spec.name}"
        if not spec.per_parameter:
            found.append(OptimizerTensor(prefix, spec.name, spec.dtype, spec.lead, None))
            continue
        for slot in parameters if spec.of is None else [parameters[i] for i in spec.of]:
            name, shape = f"{prefix}.{slot.name}", (*spec.lead, *slot.shape)
            found.append(OptimizerTensor(name, spec.name, spec.dtype, shape, slot.name))
    return found


def train_step(
    problem: Problem,
    inputs: Mapping[str, Tensor],
    rewrites: Rewrites,
    trained: set[str] | None = None,
) -> dict[str, Tensor]:
    """One step: named inputs (see docs/architecture/artifact.md) to named outputs.

    Also returns, for verification, each parameter slot's gradient as ``gradient.<slot>``, and as
    ``written.<slot>`` what the optimizer starts from where the loss writes into parameters, as
    ``without`` which of the sets ``over`` have no gradient.
    ``trained`` gets the names of the parameters that this way of the step has a gradient for.
    """
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for slot in problem.slots:
        target = parameters if slot.kind == "parameter" else buffers
        target.update(slot.unpack(inputs[f"state.{slot.name}"]))
    leaves = {
        name: (value.clone() if name in problem.written else value).detach().requires_grad_()
        for name, value in parameters.items()
    }
    # Copies, so that a write into one of them shows in its version.
    buffers = {name: value.clone() for name, value in buffers.items()}
    hung_on(leaves, problem.hooks, partial(_Identities, problem.held, {**leaves, **buffers}))
    watched = {n: buffers[n].requires_grad_() for n in problem.unused} if problem.branches else {}
    versions = {name: leaf._version for name, leaf in leaves.items()}
    step = inputs["state.step"]
    problem.model.train()

    def backward(result: Result) -> Any:
        losses, outputs = _split_loss(problem, _in_this_way(result, questions_of(step)))
        return losses, outputs, *_differentiate(problem, losses, leaves, watched)

    with rewrites(Randomness(inputs["seed"], step)), torch.enable_grad():
        (losses, outputs, gradients, reached), left = _call(
            problem, problem.loss, {**leaves, **buffers}, _batch(problem, inputs), backward
        )
    if trained is not None:
        trained |= reached
    kept = {member.name for slot in problem.slots if slot.kept for member in slot.members}
    changed = {name for name in kept if _changed(buffers[name], left.get(name))}
    questions = questions_of(step)
    if questions:
        moved = {name for name, leaf in leaves.items() if leaf._version > versions[name]}
        changed |= moved - problem.written
        _refuse_replaced(questions, leaves, left)
    if questions and (changed or reached & set(watched) or (problem.unused and not watched)):
        raise NotAsTried(reached & set(watched), changed)
    for name in changed:
        raise ExportError(
            f"the step changes {name!r}, which it left alone on the example batch",
            instead="a step that always does the same",
        )
    without = set(leaves) - reached
    passed = problem.passes() if without else {}
    apart = {name for name in without if passed.get(name) is False}
    counted = {name for names in problem.over if names <= apart for name in names}
    if questions and reached and apart != counted:
        raise NotAsTried(without=apart)
    buffers = {name: _left(name, value, left.get(name)) for name, value in buffers.items()}
    with torch.no_grad():
        written = _written(problem, leaves)
        inputs = {**inputs, **{f"state.{name}": value for name, value in written.items()}}
        direction = _direction(problem, inputs, losses, gradients)
        with passing_over(without):
            found = _finish(problem, inputs, direction, outputs, buffers)
    kept_back = {name for name in without if passed.get(name) is None}
    if questions and without and (kept_back or not reached):
        _say_refused(questions, kept_back if reached else without, bool(reached))
        found["guard"] = torch.full_like(found["guard"], torch.nan)
    if problem.over:
        found["without"] = torch.tensor([names <= without for names in problem.over])
    return {**found, **{f"written.{name}": value for name, value in written.items()}}


def _in_this_way(result: Result, questions: Sequence[Question]) -> Result:
    """A loss that is a number in this way of a step: a tensor that depends on no parameter."""
    loss, outputs = result if isinstance(result, tuple) else (result, {})
    if questions and isinstance(loss, (int, float)):
        return torch.scalar_tensor(loss), outputs
    return result


def _written(problem: Problem, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameter slots that the loss wrote into: what the optimizer starts from."""
    values = {name: leaf.detach() for name, leaf in leaves.items()}
    return {
        slot.name: slot.pack(values)
        for slot in problem.parameter_slots
        if not problem.written.isdisjoint(member.name for member in slot.members)
    }


def _refuse_replaced(
    questions: Sequence[Question], leaves: Mapping[str, Tensor], left: Mapping[str, Tensor]
) -> None:
    for name, leaf in leaves.items():
        if left.get(name, leaf) is not leaf:
            raise ExportError(
                f"the step puts another tensor in place of the parameter {name!r} in one way of a "
                "branch on data",
                line=questions[-1].line,
                instead="what it writes into the parameter (p.data.copy_)",
            )


def _say_refused(questions: Sequence[Question], names: Collection[str], trains: bool) -> None:
    where = ", ".join(f"`{question.line}` is {question.answer}" for question in questions)
    found = f"{len(names)} parameters ({', '.join(sorted(names)[:3])})"
    why = (
        f"{found} have no gradient, and the optimizer cannot pass over them as torch's does, for "
        "it accumulates gradients, or all of them make a state of it together"
        if trains
        else "the loss depends on no parameter, of which torch's backward raises"
    )
    warnings.warn(
        f"where {where}, {why}: a device refuses such a step. To train on it: a term of weight 0 "
        "(0 * prediction.sum()) there",
        stacklevel=3,
    )


def _differentiate(
    problem: Problem,
    losses: Losses,
    leaves: Mapping[str, Tensor],
    watched: Mapping[str, Tensor],
) -> tuple[dict[str, list[Tensor]], set[str]]:
    """The packed gradients of each loss; the names of leaves, and others, that have one."""
    gradients: dict[str, list[Tensor]] = {}
    reached: set[str] = set()
    zeros = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    for name, loss in losses.items():
        if not loss.requires_grad and questions_of(loss):
            gradients[name] = [slot.pack(zeros) for slot in problem.parameter_slots]
            continue
        if not loss.requires_grad:
            which = "the loss" if len(losses) == 1 else f"the loss {name!r}"
            raise ExportError(f"{which} does not depend on any parameter")
        every = {**leaves, **watched}
        found = torch.autograd.grad(
            loss, list(every.values()), allow_unused=True, retain_graph=len(losses) > 1
        )
        reached |= {n for n, gradient in zip(every, found, strict=True) if gradient is not None}
        named = {
            leaf_name: zeros[leaf_name] if gradient is None else gradient
            for (leaf_name, leaf), gradient in zip(leaves.items(), found, strict=False)
        }
        gradients[name] = [slot.pack(named) for slot in problem.parameter_slots]
    if getattr(problem.gradient, "all_parameters", False):
        reached |= set(leaves)
    return gradients, reached


def _direction(
    problem: Problem,
    inputs: Mapping[str, Tensor],
    losses: Losses,
    gradients: Mapping[str, list[Tensor]],
) -> StepDirection:
    if problem.gradient is None:
        return StepDirection(losses["loss"].detach(), gradients["loss"])
    parameters = [inputs[f"state.{slot.name}"] for slot in problem.parameter_slots]
    direction = problem.gradient.combine(
        {name: loss.detach() for name, loss in losses.items()},
        gradients,
        parameters,
        _batch(problem, inputs),
    )
    given = [tuple(gradient.shape) for gradient in direction.gradients]
    if given != [tuple(parameter.shape) for parameter in parameters]:
        raise ExportError(
            f"the gradient rule returned gradients of shapes {given}",
            instead="one for each of the parameters that it is given, of its shape",
        )
    return direction


@dataclass(frozen=True)
class Trial:
    """What a step on the example batch did, by the names of parameters and buffers.

    ``used``: the parameters that have a gradient; torch's optimizers leave others as they are, and
    those that the model puts another in place of, which it does not know.
    ``unchanged``: what it did not write to, and did not replace.
    """

    used: frozenset[str]
    unchanged: frozenset[str]

    @property
    def written(self) -> frozenset[str]:
        """The trained parameters that the loss writes into."""
        return self.used - self.unchanged


def try_step(problem: Problem, trained: Collection[str], rewrites: Rewrites) -> Trial:
    """A step on the example batch with these parameters.

    Where the loss cannot be run as it is, all are used and nothing is unchanged: recording says
    then what is wrong with it. Raises ExportError where the loss draws numbers beside torch, or
    goes by what it keeps outside parameters and buffers.
    """
    attributes = [(place, dict(vars(module))) for place, module in problem.model.named_modules()]
    held = _copies(problem.model)
    leaves = {name: held[name].requires_grad_() for name in trained}
    zero = torch.zeros((), dtype=torch.int64)
    refuse_memory(problem.hooks, held, lambda: rewrites(Randomness(zero, zero)))
    before = drawn_so_far()
    try:
        losses, left = _losses_on_example(problem, held, rewrites)
        used, slopes = _reached(losses, leaves)
    except Exception:
        return Trial(frozenset(trained), frozenset(trained))
    if drawn_so_far() != before:
        refuse_draws(lambda: _losses_on_example(problem, _copies(problem.model), rewrites)[0])
    elif other := _differing(problem, {**losses, **slopes}, trained, rewrites):
        what = "loss" if other & losses.keys() else "gradient"
        _refuse_memory(problem.model, attributes, what)
    if getattr(problem.gradient, "all_parameters", False):
        used = set(leaves)
    used = {name for name in used if left.get(name, held[name]) is held[name]}
    unchanged = {name for name, tensor in held.items() if not _changed(tensor, left.get(name))}
    # With none used at all, recording says so.
    return Trial(frozenset(used or leaves), frozenset(unchanged))


def _differing(
    problem: Problem, numbers: Losses, trained: Collection[str], rewrites: Rewrites
) -> set[str]:
    """Which of these numbers a second call does not give, but for how they are rounded."""
    torchs = torch.get_rng_state()
    try:
        second = _again(problem, trained, rewrites)
    except Exception:  # recording says what is wrong with it
        return set()
    apart = {
        name: float(abs(second[name] - number.detach()))
        for name, number in numbers.items()
        if not torch.allclose(number, second[name], rtol=2e-6, atol=0, equal_nan=True)
    }
    if not apart or not torch.equal(torchs, torch.get_rng_state()):
        return set()
    try:
        worth = _worth_of_rounding(problem, second, trained, rewrites)
    except Exception:  # not known, so nothing is laid to it
        return set(apart)
    return {name for name, gap in apart.items() if gap > YARDSTICK * worth[name]}


def _worth_of_rounding(
    problem: Problem, losses: Losses, trained: Collection[str], rewrites: Rewrites
) -> dict[str, float]:
    """How far the rounding of all that they are made of moves these numbers.

    A loss near zero may be a difference of large numbers, so its own size does not tell. Calls in
    coarser arithmetic do: rounding's part in how far they are off grows with the ulp and is scaled
    back. What a model remembers of earlier calls moves them too, by no more than before, and is
    scaled down to nothing: it does not pass for rounding.
    """
    rng = np.random.default_rng(0)
    worth = dict.fromkeys(losses, 0.0)
    for _ in range(4):
        with rounded_anew(rng, ulps=COARSE_ULPS):
            coarse = _again(problem, trained, rewrites)
        for name, loss in losses.items():
            gap = float(abs(coarse[name] - loss))
            worth[name] = max(worth[name], gap / COARSE_ULPS)
    return worth


def _again(problem: Problem, trained: Collection[str], rewrites: Rewrites) -> Losses:
    """The losses on the example batch and their slopes, computed as they were at first."""
    held = _copies(problem.model)
    leaves = {name: held[name].requires_grad_() for name in trained}
    losses, _ = _losses_on_example(problem, held, rewrites)
    _, slopes = _reached(losses, leaves)
    return {name: number.detach() for name, number in {**losses, **slopes}.items()}


def _refuse_memory(
    model: nn.Module, before: Sequence[tuple[str, Mapping[str, Any]]], what: str
) -> NoReturn:
    """Raise ExportError for a loss or gradient that is another one when it is called again on the
    same."""
    modules = dict(model.named_modules())
    changed = [
        f"{place}.{key}" if place else key
        for place, attributes in before
        for key, value in vars(modules[place]).items()
        if isinstance(value, (int, float, Tensor)) and value is not attributes.get(key)
    ]
    named = f" ({', '.join(changed[:3])} changed)" if changed else ""
    raise ExportError(
        f"a second call on the same parameters, buffers and batch gives another {what}: it goes by "
        f"something else that it changes{named}, which the exported step would hold at its first "
        "value for ever",
        instead="register_buffer for what a step moves: self.count.add_(1), self.mean.mul_(0.9)",
    )


def _copies(model: nn.Module) -> dict[str, Tensor]:
    named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def _losses_on_example(
    problem: Problem, held: Mapping[str, Tensor], rewrites: Rewrites
) -> tuple[Losses, dict[str, Tensor]]:
    """The losses, always by the same numbers of torch's, and the buffers as they were left."""
    problem.model.train()
    zero = torch.zeros((), dtype=torch.int64)
    with rewrites(Randomness(zero, zero)), torch.enable_grad():
        result, left = _call(problem, problem.loss, held, dict(problem.batch))
    return _split_loss(problem, result)[0], left


def _reached(losses: Losses, leaves: Mapping[str, Tensor]) -> tuple[set[str], dict[str, Tensor]]:
    """The names of those leaves that one of the losses has a gradient for, and of each of these
    gradients a number: its slope along one direction."""
    found: set[str] = set()
    slopes = {}
    for title, loss in losses.items():
        gradients = torch.autograd.grad(
            loss, list(leaves.values()), allow_unused=True, retain_graph=len(losses) > 1
        )
        for name, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                found.add(name)
                flat = gradient.detach().to_dense().reshape(-1)
                along = torch.cos(torch.arange(len(flat))).to(flat.dtype)
                slopes[f"{title} along {name}"] = flat @ along
    return found, slopes


def _changed(before: Tensor, after: Tensor | None) -> bool:
    """Whether a clone was written into, or another tensor put in its place."""
    return before._version > 0 or not (after is None or after is before)


def _left(name: str, before: Tensor, after: Tensor | None) -> Tensor:
    """A buffer after the step, of the shape and dtype that it had before."""
    if after is None or after is before:
        return before
    if after.shape != before.shape or after.dtype != before.dtype:
        raise ExportError(
            f"the model sets its buffer {name!r} to {list(after.shape)} of {after.dtype}, but it "
            f"was {list(before.shape)} of {before.dtype}",
            instead="a buffer that keeps its shape and dtype",
        )
    return after.detach()


def apply_optimizer(
    problem: Problem, inputs: Mapping[str, Tensor], gradients: list[Tensor]
) -> dict[str, Tensor]:
    """New parameter and optimizer state by state tensor's name, from packed gradients."""
    slots = problem.parameter_slots
    names = optimizer_slots(problem)
    update = problem.optimizer.update(
        [inputs[f"state.{slot.name}"] for slot in slots],
        gradients,
        {kind: [inputs[f"state.{name}"] for name in held] for kind, held in names.items()},
        inputs["state.step"],
        {name: inputs[f"hyper.{name}"] for name in problem.optimizer.hyper()},
    )
    new = {slot.name: value for slot, value in zip(slots, update.parameters, strict=True)}
    for kind, held in names.items():
        new.update(zip(held, update.state[kind], strict=True))
    return new


def _finish(
    problem: Problem,
    inputs: Mapping[str, Tensor],
    direction: StepDirection,
    outputs: Outputs,
    buffers: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    slots = problem.parameter_slots
    packed = direction.gradients
    twice = sorted(set(outputs) & set(direction.outputs))
    if twice:
        raise ExportError(f"the loss and the gradient rule both give an output {twice[0]!r}")
    outputs = {**outputs, **direction.outputs}
    new = apply_optimizer(problem, inputs, packed)
    for slot in problem.slots:
        if slot.kind == "buffer" and not slot.kept:
            new[slot.name] = slot.pack(buffers)
    kinds = optimizer_slots(problem)
    implied = {
        name for spec in problem.optimizer.state() if not spec.guarded for name in kinds[spec.name]
    }
    sums = [v.sum() for name, v in new.items() if v.is_floating_point() and name not in implied]
    guard = sums[0]
    for total in sums[1:]:
        guard = guard + total
    new["step"] = inputs["state.step"] + 1
    return {
        "loss": direction.loss.to(slots[0].dtype),
        "guard": guard.to(slots[0].dtype),
        **{f"new.{name}": value for name, value in new.items()},
        **{f"output.{name}": value.detach() for name, value in outputs.items()},
        **{f"gradient.{slot.name}": g for slot, g in zip(slots, packed, strict=True)},
    }


def predict(
    problem: Problem, inputs: Mapping[str, Tensor], rewrites: Rewrites
) -> dict[str, Tensor]:
    """The prediction in evaluation mode: ``predict``, else the loss's outputs, else the loss."""
    outputs, _ = _in_evaluation_mode(problem, inputs, rewrites, with_losses=False)
    return {f"output.{name}": value for name, value in outputs.items()}


def evaluate(
    problem: Problem, inputs: Mapping[str, Tensor], rewrites: Rewrites
) -> dict[str, Tensor]:
    """The loss in evaluation mode, and those outputs of the prediction that metrics are about."""
    outputs, losses = _in_evaluation_mode(problem, inputs, rewrites, with_losses=True)
    loss = losses.get(problem.evaluated_loss or "")
    if loss is None:
        raise ExportError(
            f"metric 'loss' is about {problem.evaluated_loss!r}, which is no loss",
            instead=f"one of {', '.join(losses)}",
        )
    named = {source.output for source in problem.metrics.values()}
    return {
        "loss": loss.to(problem.slots[0].dtype),
        **{f"output.{name}": value for name, value in outputs.items() if name in named},
    }


def _in_evaluation_mode(
    problem: Problem, inputs: Mapping[str, Tensor], rewrites: Rewrites, *, with_losses: bool
) -> tuple[Outputs, Losses]:
    tensors: dict[str, Tensor] = {}
    for slot in problem.slots:
        given = slot.unpack(inputs[f"state.{slot.name}"])
        # What the model writes to also in evaluation mode is its own for this call.
        own = set(given) if slot.kind == "buffer" else problem.written
        tensors.update({n: value.clone() if n in own else value for n, value in given.items()})
    problem.model.eval()
    zero = torch.zeros((), dtype=torch.int64)
    batch = _batch(problem, inputs)
    outputs: Outputs = {}
    losses: Losses = {}
    try:
        with rewrites(Randomness(zero, zero)), torch.no_grad():
            if problem.predict is None or with_losses:
                result = _evaluated(problem, tensors, batch)
                asked = questions_of(next(iter(batch.values())))
                losses, outputs = _split_loss(problem, _in_this_way(result, asked))
                outputs = outputs or losses
            if problem.predict is not None:
                predicted, _ = _call(problem, problem.predict, tensors, batch)
                if not isinstance(predicted, dict):
                    raise ExportError("predict returned no dict of tensors")
                outputs = predicted
    finally:
        problem.model.train()
    return outputs, losses


def _evaluated(problem: Problem, tensors: Mapping[str, Tensor], batch: Batch) -> Result:
    """The loss function's result, with gradients where it takes some itself (a penalty's)."""
    try:
        result: Result = _call(problem, problem.loss, tensors, batch)[0]
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        trained = {m.name for slot in problem.parameter_slots for m in slot.members}
        own = {n: t.detach().requires_grad_(n in trained) for n, t in tensors.items()}
        leaves = {n: t for n, t in own.items() if t.requires_grad}
        hung_on(leaves, problem.hooks, partial(_Identities, problem.held, own))
        with torch.enable_grad():
            result = _call(problem, problem.loss, own, batch)[0]
    return result
