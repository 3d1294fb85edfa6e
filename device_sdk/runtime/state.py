"""Two banks of state tensors: a step reads one and writes the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import onnxruntime as ort

from device_sdk.artifact.dtypes import DTYPES
from device_sdk.artifact.safetensors import Array
from device_sdk.artifact.state import StateTensor


class Slot(Protocol):
    """The memory of one state tensor in one bank. `value` is what sessions are bound to."""

    value: ort.OrtValue

    def read(self) -> Array:
        """The contents; a view or a copy, so copy before the next write."""
        ...

    def resize(self, shape: tuple[int, ...]) -> None:
        """Another shape, contents undefined. `value` changes: bind again."""
        ...

    def write(self, array: Array) -> None:
        """Copy an array of the slot's shape in."""
        ...


class HostSlot:
    """A slot in main memory, which only grows, so that changing shapes back and forth is cheap."""

    def __init__(self, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> None:
        self._flat: Array = np.zeros(math.prod(shape), dtype)
        self._view: Array
        self.resize(shape)

    def read(self) -> Array:
        return self._view

    def resize(self, shape: tuple[int, ...]) -> None:
        size = math.prod(shape)
        if size > self._flat.size:
            self._flat = np.zeros(size, self._flat.dtype)
        self._view = self._flat[:size].reshape(shape)
        # The OrtValue aliases the array: what the graph writes is read without a copy.
        self.value = ort.OrtValue.ortvalue_from_numpy(self._view)

    def write(self, array: Array) -> None:
        np.copyto(self._view, array, casting="no")


class CudaSlot:
    """A slot in a CUDA device's memory."""

    def __init__(self, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> None:
        self._dtype = dtype
        self.resize(shape)

    def read(self) -> Array:
        array: Array = self.value.numpy()
        return array

    def resize(self, shape: tuple[int, ...]) -> None:
        self.value = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, self._dtype), "cuda", 0)

    def write(self, array: Array) -> None:
        self.value.update_inplace(np.array(array, order="C"))


class StateBanks:
    """All state tensors, twice. `current` is the bank that holds the state."""

    def __init__(
        self, tensors: tuple[StateTensor, ...], shapes: Mapping[str, tuple[int, ...]], on_cuda: bool
    ) -> None:
        slot = CudaSlot if on_cuda else HostSlot
        self.current = 0
        self.shapes = dict(shapes)
        self._banks: tuple[dict[str, Slot], dict[str, Slot]] = (
            {t.name: slot(DTYPES[t.dtype], shapes[t.name]) for t in tensors},
            {t.name: slot(DTYPES[t.dtype], shapes[t.name]) for t in tensors},
        )

    def value(self, bank: int, name: str) -> ort.OrtValue:
        """What to bind for a state tensor in a bank."""
        return self._banks[bank][name].value

    def read(self, name: str) -> Array:
        """The current contents, as a view where that is possible."""
        return self._banks[self.current][name].read()

    def write(self, name: str, array: Array) -> bool:
        """Replace a state tensor. True where the shape changes, so that it must be bound again."""
        resized = self.shapes[name] != array.shape
        if resized:
            for bank in self._banks:
                bank[name].resize(array.shape)
            self.shapes[name] = array.shape
        self._banks[self.current][name].write(array)
        return resized

    def swap(self) -> None:
        """Make the bank that a step has written the current one."""
        self.current = 1 - self.current
