"""The memory that a train step needs for one batch shape, kept so that steps allocate nothing."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

import numpy as np
import onnxruntime as ort

from device_sdk.artifact.dtypes import DTYPES
from device_sdk.artifact.graph import Graph, Port
from device_sdk.artifact.safetensors import Array
from device_sdk.artifact.shapes import axes_of, resolve
from device_sdk.runtime.batch import BatchChecker
from device_sdk.runtime.host_tensor import HostTensor

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
    Outputs of unknown length are filled in by whoever runs the graph.
    """

    def __init__(self, graph: Graph, sizes: Mapping[str, int]) -> None:
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

    def __init__(self, graph: Graph, checker: BatchChecker) -> None:
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
