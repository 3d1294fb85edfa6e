"""Trains a new artifact side by side with torch and refuses it where the two differ.

From the same state at each step: every gradient, update, buffer, output and the loss is compared
with float64 torch, by L2 error; what float32 torch itself is off is the yardstick. A free-running
comparison would say little: rounding errors grow in deep networks whoever makes them.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import Tensor

from device_sdk.artifact.load import CheckedGraph, with_constants
from device_sdk.artifact.onnx_reader import read_onnx
from export.arguments import changed
from export.errors import ExportError
from export.in_place import BOUNDS
from export.insides import TorchDispatchMode
from export.layout import LayoutMember, LayoutSlot
from export.lowering.graph import NUMPY_DTYPE
from export.optimizers.passing import passing_over
from export.optimizers.protocol import turns
from export.rewrites.patch import seeded
from export.rounding import YARDSTICK, rounded_anew
from export.step import (
    Problem,
    apply_optimizer,
    evaluate,
    optimizer_tensors,
    predict,
    train_step,
)
from export.write import Graphs, adds_by_scatter

TOLERANCE = 1e-5

Where = tuple[int, int, Mapping[str, int]]
"""Step, threads, and sizes of the named axes."""
Function = Callable[..., dict[str, Tensor]]
"""What a graph computes, in torch: of a problem, its tensors by name, and a seed's context."""
Arrays = Mapping[str, np.ndarray]
Problems = tuple[Problem, Problem]
"""In float32 and in float64."""
_T = TypeVar("_T", np.ndarray, Arrays)


@dataclass(frozen=True)
class Results(Generic[_T]):
    """What a graph, float32 torch and float64 torch make of the same: one tensor, or several."""

    got: _T
    single: _T
    exact: _T

    def map(self, part: Callable[[_T], np.ndarray]) -> Results[np.ndarray]:
        """A part of each."""
        got = part(self.got)
        single = got if self.single is self.got else part(self.single)
        return Results(got, single, part(self.exact))


def _at(results: Results[Arrays], key: str) -> Results[np.ndarray]:
    return results.map(lambda arrays: arrays[key])


@dataclass(frozen=True)
class Comparison:
    """One tensor at one step: relative L2 errors against float64 torch."""

    tensor: str
    step: int
    threads: int
    sizes: Mapping[str, int]
    error: float
    torch_error: float

    @property
    def allowed(self) -> float:
        return max(TOLERANCE, YARDSTICK * self.torch_error)

    @property
    def excess(self) -> float:
        """Error over what is allowed; above 1 is a failure."""
        return self.error / self.allowed if np.isfinite(self.error) else float("inf")


@dataclass(frozen=True)
class Verification:
    """What verification measured.

    ``unmoved`` names the parameters whose gradient was zero in every batch (never used, behind a
    dead ReLU, a row that no index of the example batch picks): nothing is known of theirs.
    ``least``: the least sizes of axes at whose smaller ones the graphs are not torch's;
    ``least_to_train``: see :func:`least_to_train`.
    """

    comparisons: tuple[Comparison, ...]
    unmoved: tuple[str, ...] = ()
    least: Mapping[str, int] = field(default_factory=dict)
    least_to_train: Mapping[str, int] = field(default_factory=dict)

    @property
    def worst(self) -> Comparison:
        return max(self.comparisons, key=lambda c: c.excess)


def compare_members(
    slot: LayoutSlot, prefix: str, results: Results[np.ndarray], where: Where, floor: float = 0.0
) -> list[Comparison]:
    if not slot.packed:
        return [compare(prefix + slot.members[0].name, results, where, floor)]
    return [
        compare(prefix + member.name, results.map(partial(_part, member)), where, floor)
        for member in slot.members
    ]


def _part(member: LayoutMember, whole: np.ndarray) -> np.ndarray:
    return whole[member.offset : member.offset + member.elements]


def compare(
    name: str, results: Results[np.ndarray], where: Where, floor: float = 0.0
) -> Comparison:
    got, exact = results.got, results.exact
    step, threads, sizes = where
    if got.shape != exact.shape:
        what = "shape" if got.size == exact.size else "size"
        return Comparison(f"{name} ({what})", step, threads, sizes, float("inf"), 0.0)
    reference = exact.astype(np.float64, copy=False).ravel()
    scale = max(_length(reference), floor, 1e-30)

    def distance(value: np.ndarray) -> float:
        with np.errstate(invalid="ignore"):
            gap = value.astype(np.float64, copy=False).ravel() - reference
        if not np.isfinite(found := _length(gap)):
            both = np.isfinite(value.ravel()) | np.isfinite(reference)
            found = _length(np.where(both, gap, 0.0))
        return found / scale

    error = distance(got)
    torch_error = error if results.single is got else distance(results.single)
    return Comparison(name, step, threads, dict(sizes), error, torch_error)


