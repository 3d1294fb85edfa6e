"""Random states and batches for verification, at more than one size of each axis."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from export.step import Problem, optimizer_slots


def size_sets(problem: Problem) -> list[dict[str, int]]:
    """The example's sizes, and others: smaller batches, larger parameters (indices stay valid)."""
    example = dict(problem.axes.example)
    of_state = {s for slot in problem.slots for s in slot.shape if isinstance(s, str)}
    other = {
        axis: size + 3 if axis in of_state or size < 4 else size // 2 + 1
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
    shapes = {slot.name: slot.shape for slot in problem.parameter_slots}
    names = optimizer_slots(problem)
    for spec in problem.optimizer.state():
        for held, slot_name in zip(names[spec.name], shapes, strict=False):
            behind = shapes[slot_name] if spec.per_parameter else ()
            shape = problem.axes.concrete((*spec.lead, *behind), sizes)
            state[f"state.{held}"] = np.zeros(shape, dtype=str(spec.dtype).removeprefix("torch."))
    state["state.step"] = np.zeros((), dtype=np.int64)
    return state


def _resized(array: np.ndarray, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Slices of ``array`` drawn anew along each axis whose length changes."""
    for axis, size in enumerate(shape):
        if array.shape[axis] != size:
            array = array.take(_rows(array.shape[axis], size, rng), axis=axis)
    return np.array(array)


def draw_batch(
    problem: Problem, sizes: Mapping[str, int], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Rows of the example batch drawn anew, the same rows in every entry of one axis."""
    rows = {axis: _rows(problem.axes.example[axis], size, rng) for axis, size in sizes.items()}
    batch: dict[str, np.ndarray] = {}
    for name, tensor in problem.batch.items():
        array = tensor.detach().cpu().numpy()
        for dim, axis in problem.axes.of.get(name, {}).items():
            array = array.take(rows[axis], axis=dim)
        batch[f"batch.{name}"] = np.array(array)
    return batch


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
