"""``train_step``: from a torch module, loss and optimizer to an artifact folder."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

import export.wing  # noqa: F401  (its operators and rewrites register themselves)
from device_sdk.artifact import Manifest
from device_sdk.artifact.submodels import Submodel
from export.axes import Axes, Shape, parse_axes
from export.convert import WAY, lowered, to_onnx
from export.errors import ExportError
from export.given import (
    MetricSpecs,
    described_metrics,
    named_axes,
    named_tensors,
    read_metrics,
    refuse_other_kinds,
    require_ports,
    try_metrics,
)
from export.gradient_rules import GradientRule
from export.hooks import hooks_of
from export.in_place import LEAST_STATE_BYTES, LEAST_TENSOR_BYTES, Large, gated
from export.layout import LayoutSlot, lay_out, lay_out_buffers
from export.optimizers import Adam, Optimizer
from export.optimizers.passing import counted, passes, together
from export.optimizers.protocol import bound, packs
from export.optimizers.traced import as_optimizer, trained_by
from export.rate import is_open, rate_by_trial
from export.rewrites.patch import one_at_a_time, recordable, trainable
from export.rewrites.plain import held_in_float32
from export.step import (
    LossesFunction,
    LossFunction,
    NotAsTried,
    PredictFunction,
    Problem,
    Trial,
    evaluate,
    held_tensors,
    optimizer_tensors,
    predict,
    train_step,
    try_step,
)
from export.trace import Spec, Trace, left_as_it_was, record
from export.verify import (
    Verification,
    least_to_train,
    open_session,
    run_on_example,
    verify_artifact,
)
from export.write import Graphs, write_artifact

Progress = Callable[[str], None]
"""Told of each phase as it begins, and of each step of a long one."""


@contextmanager
def reported(progress: Progress | None) -> Iterator[Progress]:
    """``progress``; where it is None, a line on standard error, if that is a terminal.

    The line is rewritten with each phase and taken away at the end, so that a quick export leaves
    nothing.
    """
    live = progress is None and sys.stderr.isatty()

    def show(text: str) -> None:
        if live:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield progress or show
    finally:
        show("")


BATCH_DTYPES = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)


@dataclass(frozen=True, repr=False)
class Exported:
    """A written artifact: its folder, its manifest, and what verification measured (or None)."""

    directory: Path
    manifest: Manifest
    report: Verification | None

    def __repr__(self) -> str:
        text = f"{self.directory}, {len(self.manifest.state)} state tensors"
        if self.report is None:
            return f"<Exported {text}, not verified>"
        worst = self.report.worst
        return (
            f"<Exported {text}, {len(self.report.comparisons)} comparisons with torch; the worst: "
            f"{worst.tensor} off by {worst.error:.1e}, {worst.allowed:.1e} allowed>"
        )

    @property
    def id(self) -> str:
        """The artifact's id: SHA-256 of its manifest, in hex."""
        return self.manifest.id


