"""Checking a batch against what a graph expects, with errors that say what that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Never

import numpy as np

from device_sdk.artifact.dtypes import DTYPES
from device_sdk.artifact.graph import Port
from device_sdk.artifact.safetensors import Array
from device_sdk.artifact.shapes import describe
from device_sdk.errors import BatchError


class BatchChecker:
    """Checks the batches of one graph.

    `ignored` are entries that this graph has no use for, but its twin (train or infer) has: callers
    may pass the same batch to both.
    """

    def __init__(self, ports: tuple[Port, ...], ignored: Iterable[str]) -> None:
        self._ports = ports
        self._names = [port.of for port in ports]
        self._known = {*self._names, *ignored}
        self._dtypes = [DTYPES[port.dtype] for port in ports]

    def arrays(self, batch: Mapping[str, Array]) -> list[Array]:
        """The batch's arrays in the graph's order. Raises BatchError for wrong names or types."""
        try:
            arrays = [batch[name] for name in self._names]
        except KeyError as error:
            self._refuse(f"entry {error.args[0]!r} is missing")
        except TypeError:
            self._refuse(f"it is a {type(batch).__name__}, not a mapping of names to arrays")
        if len(batch) != len(arrays):
            unknown = sorted(str(name) for name in batch if name not in self._known)
            if unknown:
                self._refuse(f"entry {unknown[0]!r} is unknown")
        for array, dtype in zip(arrays, self._dtypes, strict=True):
            # Two quick looks, because this runs at every step; the rest only when they fail.
            if type(array) is not np.ndarray or array.dtype is not dtype:
                self._check_types(arrays)
        return arrays

    def _check_types(self, arrays: Iterable[object]) -> None:
        for port, array, dtype in zip(self._ports, arrays, self._dtypes, strict=True):
            if not isinstance(array, (np.ndarray, np.generic)):
                self._refuse(
                    f"entry {port.of!r} is a {type(array).__name__}, not a numpy array",
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
                elif wanted != length:
                    self._refuse(f"{where}: axis {axis} must have length {wanted}")
        return sizes

    def _refuse(self, problem: str, fix: str | None = None) -> Never:
        entries = ", ".join(f"{p.of}: {p.dtype}{describe(p.shape)}" for p in self._ports)
        advice = f". To fix it, {fix}" if fix else ""
        raise BatchError(
            f"batch refused: {problem}{advice}. This artifact expects {{{entries}}}"
        ) from None
