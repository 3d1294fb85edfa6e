"""Element types an artifact's tensors may have, by the names the manifest uses."""

from __future__ import annotations

from typing import Final

import numpy as np

DTYPES: Final[dict[str, np.dtype[np.generic]]] = {
    name: np.dtype(name)
    for name in (
        "float32",
        "float64",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    )
}
"""Manifest name -> numpy dtype (native byte order)."""

ONNX_ELEMENT_TYPES: Final[dict[int, str]] = {
    1: "float32",
    2: "uint8",
    3: "int8",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
}
"""onnx.TensorProto.DataType -> manifest name."""