def export_train_step(
    model: nn.Module,
    loss: LossFunction | LossesFunction,
    example_batch: Mapping[str, Tensor],
    *,
    dynamic: Mapping[str, Mapping[int, str]],
    directory: str | Path,
    optimizer: Optimizer | torch.optim.Optimizer | None = None,
    predict: PredictFunction | None = None,
    gradient: GradientRule | None = None,
    metrics: MetricSpecs | None = None,
    verify: bool = True,
    name: str | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write an artifact folder that trains and predicts on stock onnxruntime.

    model: parameters of float32, which those of float16 and bfloat16 are in the step; those with
        ``requires_grad=False`` are kept as they are, and cost a step no gradient, no update and
        no second copy.
    loss: ``loss(model, batch) -> Tensor`` (a scalar), or ``(Tensor, dict of outputs)``.
    example_batch: gives names, dtypes (float32, int64, int32, uint8, bool) and shapes.
    optimizer: ``export.Sgd(...)``, ``export.AdamW(...)``, ``export.Groups(...)`` or any other
        ``export.Optimizer``; or one of torch's, made of the model's parameters, as the equal of
        ours (its settings and groups; state that it holds already is not taken over). By default
        Adam. One of ours without ``lr`` gets its rate by a trial on the example batch
        (``export.rate``), so that batch should be real rows.
    dynamic: ``{"features": {0: "batch"}}``: named axes that may vary at run time, of batch entries
        and of parameters (by torch's names); equal names are equal sizes.
    predict: ``predict(model, batch) -> dict`` in evaluation mode, for ``Trainer.predict``;
        by default the outputs that ``loss`` returns, else the loss itself.
    gradient: makes the step's gradient out of those of several losses, which ``loss`` then returns
        as a dict of scalars: ``export.ConflictProjection()``, or any ``export.GradientRule``.
    metrics: what devices may be asked to evaluate, and which output and which batch entry that is
        about: ``{"loss": "loss", "accuracy": ("logits", "label"), "auc": ("clicked", "click",
        "probabilities")}``. Outputs are those of ``Trainer.predict``.
    verify: train a few steps beside torch (two batch sizes, one and two threads), compare each
        gradient, update and output with float64 torch, and refuse where they differ. Where they do
        at an axis's least size, 1 as a rule, a larger one becomes the least, with a warning.
    progress: is told of each phase and step as it begins; by default a line on standard error, if
        that is a terminal.

    Raises ExportError naming the operator, the module's path and what to use instead, or the worst
    tensor and its error where verification fails; nothing is written then.
    """
    refuse_other_kinds(
        model, loss, directory, name=name, gradient=gradient, predict=predict, progress=progress
    )
    given = Recipe(
        model, loss, named_tensors(example_batch), named_axes(dynamic),
        Adam() if optimizer is None else optimizer, predict, gradient,
        described_metrics(metrics), name or Path(directory).resolve().name,
    )  # fmt: skip
    return export_given(given, Path(directory), verify=verify, progress=progress)


def export_given(
    given: Recipe, directory: Path, *, verify: bool, progress: Progress | None
) -> Exported:
    """As :func:`export_train_step`, of what was given to it."""
    model = given.model
    # Another thread's export of the same model holds its parameters while it runs the step.
    with (
        reported(progress) as say,
        one_at_a_time(),
        torch.inference_mode(False),
        held_in_float32(model),
    ):
        beyond: list[NotAsTried] = []
        while True:
            problem = _problem(given, beyond)
            try:
                graphs = lower(problem, say)
                break
            except NotAsTried as found:
                beyond.append(found)
        for axis, size in graphs.least.items():
            if problem.axes.example[axis] < size:
                raise ExportError(
                    f"axis {axis!r} is {problem.axes.example[axis]} in the example batch, and the "
                    f"model needs at least {size} of it",
                    instead="a larger example batch, or code that does not branch on that size",
                )
        if given.metrics:
            got = run_on_example(problem, graphs.evaluate or graphs.infer)
            batch = {f"batch.{key}": each.numpy() for key, each in problem.batch.items()}
            try_metrics(given.metrics, problem.metrics, got, batch)
        report: Verification | None = None
        to_train: Mapping[str, int] = {}
        if verify:
            with left_as_it_was(model):
                report = verify_artifact(problem, graphs, say)
            to_train = report.least_to_train
            for axis, size in report.least.items():
                warnings.warn(
                    f"axis {axis!r}: the artifact takes sizes from {size} on; at {size - 1} it is "
                    "not what torch makes of this model",
                    stacklevel=2,
                )
        else:
            for graph in graphs.in_evaluation_mode.values():
                open_session(graph, threads=1)
            step = open_session(graphs.train, threads=1)
            to_train = least_to_train(problem, step, graphs.least)
        rate = given.rate
        if rate is None and is_open(given.optimizer):
            say("trying learning rates")
            rate = rate_by_trial(problem, open_session(graphs.train, threads=1))
        say("writing")
        least = {**graphs.least, **(report.least if report else {})}
        manifest = write_artifact(problem, graphs, directory, least, to_train, rate)
    return Exported(directory, manifest, report)


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or isinstance(module, torch.jit.ScriptModule):
            raise ExportError(
                "a compiled or scripted module cannot be recorded",
                module=f"{name or 'the model itself'} ({type(module).__name__})",
                instead="the module as it was before torch.compile or torch.jit",
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ExportError(
                f"{name!r} has no shape yet (a lazy module)",
                instead="one call of the model on an example before the export",
            )
        if tensor.device.type != "cpu":
            raise ExportError(f"{name!r} is on {tensor.device}", instead="model.cpu()")


@dataclass(frozen=True)
class Recipe:
    """What an artifact is made of: ``export_train_step`` describes each.

    ``name``: that of the artifact; the folder's where it is empty.
    """

    model: nn.Module
    loss: LossFunction | LossesFunction
    example_batch: Mapping[str, Tensor]
    dynamic: Mapping[str, Mapping[int, str]]
    optimizer: Optimizer | torch.optim.Optimizer = field(default_factory=partial(Adam, lr=1e-3))
    predict: PredictFunction | None = None
    gradient: GradientRule | None = None
    metrics: MetricSpecs = field(default_factory=dict)
    name: str = ""
    submodel: Submodel | None = None
    """Which part of a full model this is; see :mod:`export.ladder`."""
    rate: float | None = None
    """What a trial of the full model found, whose part this is."""

    def export(
        self,
        directory: str | Path,
        *,
        optimizer: Optimizer | torch.optim.Optimizer | None = None,
        with_metrics: bool = False,
        verify: bool = True,
    ) -> Exported:
        """Write the artifact, with the given optimizer or the recipe's own.

        ``with_metrics`` declares the metrics. Raises ExportError as ``export_train_step`` does.
        """
        return export_train_step(
            self.model,
            self.loss,
            self.example_batch,
            optimizer=optimizer or self.optimizer,
            dynamic=self.dynamic,
            directory=directory,
            predict=self.predict,
            gradient=self.gradient,
            metrics=self.metrics if with_metrics else None,
            verify=verify,
            name=self.name or None,
        )


def _problem(given: Recipe, beyond: Sequence[NotAsTried] = ()) -> Problem:
    """``beyond``: what some ways of the step turned out to do that the example batch did not."""
    model, batch = given.model, given.example_batch
    if not batch:
        raise ExportError("the example batch is empty", instead="a dict of named tensors")
    for key, tensor in batch.items():
        if not isinstance(tensor, Tensor):
            raise ExportError(
                f"batch entry {key!r} is of type {type(tensor).__name__}, not a tensor"
            )
        if tensor.dtype not in BATCH_DTYPES:
            raise ExportError(
                f"batch entry {key!r} is {tensor.dtype}",
                instead="float32 for numbers, int64 for indices and labels, bool for masks",
            )
    _check_model(model)
    chosen = as_optimizer(given.optimizer, model)
    moved = trained_by(given.optimizer, model)
    trained = {n: p.detach() for n, p in model.named_parameters() if n in moved}
    kept = {n: p.detach() for n, p in model.named_parameters() if n not in moved}
    if not trained:
        raise ExportError("the model has no trainable parameter")
    # A sparse buffer is a constant of the graph: it has no dense elements to be state.
    dense = {n: b for n, b in model.named_buffers() if b.layout == torch.strided}
    buffers = {**dense, **kept}
    axes = parse_axes(given.dynamic, dict(batch), {**trained, **buffers})
    sources, evaluated_loss = read_metrics(given.metrics, batch)
    problem = Problem(
        name=given.name,
        model=model,
        loss=given.loss,
        predict=given.predict,
        optimizer=chosen,
        axes=axes,
        slots=(),
        batch=dict(batch),
        gradient=given.gradient,
        metrics=sources,
        evaluated_loss=evaluated_loss,
        held=held_tensors(model),
        hooks=hooks_of(model, trained),
        submodel=given.submodel,
    )
    with left_as_it_was(model):
        trial = try_step(problem, trained, trainable)
    for found in beyond:
        trial = Trial(trial.used | found.used, trial.unchanged - found.changed)
    shapes = {n: axes.shape(f"state.{n}", trained[n].shape) for n in trained}
    over = together(shapes, [found.without for found in beyond])
    parameters, counting = _laid_out(counted(chosen, shapes, over), trained, trial.used, axes)
    unused = {name: value for name, value in trained.items() if name not in trial.used}
    others = lay_out_buffers(
        {**buffers, **unused}, axes, trial.unchanged, _frozen(model, trial.used), _held(problem)
    )
    return replace(
        problem,
        optimizer=counting,
        slots=(*parameters, *others),
        unused=tuple(unused),
        written=trial.written,
        passes=cache(partial(passes, chosen, shapes)),
        over=over,
        branches=bool(beyond),
    )


def _held(problem: Problem) -> set[str]:
    """What a rung leaves as it is while larger ones train it: no constant."""
    return set() if problem.submodel is None else set(problem.submodel.held)


def _is_held(slot: LayoutSlot, problem: Problem) -> bool:
    return any(member.name in _held(problem) for member in slot.members)


def _frozen(model: nn.Module, trained: Collection[str]) -> set[str]:
    """Parameters that are not trained, and the buffers of modules that hold only such."""
    found: set[str] = set()
    for path, module in model.named_modules():
        own = {name for name, _ in module.named_parameters(path, recurse=False)}
        found |= own - set(trained)
        if own and not own & set(trained):
            found |= {name for name, _ in module.named_buffers(path, recurse=False)}
    return found


def _laid_out(
    optimizer: Optimizer, trained: Mapping[str, Tensor], used: Collection[str], axes: Axes
) -> tuple[tuple[LayoutSlot, ...], Optimizer]:
    """The state tensors of the parameters that are used, and the optimizer that knows them."""
    try:
        shapes = {n: axes.shape(f"state.{n}", tensor.shape) for n, tensor in trained.items()}
        by_pack = packs(optimizer, shapes)
        chosen = {name: tensor for name, tensor in trained.items() if name in used}
        slots = lay_out(chosen, axes, {name: by_pack[name] for name in chosen})
        return slots, bound(optimizer, slots)
    except ValueError as error:
        raise ExportError(f"optimizer: {error}") from error


def lower(problem: Problem, say: Progress) -> Graphs:
    """Trace and lower the train step and the prediction; every model passes onnx.checker."""
    specs = input_specs(problem)
    say("tracing the step")
    trained: set[str] = set()
    own = {**dict(problem.model.named_buffers()), **dict(problem.model.named_parameters())}
    constant = [slot for slot in problem.slots if slot.kept and not _is_held(slot, problem)]
    held = {f"state.{slot.name}": slot.pack(own).detach() for slot in constant}
    step = record(
        lambda inputs: train_step(problem, inputs, trainable, trained),
        specs,
        problem.axes,
        problem.model,
        held,
    )
    if not trained:
        raise ExportError("the loss does not depend on any parameter")
    given = {k: v for k, v in specs.items() if k.split(".")[0] in ("state", "batch")}
    say("tracing the prediction")
    try:
        guess = record(
            lambda inputs: predict(problem, inputs, recordable),
            given,
            problem.axes,
            problem.model,
            held,
        )
    except ExportError as error:
        raise ExportError(
            f"the prediction, without gradients and in evaluation mode: {error.what}",
            operator=error.operator,
            module=error.module,
            line=error.line,
            instead=error.instead or "predict=lambda model, batch: {'name': model(batch['x'])}",
        ) from error
    judged = None
    if problem.evaluated_loss is not None:
        say("tracing the evaluation")
        judged = record(
            lambda inputs: evaluate(problem, inputs, trainable),
            given,
            problem.axes,
            problem.model,
            held,
        )
    say("lowering")
    verified = ("gradient.", "written.", "without")
    kept = [name for name in step.outputs if not name.startswith(verified)]
    gradients = [name for name in step.outputs if name.startswith(verified)]
    beside = lowered(step, [*gradients, *([WAY] if step.others else [])], name=problem.name)
    # The gate's proof does not look into branches.
    large = [] if step.others else _large_state(problem)
    parameters = [f"gradient.{each.name}" for each in large if each.kind == "parameter"]
    train = gated(
        to_onnx(step, [*kept, *parameters], name=problem.name), large, problem.optimizer.hyper()
    )
    graphs = Graphs(
        train=train.model,
        infer=to_onnx(guess, guess.outputs, name=problem.name),
        gradients=beside.model,
        evaluate=None if judged is None else to_onnx(judged, judged.outputs, name=problem.name),
        in_place=train.in_place,
        squeezed=step.squeezed(),
        ways=beside.ways,
        least=_least([step, guess, *([judged] if judged else [])]),
    )
    require_ports(
        problem.metrics,
        [name.partition(".")[2] for name in guess.outputs],
        [name.partition(".")[2] for name in _inputs(graphs.train) if name.startswith("batch.")],
    )
    for model in (graphs.train, *graphs.in_evaluation_mode.values()):
        try:
            onnx.checker.check_model(model, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise ExportError(
                f"an operator is used on a type that ONNX does not define it for ({error})",
                instead="float32 or int64 at that place (x.float(), x.long())",
            ) from error
    return graphs


def _large_state(problem: Problem) -> list[Large]:
    """Parameters that lie alone and their optimizer state, where second banks of them count."""
    slots = problem.parameter_slots
    alone = {slot.name: slot.shape for slot in slots if not slot.packed}
    tensors = [
        *((slot.name, "parameter", slot.shape, slot.name) for slot in slots),
        *((each.name, each.kind, each.shape, each.like) for each in optimizer_tensors(problem)),
    ]
    if sum(_bytes(problem, shape) for _, _, shape, _ in tensors) < LEAST_STATE_BYTES:
        return []
    return [
        Large(name, kind)
        for name, kind, shape, like in tensors
        if like in alone and shape == alone[like] and _bytes(problem, shape) >= LEAST_TENSOR_BYTES
    ]


def _bytes(problem: Problem, shape: Shape) -> int:
    """Of four bytes an element, at the example's sizes."""
    return 4 * math.prod(problem.axes.concrete(shape, problem.axes.example))


def _least(traces: Iterable[Trace]) -> dict[str, int]:
    """The least sizes with which all of these can be run."""
    found: dict[str, int] = {}
    for trace in traces:
        for axis, size in trace.check_axes().items():
            found[axis] = max(size, found.get(axis, 1))
    return found


def _inputs(model: onnx.ModelProto) -> list[str]:
    return [port.name for port in model.graph.input]


def input_specs(problem: Problem) -> dict[str, Spec]:
    """Name, dtype and named shape of everything that a train step takes."""
    specs = {f"state.{slot.name}": Spec(slot.dtype, slot.shape) for slot in problem.slots}
    for held in optimizer_tensors(problem):
        specs[f"state.{held.name}"] = Spec(held.dtype, held.shape)
    specs["state.step"] = Spec(torch.int64, ())
    for name, tensor in problem.batch.items():
        key = f"batch.{name}"
        specs[key] = Spec(tensor.dtype, problem.axes.shape(key, tensor.shape))
    for name in problem.optimizer.hyper():
        specs[f"hyper.{name}"] = Spec(torch.float32, ())
    specs["seed"] = Spec(torch.int64, ())
    return specs