def _length(vector: np.ndarray) -> float:
    # On this thread: numpy's norm takes all that there are, of which some may be busy.
    return math.sqrt(float(np.einsum("i,i->", vector, vector)))


# Runs a model in float64 although parts of it ask for float32.


_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, torch.Tensor) and value.dtype in _WIDER:
        return value.to(_WIDER[value.dtype])
    return value


class _Widening(TorchDispatchMode):
    """Below autograd, float32 tensors and requests for float32 become float64."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what asks torch.compile to keep out costs as much as the call itself

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = changed(_widened, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextmanager
def in_double() -> Iterator[None]:
    """Inside, all float32 arithmetic is float64: ``x.float()``, ``torch.zeros(3)``, constants.

    A model whose parameters are float64 would fail on these, or lose the digits that make it a
    reference.
    """
    default = torch.get_default_dtype()
    if default == torch.float32:
        torch.set_default_dtype(torch.float64)
    try:
        with _Widening():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(default)


# Random states and batches for verification, at more than one size of each axis.


def size_sets(problem: Problem, least: Mapping[str, int]) -> list[dict[str, int]]:
    """The example's sizes, and others: smaller batches, larger parameters (indices stay valid)."""
    example = dict(problem.axes.example)
    of_state = {s for slot in problem.slots for s in slot.shape if isinstance(s, str)}
    other = {
        axis: size + 3 if axis in of_state or size < 4 else max(size // 2 + 1, least.get(axis, 1))
        for axis, size in example.items()
    }
    return [example, other] if example else [{}]


def initial_state(
    problem: Problem, sizes: Mapping[str, int], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    tensors = {
        name: tensor.detach()
        for source in (problem.model.named_parameters(), problem.model.named_buffers())
        for name, tensor in source
    }
    state: dict[str, np.ndarray] = {}
    for slot in problem.slots:
        values = {
            m.name: torch.from_numpy(
                _resized(tensors[m.name].numpy(), problem.axes.concrete(m.shape, sizes), rng)
            )
            for m in slot.members
        }
        state[f"state.{slot.name}"] = np.array(slot.pack(values).numpy())
    for held in optimizer_tensors(problem):
        shape = problem.axes.concrete(held.shape, sizes)
        state[f"state.{held.name}"] = np.zeros(shape, dtype=NUMPY_DTYPE[held.dtype])
    state["state.step"] = np.zeros((), dtype=np.int64)
    return state


def _resized(array: np.ndarray, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Slices of ``array`` drawn anew along each axis whose length changes."""
    for axis, size in enumerate(shape):
        if array.shape[axis] != size:
            array = array.take(_rows(array.shape[axis], size, rng), axis=axis)
    return np.array(array)


def draw_batch(
    problem: Problem, sizes: Mapping[str, int], rng: np.random.Generator, *, in_order: bool
) -> dict[str, np.ndarray]:
    """Rows of the example batch, the same rows in every entry of one axis.

    Drawn anew, or, with ``in_order``, the first ones as they stand, from the start again where
    they do not suffice. Rows that say where others begin (offsets, positions, a graph's number)
    keep their order in any case.
    """
    positional = _positional(problem)
    rows = {
        axis: np.arange(size) % problem.axes.example[axis]
        if in_order or axis in positional
        else _rows(problem.axes.example[axis], size, rng)
        for axis, size in sizes.items()
    }
    batch: dict[str, np.ndarray] = {}
    for name, tensor in problem.batch.items():
        array = tensor.detach().cpu().numpy()
        for dim, axis in problem.axes.of.get(f"batch.{name}", {}).items():
            array = array.take(rows[axis], axis=dim)
        batch[f"batch.{name}"] = np.array(array)
    return batch


def _positional(problem: Problem) -> set[str]:
    """The axes along which whole numbers of the example rise from 0 and never fall."""
    found = set()
    for name, tensor in problem.batch.items():
        array = tensor.detach().cpu().numpy()
        for dim, axis in problem.axes.of.get(f"batch.{name}", {}).items():
            if array.dtype.kind == "i" and array.shape[dim] > 2:
                rising = (np.diff(array, axis=dim) >= 0).all() and array.max() > 0
                if rising and not array.take(0, axis=dim).any():
                    found.add(axis)
    return found


def _rows(available: int, wanted: int, rng: np.random.Generator) -> np.ndarray:
    """Row numbers in random order, each as rarely as possible: a batch of one row many times has
    no variance, and its gradients are rounding."""
    repeats = -(-wanted // available)
    shuffled = [rng.permutation(available) for _ in range(repeats)]
    return np.concatenate(shuffled)[:wanted]


def draw_scalars(problem: Problem, rng: np.random.Generator) -> dict[str, np.ndarray]:
    hyper = {
        f"hyper.{name}": np.array(value, dtype=np.float32)
        for name, value in problem.optimizer.hyper().items()
    }
    return {**hyper, "seed": np.array(rng.integers(2**31), dtype=np.int64)}


os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


STEPS = 3
# So many sizes are tried one by one before the example's is the least.
LARGEST_SMALL = 8
# A step may refuse some rows: of a few draws one has to be taken.
SMALL_DRAWS = 8
# Each draw moves by more than the one before, at last by 3e-6: so far do a deep network's own
# rounding errors carry an activation.
ROUNDING, ROUNDING_GROWTH = 3e-7, 1.4
ROUNDING_DRAWS = 8
FLOOR = 1e-7
"""Of all gradients' length: what is below is rounding."""
SOUGHT = 32
"""So many batches are drawn to see every way that a step's branches can take."""


@dataclass(frozen=True)
class _Opened:
    """The sessions of one number of threads."""

    train: ort.InferenceSession
    gradients: ort.InferenceSession
    evaluating: Mapping[str, ort.InferenceSession]

    def step(self, inputs: Arrays) -> dict[str, np.ndarray]:
        return {**run_graph(self.train, inputs), **run_graph(self.gradients, inputs)}


def verify_artifact(problem: Problem, graphs: Graphs, say: Callable[[str], None]) -> Verification:
    """Compare the graphs with torch on random batches; raise ExportError where they differ.

    Batches are rows of the example batch drawn anew, at two sizes of each named axis; where torch
    cannot take these, they are its rows as they stand. At the first sizes there are also steps at
    which the optimizer does something new (an accumulated step, a schedule's end).
    Each axis is tried at its least size, too: torch records as of sizes from 2 on. Batches are
    sought that take each of the step's ways, and a warning names answers that none gave. ``say`` is
    told of the progress.
    """
    least, ways = graphs.least, graphs.ways
    rng, shaking = np.random.default_rng(0).spawn(2)
    counts = (1,) if adds_by_scatter(graphs.train) else (1, 2)
    # As devices have it. With one thread, too, where there is but one; else as inputs there.
    frozen = _frozen_state(problem)
    say("verifying: opening sessions")
    sessions = {
        threads: _Opened(
            open_session(graphs.train, threads, inside),
            open_session(graphs.gradients, threads, inside),
            {
                name: open_session(model, threads, inside)
                for name, model in graphs.in_evaluation_mode.items()
            },
        )
        for threads in counts
        for inside in ([frozen if threads == counts[-1] else {}])
    }
    beside = _Beside((problem, _in_double(problem)), sessions, rng, shaking)
    usual = range(STEPS)
    later = sorted(turns(problem.optimizer).difference(usual))
    every: list[tuple[dict[str, int], Sequence[int]]] = [
        (sizes, usual) for sizes in size_sets(problem, least)
    ]
    every[0] = (every[0][0], (*usual, *later))
    total, done = sum(len(numbers) for _, numbers in every), 0
    for index, (sizes, numbers) in enumerate(every):
        state = initial_state(problem, sizes, rng)
        try:
            for step in numbers:
                done += 1
                say(f"verifying: step {done} of {total}")
                state["state.step"] = np.array(step)
                inputs, state = beside.step(state, sizes, step)
            beside.evaluate(inputs, sizes, STEPS)
        except _Unfit as unfit:
            # Rows that depend on each other are compared at the sizes that the author gave.
            if index == 0:
                raise unfit.error from unfit.error.__cause__
    if len(ways) > 1:
        say("verifying: the ways of its branches")
        beside.seek(every[0][0], ways)
        _say_unseen(ways, beside.ways)
    for few in graphs.squeezed:
        _check_squeezed(beside, {**problem.axes.example, **few}, few)
    members = (member.name for slot in problem.parameter_slots for member in slot.members)
    still = (name for name in members if name not in beside.moved)
    unmoved = (*still, *problem.unused)
    report = Verification(tuple(beside.found), unmoved)
    worst = report.worst
    if worst.excess > 1:
        raise ExportError(
            f"the graph differs from torch: {worst.tensor} is off by {worst.error:.2e} (relative "
            f"L2 error against float64; float32 torch: {worst.torch_error:.2e}, allowed: "
            f"{worst.allowed:.2e}) at step {worst.step} with {worst.threads} thread(s) and "
            f"{dict(worst.sizes)}",
            instead="please report this model; verify=False would hide a wrong graph",
        )
    say("verifying: least sizes")
    found = {axis: beside.least(axis, least.get(axis, 1)) for axis in problem.axes.example}
    larger = {axis: size for axis, size in found.items() if size > least.get(axis, 1)}
    step = sessions[1].train
    return replace(
        report, least=larger, least_to_train=least_to_train(problem, step, {**least, **larger})
    )


def least_to_train(
    problem: Problem, train: ort.InferenceSession, least: Mapping[str, int], *, seed: int = 0
) -> dict[str, int]:
    """The least sizes of axes at which a step on rows of the example batch is finite, where those
    are above ``least``: of one row there is no variance, and nothing to contrast with.

    An axis of which no small size is has none: it is another's that is not.
    """
    rng, found = np.random.default_rng(seed), {}
    for axis, example in problem.axes.example.items():
        first = least.get(axis, 1)
        for size in range(first, min(first + LARGEST_SMALL, example) + 1):
            if _trains(problem, train, {**problem.axes.example, axis: size}, rng):
                if size > first:
                    found[axis] = size
                break
    return found


def _trains(
    problem: Problem,
    train: ort.InferenceSession,
    sizes: Mapping[str, int],
    rng: np.random.Generator,
) -> bool:
    state = initial_state(problem, sizes, rng)
    for draw in range(SMALL_DRAWS):
        batch = draw_batch(problem, sizes, rng, in_order=draw == 0)
        try:
            got = run_graph(train, {**state, **batch, **draw_scalars(problem, rng)}, quietly=True)
        except ExportError:
            continue
        if np.isfinite(got["loss"]) and np.isfinite(got["guard"]):
            return True
    return False


def _say_unseen(ways: Mapping[int, Sequence[str]], seen: Collection[int]) -> None:
    """Warn of answers that no step gave."""
    given = {answer for number in seen if number in ways for answer in ways[number]}
    never = {answer: None for answers in ways.values() for answer in answers if answer not in given}
    if never:
        warnings.warn(
            f"verification saw no step in which {', nor one in which '.join(never)}: that way is "
            "not compared with torch. An example batch would do whose rows take each way",
            stacklevel=4,
        )


def _check_squeezed(beside: _Beside, sizes: dict[str, int], few: Mapping[str, int]) -> None:
    """Refuse a ``squeeze()`` that makes torch compute something else at these sizes.

    Where torch fails there, the graph, which goes on, does what was meant at every other size.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            differs = beside.differs(sizes)
    except _Unfit:
        return
    if differs:
        (axis,) = few
        raise ExportError(
            f"squeeze() drops axis {axis!r} where it makes a size of 1 (at {few[axis]}), and torch "
            f"then computes something else ({differs}); the exported step keeps the axis",
            operator="squeeze",
            instead="squeeze(-1), or whichever axis is meant",
        )


class _Unfit(Exception):
    """torch fails on a batch, or computes nothing finite from it."""

    def __init__(self, error: ExportError) -> None:
        super().__init__(str(error))
        self.error = error


class _Beside:
    """Graphs and torch side by side: what was compared so far, and what moved."""

    def __init__(
        self,
        problems: Problems,
        sessions: Mapping[int, _Opened],
        rng: np.random.Generator,
        shaking: np.random.Generator,
    ) -> None:
        self._problem = problems[0]
        self._problems = problems
        self._sessions = sessions
        self._rng = rng
        self._shaking = shaking
        self._in_order = False
        self.found: list[Comparison] = []
        self.moved: set[str] = set()
        self.ways: set[int] = set()

    def step(
        self, state: Arrays, sizes: Mapping[str, int], step: int
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Compare one step from ``state``: its inputs, and the state after it."""
        inputs, results = self._taken(state, sizes)
        self._compare(inputs, results, (step, 1, sizes))
        new = {
            name: results.got.get("new." + name.removeprefix("state."), value)
            for name, value in state.items()
        }
        return inputs, new

    def _compare(
        self,
        inputs: Arrays,
        results: Results[Arrays],
        where: Where,
        floor: float = FLOOR,
    ) -> None:
        step, _, sizes = where
        first = results.got
        self.moved |= _moved(self._problem, results.exact)
        self.ways |= _way(first)
        yardstick = _Yardstick(self._problems, inputs, results.exact, self._shaking)
        these: list[Comparison] = []
        for count, opened in self._sessions.items():
            got = opened.step(inputs) if these else first
            if these and _identical(got, first):
                these = [replace(comparison, threads=count) for comparison in these]
            else:
                beside, where = replace(results, got=got), (step, count, sizes)
                these = yardstick.allow(_compare(self._problems, inputs, beside, where, floor))
            self.found += these

    def seek(self, sizes: Mapping[str, int], ways: Collection[int]) -> None:
        """Compare steps that take ways which none took so far, where such are found.

        On unusual batches (no variance) more of a gradient is rounding.
        """
        opened = next(iter(self._sessions.values()))
        slots = self._problem.slots
        counts = [f"state.{slot.name}" for slot in slots if not slot.dtype.is_floating_point]
        for number in range(SOUGHT):
            if self.ways >= set(ways):
                return
            state = initial_state(self._problem, sizes, self._rng)
            batch = draw_batch(self._problem, sizes, self._rng, in_order=self._in_order)
            inputs = {**state, **batch, **draw_scalars(self._problem, self._rng)}
            inputs = _unusual(inputs, number, self._rng, counts)
            try:
                if _way(run_graph(opened.gradients, inputs, quietly=True)) <= self.ways:
                    continue
                results = self._done(inputs, sizes)
            except (_Unfit, ExportError):
                continue
            self._compare(inputs, results, (0, 1, sizes), floor=1e-3)

    def _done(self, inputs: Arrays, sizes: Mapping[str, int]) -> Results[Arrays]:
        opened = next(iter(self._sessions.values()))
        try:
            single, exact = (_finite(_reference(each, inputs), sizes) for each in self._problems)
        except _Unfit:
            with suppress(ExportError):  # both refuse a way in which the code raises
                self._refused(opened.step(inputs))
            raise
        first = opened.step(inputs)
        if self._refused(first):
            raise _Unfit(
                ExportError(
                    "the step refuses rows of the example batch: with them it takes a way in which "
                    "parameters that it trains otherwise have no gradient, or that raises",
                    instead="a term of weight 0 (0 * prediction.sum()) in the way without a "
                    "gradient, or an example batch that takes another",
                )
            )
        return Results(first, single, exact)

    def _refused(self, got: Arrays) -> bool:
        """Whether a step took a way that a device refuses, which counts as seen."""
        refused = bool(_way(got)) and not np.isfinite(got["guard"])
        self.ways |= _way(got) if refused else set()
        return refused

    def differs(self, sizes: dict[str, int]) -> str:
        """The first tensor of a step at these sizes that differs from torch's, "" if none does.

        An output's own shape does not count.
        """
        return self._wrong(
            lambda: self.step(initial_state(self._problem, sizes, self._rng), sizes, 0)
        )

    def least(self, axis: str, size: int) -> int:
        """The first size of an axis, from this one on, at which nothing differs from torch."""
        example = self._problem.axes.example
        for length in range(size, min(size + LARGEST_SMALL, example[axis])):
            if self._fits({**example, axis: length}):
                return length
        return example[axis]

    def _fits(self, sizes: dict[str, int]) -> bool:
        """Whether nothing differs of what torch takes at these sizes, in either mode."""
        state = initial_state(self._problem, sizes, self._rng)
        batch = draw_batch(self._problem, sizes, self._rng, in_order=True)
        for compared in (
            lambda: self.step(state, sizes, 0),
            lambda: self.evaluate({**state, **batch}, sizes, 0),
        ):
            with suppress(_Unfit), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if self._wrong(compared):
                    return False
        return True

    def _wrong(self, compared: Callable[[], object]) -> str:
        """What differs in one comparison, which is not kept."""
        before = len(self.found)
        try:
            compared()
        except ExportError:
            return "the step fails"
        finally:
            these, self.found = self.found[before:], self.found[:before]
        wrong = (c.tensor for c in these if c.excess > 1 and not c.tensor.endswith("(shape)"))
        return next(wrong, "")

    def _taken(
        self, state: Arrays, sizes: Mapping[str, int]
    ) -> tuple[dict[str, np.ndarray], Results[Arrays]]:
        """A batch that torch and the graph can take, with what both and float64 torch make of it.

        Raises _Unfit where torch takes none, ExportError where only the graph fails.
        """
        scalars = draw_scalars(self._problem, self._rng)
        for in_order in (False, True) if not self._in_order else (True,):
            batch = draw_batch(self._problem, sizes, self._rng, in_order=in_order)
            inputs = {**state, **batch, **scalars}
            try:
                return inputs, self._done(inputs, sizes)
            except (_Unfit, ExportError):
                if in_order:
                    raise
                self._in_order = True
        raise AssertionError("one of the ways was tried")

    def evaluate(self, inputs: Arrays, sizes: Mapping[str, int], steps: int) -> None:
        """Compare the graphs in evaluation mode, after the last step."""
        for name in next(iter(self._sessions.values())).evaluating:
            what, function = _EVALUATING[name]
            single, exact = (_computed(each, inputs, function) for each in self._problems)
            yardstick = _Yardstick(self._problems, inputs, exact, self._shaking, function)
            for count, opened in self._sessions.items():
                results: Results[Arrays] = Results(
                    run_graph(opened.evaluating[name], inputs), single, exact
                )
                where = (steps, count, sizes)
                these = [compare(key, _at(results, key), where) for key in results.got]
                self.found += [
                    replace(comparison, tensor=f"{what} {comparison.tensor}")
                    for comparison in yardstick.allow(these)
                ]


def _way(got: Arrays) -> set[int]:
    """The way that a step took; none of a step that has but one."""
    return {int(got["way"])} if "way" in got else set()


def _unusual(
    inputs: Arrays,
    number: int,
    rng: np.random.Generator,
    counts: Collection[str],
) -> dict[str, np.ndarray]:
    """A step's inputs made such as may take another way, at every second ``number``.

    ``counts`` and places that the model holds are moved, and one entry of the batch is all zeros
    or of the other sign.
    """
    changed = dict(inputs)
    if number % 2 == 0:
        return changed
    entries = [n for n, a in inputs.items() if n.startswith("batch.") and a.dtype == np.float32]
    for name in rng.permutation(entries)[:1]:
        changed[name] = np.array(inputs[name] * np.float32((0, -1)[number // 2 % 2]))
    for name, array in ((name, inputs[name]) for name in counts):
        changed[name] = np.array(array + rng.integers(0, 2 + number, array.shape))
    return changed


def _identical(got: Arrays, first: Arrays) -> bool:
    return all(got[name].tobytes() == array.tobytes() for name, array in first.items())


def _finite(exact: dict[str, np.ndarray], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    for name, value in exact.items():
        if (name == "loss" or name.startswith("gradient.")) and not np.isfinite(value).all():
            raise _Unfit(
                ExportError(
                    f"torch itself computes a {name.split('.')[0]} that is not finite on rows of "
                    f"the example batch (sizes {dict(sizes)}), so that nothing can be compared",
                    instead="an example batch of ordinary values; a loss that is defined for every "
                    "batch (no softmax over a row that is masked throughout, no root or logarithm "
                    "of 0)",
                )
            )
    return exact


def _moved(problem: Problem, exact: Arrays) -> set[str]:
    """The parameters with a gradient other than zero."""
    return {
        member.name
        for slot in problem.parameter_slots
        for member in slot.members
        if np.any(
            _part(member, exact[f"gradient.{slot.name}"])
            if slot.packed
            else exact[f"gradient.{slot.name}"]
        )
    }


def _in_double(problem: Problem) -> Problem:
    slots = tuple(
        replace(slot, dtype=torch.float64) if slot.dtype == torch.float32 else slot
        for slot in problem.slots
    )
    return replace(problem, slots=slots)


def _frozen_state(problem: Problem) -> dict[str, np.ndarray]:
    """The frozen state that is the same at every size, by the names of the graphs' inputs."""
    state = initial_state(problem, problem.axes.example, np.random.default_rng(0))
    fixed = [slot for slot in problem.slots if not any(isinstance(n, str) for n in slot.shape)]
    return {f"state.{slot.name}": state[f"state.{slot.name}"] for slot in fixed if slot.frozen}


def open_session(
    model: onnx.ModelProto, threads: int, constants: Arrays | None = None
) -> ort.InferenceSession:
    """A session on the CPU; ExportError where onnxruntime cannot run the graph.

    ``constants``: values of inputs that the session holds itself.
    """
    data = model.SerializeToString()
    given = {port.name for port in model.graph.input}
    inside = {name: array for name, array in (constants or {}).items() if name in given}
    external: Mapping[str, bytes] = {}
    if inside:
        graph = with_constants(CheckedGraph(data, {}, read_onnx(data)), inside)
        data, external = graph.onnx, graph.external
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # As on a device: opening a large graph takes a fraction of the time, and each is run seldom.
    options.enable_mem_reuse = False
    options.enable_mem_pattern = False
    # What fails is raised.
    options.log_severity_level = 4
    try:
        if external:
            options.add_external_initializers_from_files_in_memory(
                list(external), list(external.values()), list(map(len, external.values()))
            )
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions have no common base
        raise ExportError(
            f"onnxruntime cannot run this graph ({error})",
            instead="float32 or int64 in place of rarer types (x.float(), x.long())",
        ) from error


def run_graph(
    session: ort.InferenceSession, inputs: Arrays, *, quietly: bool = False
) -> dict[str, np.ndarray]:
    """The graph's outputs; ``quietly``: onnxruntime's own log says nothing where it fails."""
    options = ort.RunOptions()
    options.log_severity_level = 4 if quietly else 3
    needed = {
        # Of a state that comes from nowhere nothing is known.
        port.name: np.full(port.shape, np.inf, np.float32)
        if port.name == BOUNDS
        else inputs[port.name]
        for port in session.get_inputs()
    }
    names = [port.name for port in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, needed, options), strict=True))
    except Exception as error:  # as in open_session
        raise ExportError(
            f"onnxruntime fails on rows of the example batch, which torch takes ({error})",
            instead="please report this model; an example batch whose rows do not depend on each "
            "other may help",
        ) from error


def _tensors(problem: Problem, inputs: Arrays) -> dict[str, Tensor]:
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in inputs.items()}
    if problem.parameter_slots[0].dtype != torch.float64:
        return tensors
    return {n: t.double() if t.dtype == torch.float32 else t for n, t in tensors.items()}


def _arithmetic(problem: Problem) -> AbstractContextManager[None]:
    return in_double() if problem.parameter_slots[0].dtype == torch.float64 else nullcontext()


def _computed(problem: Problem, inputs: Arrays, function: Function) -> dict[str, np.ndarray]:
    """What torch makes of the inputs; _Unfit where it fails."""
    try:
        with _arithmetic(problem):
            results = function(problem, _tensors(problem, inputs), seeded)
    except ExportError as error:
        raise _Unfit(error) from error
    except Exception as error:  # whatever the author's code raises
        first = (str(error).strip().splitlines() or [""])[0]
        raise _Unfit(
            ExportError(
                f"torch itself fails on rows of the example batch: {type(error).__name__}: {first}",
                instead="an example batch on which the loss and predict= can be called, also with "
                "their modules in training and in evaluation mode and in float64",
            )
        ) from error
    return {name: value.detach().numpy() for name, value in results.items()}


def _reference(problem: Problem, inputs: Arrays) -> dict[str, np.ndarray]:
    return _computed(problem, inputs, train_step)


def _compare(
    problems: Problems, inputs: Arrays, results: Results[Arrays], where: Where, floor: float
) -> list[Comparison]:
    problem, got, exact = problems[0], results.got, results.exact
    found: list[Comparison] = []
    # Below this a gradient is rounding only (that of a bias before batch norm is 0 in truth).
    total = sum(float(np.sum(exact[f"gradient.{s.name}"] ** 2)) for s in problem.parameter_slots)
    floor *= total**0.5
    for slot in problem.parameter_slots:
        mine = _at(results, f"gradient.{slot.name}")
        found += compare_members(slot, "gradient of ", mine, where, floor)
    # The optimizer on its own: from the graph's gradients, since a rounding error in a gradient
    # near zero may turn an adaptive step around.
    given = [got[f"gradient.{slot.name}"] for slot in problem.parameter_slots]
    slots = {slot.name: slot for slot in problem.slots}
    for name in (slot.name for slot in problem.parameter_slots if f"written.{slot.name}" in got):
        key = f"written.{name}"
        found += compare_members(slots[name], key + " of ", _at(results, key), where)
        inputs = {**inputs, f"state.{name}": got[key]}
    flags = zip(problem.over, exact.get("without", ()), strict=True)
    with passing_over([name for names, over in flags if over for name in names]):
        update32, update64 = (_update(each, inputs, given) for each in problems)
    shared = {held.name for held in optimizer_tensors(problem) if held.like is None}
    for name, expected in update64.items():
        # What all parameters share (a rate, a norm) is a sum over many elements: where it hardly
        # changes, the change is rounding only, so its value is compared.
        before = inputs[f"state.{name}"]
        start = np.zeros_like(before) if name in shared else before
        reached = Results(got[f"new.{name}"], update32[name], expected)
        moved = reached.map(partial(_since, start))
        if name in slots:
            found += compare_members(slots[name], "update of ", moved, where)
        else:
            found.append(compare(name, moved, where))
    for slot in problem.slots:
        if slot.kind == "buffer" and not slot.kept:
            key = f"new.{slot.name}"
            # A mean whose true value is 0 (batch norm behind batch norm) is rounding only.
            floor = 0.01 * float(np.sqrt(np.mean(np.square(exact[key], dtype=np.float64))))
            found += compare_members(slot, "buffer ", _at(results, key), where, floor)
    for key in got:
        if key == "loss" or key.startswith("output."):
            found.append(compare(key, _at(results, key), where))
    finite = all(np.isfinite(got[k]).all() for k in got if k.startswith("new."))
    if bool(np.isfinite(got["guard"])) != finite:
        found.append(Comparison("guard", where[0], where[1], where[2], float("inf"), 0.0))
    return found


def _since(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    moved: np.ndarray = after - before
    return moved


class _Yardstick:
    """What changes of a rounding error's size do to one step of torch.

    Where an input of a ReLU or a maximum is within rounding of its kink, float32 torch may happen
    to fall on float64's side and the graph on the other; and in an ill-conditioned step one run
    of float32 torch may happen to be close. Torch in both precisions, with parameters and inputs
    moved by a few rounding errors, shows how much either is worth. Drawn only as long as some
    tensor needs it.
    """

    def __init__(
        self,
        problems: Problems,
        inputs: Arrays,
        exact: Arrays,
        rng: np.random.Generator,
        function: Function = train_step,
    ) -> None:
        self._problems = problems
        self._inputs, self._exact = inputs, exact
        self._function = function
        self._rng = rng
        self._worst: dict[str, float] = {}
        self._draws = self._drawn()

    def allow(self, found: list[Comparison]) -> list[Comparison]:
        """The comparisons with this fairer yardstick."""
        while True:
            found = [
                replace(c, torch_error=max(c.torch_error, self._worst.get(c.tensor, 0.0)))
                for c in found
            ]
            if all(c.excess <= 1 for c in found) or next(self._draws, None) is None:
                return found

    def _drawn(self) -> Iterator[bool]:
        for draw in range(ROUNDING_DRAWS):
            size = ROUNDING * ROUNDING_GROWTH**draw
            moved = _moved_by_rounding(self._problems[0], self._inputs, self._rng, size)
            for problem in self._problems:
                try:
                    with rounded_anew(self._rng):
                        shaken = _computed(problem, moved, self._function)
                except _Unfit:
                    continue
                for tensor, error in _distances(self._problems[1], shaken, self._exact):
                    if np.isfinite(error):
                        self._worst[tensor] = max(self._worst.get(tensor, 0.0), error)
                yield True


def _moved_by_rounding(
    problem: Problem, inputs: Arrays, rng: np.random.Generator, size: float
) -> dict[str, np.ndarray]:
    """The inputs with parameters, and what is continuous in batch and buffers, moved by ``size``.

    A whole number may be a label, an identity or a mask, and stays; a fraction stays within what
    its tensor holds (a probability of at most 1).
    """
    moved = dict(inputs)
    parameters = {f"state.{slot.name}" for slot in problem.parameter_slots}
    continuous = parameters | {f"state.{slot.name}" for slot in problem.slots}
    for name, array in inputs.items():
        if array.dtype != np.float32 or not (name in continuous or name.startswith("batch.")):
            continue
        factor = (1 + size * rng.standard_normal(array.shape)).astype(np.float32)
        moved[name] = array * factor
        if name not in parameters and array.size:
            with np.errstate(invalid="ignore"):
                near = np.clip(moved[name], array.min(), array.max())
            moved[name] = np.where(array == np.rint(array), array, near)
    return moved


def _distances(double: Problem, shaken: Arrays, exact: Arrays) -> Iterator[tuple[str, float]]:
    """How far each gradient, buffer and output is from where it was."""
    nowhere: Where = (0, 0, {})
    for slot in double.slots:
        parameter = slot.kind == "parameter"
        name = f"gradient.{slot.name}" if parameter else f"new.{slot.name}"
        if name in exact:
            kind = "gradient of " if parameter else "buffer "
            near = Results(shaken[name], shaken[name], exact[name])
            for comparison in compare_members(slot, kind, near, nowhere):
                yield comparison.tensor, comparison.error
    for name in exact:
        if name == "loss" or name.startswith("output."):
            near = Results(shaken[name], shaken[name], exact[name])
            yield name, compare(name, near, nowhere).error


def _update(problem: Problem, inputs: Arrays, gradients: list[np.ndarray]) -> dict[str, np.ndarray]:
    needed = {n: a for n, a in inputs.items() if n.startswith(("state.", "hyper."))}
    tensors = _tensors(problem, needed)
    dtype = problem.parameter_slots[0].dtype
    given = [torch.from_numpy(np.array(g)).to(dtype) for g in gradients]
    with torch.no_grad(), _arithmetic(problem):
        new = apply_optimizer(problem, tensors, given)
    return {name: value.numpy() for name, value in new.items()}


_EVALUATING = {"infer": ("prediction", predict), "evaluate": ("evaluation", evaluate)}


def run_on_example(problem: Problem, graph: onnx.ModelProto) -> dict[str, np.ndarray]:
    """What a graph in evaluation mode gives for the example batch, from the initial state."""
    state = initial_state(problem, problem.axes.example, np.random.default_rng(0))
    batch = {f"batch.{name}": tensor.numpy() for name, tensor in problem.batch.items()}
    return run_graph(open_session(graph, threads=1), {**state, **batch})
