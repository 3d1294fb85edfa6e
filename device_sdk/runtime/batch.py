"""Checking a batch against what a graph expects, with errors that say what that is."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final, Never

import numpy as np
import onnxruntime as ort

from device_sdk.artifact.parts import DTYPES, GraphFile, Port, axes_of, describe, resolve
from device_sdk.artifact.safetensors import Array
from device_sdk.errors import BatchError
from device_sdk.runtime.session import HostTensor

_LOG = logging.getLogger("device_sdk")


class BatchChecker:
    """Checks the batches of one graph.

    `ignored` are entries that this graph has no use for, but its twin (train or infer) has: callers
    may pass the same batch to both. `unused` are those that no graph has: said once. `least` are
    the least sizes of those axes that need one above 1.
    """

    def __init__(
        self,
        ports: tuple[Port, ...],
        ignored: Iterable[str],
        unused: Iterable[str] = (),
        *,
        least: Mapping[str, int],
    ) -> None:
        self._least = least
        self._ports = ports
        self._names = [port.of for port in ports]
        self._unused = frozenset(unused)
        self._known = {*self._names, *ignored, *self._unused}
        self._said = False
        self._dtypes = [DTYPES[port.dtype] for port in ports]

    def arrays(self, batch: Mapping[str, Array]) -> list[Array]:
        """The batch's arrays in the graph's order. Raises BatchError for wrong names or types."""
        try:
            arrays = [batch[name] for name in self._names]
        except KeyError as error:
            self._refuse(f"entry {error.args[0]!r} is missing")
        except TypeError:
            self._refuse(f"it is of type {type(batch).__name__}, not a mapping of names to arrays")
        if len(batch) != len(arrays):
            unknown = sorted(str(name) for name in batch if name not in self._known)
            if unknown:
                self._refuse(f"entry {unknown[0]!r} is unknown")
            if not self._said and not self._unused.isdisjoint(batch):
                self._said = True
                _LOG.warning(
                    "%s: ignored in each batch, for the loss does not use it",
                    ", ".join(sorted(self._unused & set(batch))),
                )
        for array, dtype in zip(arrays, self._dtypes, strict=True):
            # Two quick looks, because this runs at every step; the rest only when they fail.
            if type(array) is not np.ndarray or array.dtype is not dtype:
                self._check_types(arrays)
        return arrays

    def _check_types(self, arrays: Iterable[object]) -> None:
        for port, array, dtype in zip(self._ports, arrays, self._dtypes, strict=True):
            if not isinstance(array, (np.ndarray, np.generic)):
                self._refuse(
                    f"entry {port.of!r} is of type {type(array).__name__}, not a numpy array",
                    f"pass np.asarray(value, np.{dtype.name})",
                )
            if array.dtype != dtype:
                self._refuse(
                    f"entry {port.of!r} is {array.dtype}, expected {dtype.name}",
                    f"convert it with .astype(np.{dtype.name})",
                )

    def sizes(self, shapes: Iterable[tuple[int, ...]], axes: Mapping[str, int]) -> dict[str, int]:
        """Sizes of all axes, given those of the state. Raises BatchError where shapes disagree."""
        sizes = dict(axes)
        origin = dict.fromkeys(axes, "the parameters")
        for port, shape in zip(self._ports, shapes, strict=True):
            where = f"entry {port.of!r} has shape {list(shape)}"
            if len(shape) != len(port.shape):
                self._refuse(f"{where}: it has {len(shape)} axes instead of {len(port.shape)}")
            for axis, (wanted, length) in enumerate(zip(port.shape, shape, strict=True)):
                if length == 0:
                    self._refuse(f"{where}: axis {axis} is empty", "leave empty batches out")
                if isinstance(wanted, str):
                    if sizes.setdefault(wanted, length) != length:
                        self._refuse(
                            f"{where}, but axis {wanted!r} has length {sizes[wanted]} in "
                            f"{origin[wanted]}"
                        )
                    origin.setdefault(wanted, f"entry {port.of!r}")
                    if length < self._least.get(wanted, 1):
                        least = self._least[wanted]
                        self._refuse(f"{where}: axis {wanted!r} must be at least {least}")
                elif wanted != length:
                    self._refuse(f"{where}: axis {axis} must have length {wanted}")
        return sizes

    def _refuse(self, problem: str, fix: str | None = None) -> Never:
        entries = ", ".join(f"{p.of}: {p.dtype}{describe(p.shape)}" for p in self._ports)
        advice = f". To fix it, {fix}" if fix else ""
        unused = f", and ignores {', '.join(sorted(self._unused))}" if self._unused else ""
        raise BatchError(
            f"batch refused: {problem}{advice}. This artifact expects {{{entries}}}{unused}"
        ) from None


# The memory that a train step needs for one batch shape, kept so that steps allocate nothing.

Shapes = tuple[tuple[int, ...], ...]
# A data set's usual batch, its last one, and a few more.
_KEPT: Final = 8
# Copying more than this takes longer than binding other memory.
_LARGE_BYTES: Final = 1 << 18


class BatchInput:
    """Input of one batch entry: small arrays are copied into memory that stays bound, large ones
    (``in_place``) are read where they lie, so they are bound at each step."""

    def __init__(self, port: Port, shape: tuple[int, ...]) -> None:
        self.name = port.name
        self.in_place = math.prod(shape) * DTYPES[port.dtype].itemsize > _LARGE_BYTES
        self.value: ort.OrtValue
        if not self.in_place:
            self._memory = HostTensor(port, shape)
            self.value = self._memory.value

    def take(self, array: Array) -> None:
        """Make ``value`` hold an array of this input's dtype and shape."""
        if self.in_place:
            self.value = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
        else:
            np.copyto(self._memory.array, array)


class BatchMemory:
    """Batch inputs, and the extra outputs once per bank.

    Two sets of outputs, so that a step which is dropped leaves the last finished step's alone.
    Outputs of unknown length are none of them: onnxruntime allocates these.
    """

    def __init__(self, graph: GraphFile, sizes: Mapping[str, int]) -> None:
        self.inputs = [BatchInput(p, resolve(p.shape, sizes)) for p in graph.select("batch")]
        sized = [p for p in graph.select("output") if None not in p.shape]
        self.results = tuple(
            [HostTensor(port, resolve(port.shape, sizes)) for port in sized] for _ in (0, 1)
        )
        self.outputs: tuple[dict[str, Array], ...] = tuple(
            {tensor.of: tensor.array for tensor in results} for results in self.results
        )


class BatchMemories:
    """The memory of the latest batch shapes. `checker` checks shapes that have not been seen."""

    def __init__(self, graph: GraphFile, checker: BatchChecker) -> None:
        self._graph = graph
        self._checker = checker
        self._kept: OrderedDict[Shapes, BatchMemory] = OrderedDict()
        self._axes = {
            axis
            for port in (*graph.select("batch"), *graph.select("output"))
            for axis in axes_of(port.shape)
        }

    def get(self, shapes: Shapes, axes: Mapping[str, int]) -> BatchMemory:
        """Memory for a batch of these shapes, given the sizes of the state's axes.

        Raises BatchError where the shapes are wrong.
        """
        memory = self._kept.get(shapes)
        if memory is not None:
            self._kept.move_to_end(shapes)
            return memory
        memory = BatchMemory(self._graph, self._checker.sizes(shapes, axes))
        self._kept[shapes] = memory
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return memory

    def forget(self, axes: set[str]) -> None:
        """Drop what was made while these axes of the state had other sizes."""
        if axes & self._axes:
            self._kept.clear()
