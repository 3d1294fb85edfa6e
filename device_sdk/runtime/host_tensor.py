"""An array in main memory together with the OrtValue that aliases it."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from device_sdk.artifact.dtypes import DTYPES
from device_sdk.artifact.graph import Port
from device_sdk.artifact.safetensors import Array


class HostTensor:
    """Memory for one input or output of a graph, starting at zero."""

    def __init__(self, port: Port, shape: tuple[int, ...]) -> None:
        self.name = port.name
        self.of = port.of
        self.array: Array = np.zeros(shape, DTYPES[port.dtype])
        self.value = ort.OrtValue.ortvalue_from_numpy(self.array)
