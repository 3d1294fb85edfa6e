"""A random train step exported, and trained on the device runtime beside torch.

As in :mod:`benchmarks.export_survey.compare`: torch, in float32 and in float64, starts each step
from the artifact's state, and what float32 torch is off is the yardstick.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import torch
from torch import Tensor

import export
from device_sdk import Trainer
from device_sdk.errors import DeviceError
from device_sdk.runtime.step import step_seed
from export.rewrites.patch import seeded
from export.rewrites.randomness import Randomness
from export.verify import in_double
from tests.fuzz.train_steps.programs import OPTIMIZERS, Program

STEPS = 3
LEAST_ALLOWED = 2e-4
"""Relative error."""
LEAST_SCALE = 1e-2
"""What is smaller counts as this large."""
TIMES_TORCH = 20.0
ILL_CONDITIONED = 1e-3
"""The relative error of float32 torch at which a step says nothing: a jump, or a tie."""
SHAKES = 6
ROUNDING = 3e-7
LEAST_GRADIENT = 1e-5
"""What is smaller may be rounding only, of which an adaptive optimizer makes a whole step."""
INVALID = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, TypeError)
"""What lies behind a refusal for which no program is to blame: the exporter's node is invalid."""

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """How a program went, why, and the line of it that was refused.

    kind: "right"; "refused" (ExportError); "discarded" (torch fails, or says nothing); "wrong";
    "crashed" (another error of the exporter, an invalid graph, or any error of the device at the
    example's sizes).
    """

    kind: str
    reason: str = ""
    detail: str = ""
    line: str = ""

    @property
    def found(self) -> bool:
        return self.kind in ("wrong", "crashed")


class _Discarded(Exception):
    """torch fails at a step, or its precision decides it."""


