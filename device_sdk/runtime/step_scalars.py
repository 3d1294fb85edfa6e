"""The scalar inputs of a step that are neither state nor batch: hyper-parameters and the seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from device_sdk.artifact.graph import Graph
from device_sdk.errors import BatchError
from device_sdk.runtime.host_tensor import HostTensor
from device_sdk.runtime.seed import step_seed

_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)


class StepScalars:
    """Memory for the scalars. `defaults` are the artifact's values of the hyper-parameters."""

    def __init__(self, graph: Graph) -> None:
        self._hyper = [HostTensor(port, ()) for port in graph.select("hyper")]
        self._seed = [HostTensor(port, ()) for port in graph.select("seed")]
        self.defaults = {port.of: float(port.default or 0.0) for port in graph.select("hyper")}

    @property
    def tensors(self) -> list[HostTensor]:
        """What to bind."""
        return [*self._hyper, *self._seed]

    def set(self, hyper: Mapping[str, float] | None, seed: int, step: int) -> None:
        """Fill in one step's values; `hyper` replaces defaults. Raises BatchError if wrong."""
        values = self._checked(hyper) if hyper else self.defaults
        for tensor in self._hyper:
            tensor.array[...] = values[tensor.of]
        for tensor in self._seed:
            tensor.array[...] = step_seed(seed, step)

    def _checked(self, hyper: Mapping[str, float]) -> dict[str, float]:
        for name, value in hyper.items():
            if name not in self.defaults:
                raise BatchError(
                    f"hyper-parameter {name!r} is unknown; this artifact takes "
                    f"{', '.join(self.defaults) or 'none'}"
                )
            # Written so that NaN fails, too.
            if not isinstance(value, (int, float, np.number)) or not abs(value) <= _FLOAT32_MAX:
                raise BatchError(
                    f"hyper-parameter {name!r} is {value!r}, expected a finite float32 number"
                )
        return {**self.defaults, **hyper}