class _Twin:
    """The same train step in torch."""

    def __init__(self, program: Program, double: bool) -> None:
        self._double = double
        self.model = program.model().double() if double else program.model()
        self.optimizer = OPTIMIZERS[program.optimizer](self.model.parameters())

    @property
    def state(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def step(self, state: Arrays, batch: Mapping[str, Tensor], number: int) -> Arrays:
        """The loss, the outputs, and what was added to parameters and buffers."""
        self._begin(state, training=True)
        self.optimizer.zero_grad()
        randomness = Randomness(torch.tensor(step_seed(0, number)), torch.tensor(number))
        with in_double() if self._double else nullcontext():
            with seeded(randomness):
                loss, outputs = self.model(self._of_this_precision(batch))
                loss.backward()
            # Before the optimizer moves what they may be views of.
            found = {"loss": _array(loss), **{n: _array(t) for n, t in outputs.items()}}
            self.optimizer.step()
        return {**found, **_moved(state, {n: _array(t) for n, t in self.state.items()})}

    def predict(self, state: Arrays, batch: Mapping[str, Tensor]) -> Arrays:
        self._begin(state, training=False)
        with in_double() if self._double else nullcontext(), torch.no_grad():
            loss, outputs = self.model(self._of_this_precision(batch))
        return {n: _array(t) for n, t in (outputs or {"loss": loss}).items()}

    def _begin(self, state: Arrays, training: bool) -> None:
        for name, tensor in self.state.items():
            tensor.data.copy_(torch.from_numpy(state[name]))
        self.model.train(training)

    def _of_this_precision(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        wide = self._double
        return {
            n: t.double() if wide and t.is_floating_point() else t.clone() for n, t in batch.items()
        }


def _array(tensor: Tensor) -> np.ndarray:
    return np.array(tensor.detach().numpy(), dtype=np.float64)


def _moved(before: Arrays, after: Mapping[str, np.ndarray]) -> Arrays:
    pairs = ((name, np.asarray(after[name], np.float64), before[name]) for name in before)
    return {name: end - np.asarray(start, np.float64) for name, end, start in pairs}


def _error(got: np.ndarray, exact: np.ndarray) -> float:
    if got.shape != exact.shape:
        return float("inf")
    error = float(np.linalg.norm(got - exact)) / max(float(np.linalg.norm(exact)), LEAST_SCALE)
    return error if np.isfinite(error) else float("inf")


def tried(program: Program) -> Outcome:
    """Export a program, and train it beside torch at the example's sizes and others."""
    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            state = {n: np.array(t.detach()) for n, t in _Twin(program, double=False).state.items()}
            _settled(program, state, program.batch(program.free), 0)
        except _Discarded as discarded:
            return Outcome("discarded", str(discarded))
        return _exported(program, Path(folder) / "artifact")


def _settled(program: Program, state: Arrays, batch: Mapping[str, Tensor], number: int) -> None:
    """Raise _Discarded unless torch computes about the same in both precisions."""
    single, exact = _Twin(program, double=False), _Twin(program, double=True)
    try:
        got, reference = single.step(state, batch, number), exact.step(state, batch, number)
    except Exception as error:
        raise _Discarded(f"torch raises {type(error).__name__}") from error
    if not any(p.grad is not None for p in exact.model.parameters()):
        raise _Discarded("no gradient")
    if not all(np.isfinite(array).all() for array in (*got.values(), *reference.values())):
        raise _Discarded("not finite")
    if any(_error(got[name], reference[name]) > ILL_CONDITIONED for name in reference):
        raise _Discarded("ill-conditioned")


def refused_by_verification(program: Program) -> bool:
    """Whether the exporter by itself finds that a program does not train as torch's."""
    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            _export(program, Path(folder) / "artifact", verify=True)
        except Exception:
            return True
        return False


def _export(program: Program, folder: Path, verify: bool) -> None:
    model = program.model()
    export.train_step(
        model,
        lambda model, batch: model(batch),
        program.batch(program.free),
        optimizer=OPTIMIZERS[program.optimizer](model.parameters()),
        dynamic=program.dynamic,
        directory=folder,
        verify=verify,
    )


def _exported(program: Program, folder: Path) -> Outcome:
    try:
        _export(program, folder, verify=False)
    except export.ExportError as error:
        kind = "crashed" if isinstance(error.__cause__, INVALID) else "refused"
        return Outcome(kind, f"{_general(error.what)} {error.operator}", str(error), error.line)
    except Exception as error:
        return Outcome("crashed", _general(repr(error)), repr(error))
    others = [
        {name: size + 2 for name, size in program.free.items()},
        dict.fromkeys(program.free, 1),
    ]
    found = _trained(program, folder, dict(program.free), example=True)
    for sizes in others if program.free else ():
        if not found.found:
            found = _trained(program, folder, sizes, example=False)
    return found


def _general(text: str) -> str:
    return re.sub(r"\d+|'[^']*'|\[[^]]*\]", "_", text.strip().splitlines()[0])[:120]


def _trained(program: Program, folder: Path, sizes: dict[str, int], example: bool) -> Outcome:
    trainer = Trainer(folder, providers="cpu", threads=1, seed=0)
    single, exact = _Twin(program, double=False), _Twin(program, double=True)
    initial = {n: np.array(t.detach()) for n, t in single.state.items()}
    rng = np.random.default_rng(0)
    worth: dict[str, float] = {}
    rounding: dict[str, np.ndarray] = {}
    for number in range(STEPS):
        where = f"step {number} at {sizes}"
        # What no graph holds (it is never read) stays as it is.
        state = {**initial, **trainer.parameters, **trainer.buffers}
        batch = program.batch(sizes, number)
        arrays = {name: tensor.numpy() for name, tensor in batch.items()}
        memory = copy.deepcopy(single.optimizer.state_dict())
        try:
            _settled(program, state, batch, number)
        except _Discarded:
            return Outcome("right")
        reference, near = exact.step(state, batch, number), single.step(state, batch, number)
        try:
            loss = trainer.step(arrays)
        except DeviceError as error:
            # It may refuse sizes that the traced step does not hold for.
            kind = "crashed" if example else "right"
            return Outcome(kind, _general(repr(error)), f"{where}: {error!r}")
        after = {**state, **trainer.parameters, **trainer.buffers}
        got = {"loss": np.array(loss, np.float64), **trainer.outputs, **_moved(state, after)}
        if program.optimizer not in ("SGD", "momentum"):
            for name, p in exact.model.named_parameters():
                if p.grad is not None:
                    small = np.abs(p.grad.numpy()) < LEAST_GRADIENT
                    rounding[name] = rounding.get(name, np.zeros_like(small)) | small
                    for each in (got, reference, near):
                        each[name] = np.where(rounding[name], 0.0, each[name])
        _raise(worth, near, reference)
        if _wrong(got, reference, worth):
            kept = copy.deepcopy(single.optimizer.state_dict())
            for _ in range(SHAKES):
                single.optimizer.load_state_dict(copy.deepcopy(memory))
                moved = {n: torch.from_numpy(_shaken(a, rng)) for n, a in arrays.items()}
                shaken = {n: _shaken(a, rng) for n, a in state.items()}
                _raise(worth, single.step(shaken, moved, number), reference)
            single.optimizer.load_state_dict(kept)
        if wrong := _wrong(got, reference, worth):
            return Outcome("wrong", wrong.split(" ")[0], f"{where}: {wrong}")
    return _predicted(program, trainer, {**initial, **trainer.parameters, **trainer.buffers}, batch)


def _predicted(
    program: Program, trainer: Trainer, state: Arrays, batch: Mapping[str, Tensor]
) -> Outcome:
    near, reference = (
        _Twin(program, double=double).predict(state, batch) for double in (False, True)
    )
    worth: dict[str, float] = {}
    _raise(worth, near, reference)
    if max(worth.values()) > ILL_CONDITIONED:
        return Outcome("right")
    got = trainer.predict({name: tensor.numpy() for name, tensor in batch.items()})
    wrong = _wrong(got, reference, worth)
    return Outcome("wrong", "prediction", f"prediction: {wrong}") if wrong else Outcome("right")


def _raise(worth: dict[str, float], near: Arrays, reference: Arrays) -> None:
    for name, exact in reference.items():
        worth[name] = max(worth.get(name, 0.0), _error(near[name], exact))


def _shaken(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if array.dtype != np.float32:
        return array
    moved = array * (1 + ROUNDING * rng.standard_normal(array.shape))
    return np.asarray(moved, dtype=np.float32)


def _wrong(got: Mapping[str, np.ndarray], reference: Arrays, worth: Mapping[str, float]) -> str:
    """The first tensor that is too far off, or ""."""
    for name, exact in reference.items():
        error = _error(np.asarray(got[name], np.float64), exact)
        if error > (allowed := max(LEAST_ALLOWED, TIMES_TORCH * worth[name])):
            return (
                f"{name} is off by {error:.1e}, allowed {allowed:.1e}: {got[name].shape} "
                f"{got[name].ravel()[:4]}, torch {exact.shape} {exact.ravel()[:4]}"
            )
    return ""


def shrunk(program: Program, outcome: Outcome) -> tuple[Program, Outcome]:
    """The least program found that fails in the same way, and how it does."""

    def still(candidate: Program) -> Iterator[tuple[Program, Outcome]]:
        try:
            found = tried(candidate)
        except Exception:  # what is left may be no program at all
            return
        if found.kind == outcome.kind and (found.kind == "wrong" or found.reason == outcome.reason):
            yield candidate, found

    while True:
        smaller = next((f for one in program.smaller() if one.terms for f in still(one)), None)
        if smaller is None:
            return program, outcome
        program, outcome = smaller


def tried_by_parts(program: Program) -> Iterator[tuple[Program, Outcome]]:
    """Each refusal, and how what is left without the refused lines goes."""
    while program.terms:
        outcome = tried(program)
        yield program, outcome
        number = re.search(r">:(\d+)", outcome.line)
        line = program.source.splitlines()[int(number[1]) - 1].strip() if number else ""
        refused = next((name for name, own in program.lines if own == line), None)
        if outcome.kind != "refused" or refused is None:
            return
        program = program.without(refused)
