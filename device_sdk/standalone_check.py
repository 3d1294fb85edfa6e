"""A standalone ONNX file beside the artifact that it was made of: do both say the same?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from device_sdk.artifact import ArtifactError, Port
from device_sdk.artifact.onnx_reader import read_onnx
from device_sdk.artifact.parts import resolve
from device_sdk.errors import GraphRunError
from device_sdk.trainer import Trainer

Arrays = Mapping[str, NDArray[Any]]

# onnxruntime may fuse what is constant: the same numbers, rounded in another order.
_TOLERANCE = 1e-4
_OTHER_SIZE = 3


def run_standalone(onnx: bytes, inputs: Arrays) -> dict[str, NDArray[Any]]:
    """All outputs of a file that holds all it needs, by stock onnxruntime on the CPU.

    Raises GraphRunError.
    """
    try:
        session = ort.InferenceSession(onnx, providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise GraphRunError(f"onnxruntime cannot run the file: {error}") from error


def require_same_outputs(
    folder: str | os.PathLike[str], model: Arrays, onnx: bytes, rng: np.random.Generator
) -> float:
    """Compare a file with what a device with this artifact and model predicts, on random batches.

    Returns the largest difference, relative to the largest output. Raises ArtifactError where one
    exceeds 1e-4, GraphRunError where a graph cannot be run.
    """
    trainer = Trainer(folder, providers="cpu", threads=1)
    trainer.set_parameters(model)
    infer, worst = trainer.artifact.graphs["infer"], 0.0
    axes = {**trainer.artifact.example_sizes, **trainer.axes}
    free = set(axes) - set(trainer.axes)
    written = read_onnx(onnx)
    for sizes in (axes, {**axes, **dict.fromkeys(free, _OTHER_SIZE)}):
        batch = {port.of: _random(port, sizes, rng) for port in infer.select("batch")}
        wanted = trainer.predict(batch)
        given = zip((each.name for each in written.inputs), batch.values(), strict=True)
        found = run_standalone(onnx, dict(given)).values()
        for (name, array), other in zip(wanted.items(), found, strict=True):
            worst = max(worst, _difference(name, array, other))
    if worst > _TOLERANCE:
        raise ArtifactError(
            f"the file's outputs differ from the artifact's by {worst:.1e} of the largest; it was "
            "not written"
        )
    return worst


def _random(port: Port, sizes: Mapping[str, int], rng: np.random.Generator) -> NDArray[Any]:
    shape = resolve(port.shape, sizes)
    dtype = np.dtype(port.dtype)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    # Small enough to be a row of any table.
    return rng.integers(0, 2, shape).astype(dtype)


def _difference(name: str, wanted: NDArray[Any], found: NDArray[Any]) -> float:
    if wanted.dtype != found.dtype or wanted.shape != found.shape:
        raise ArtifactError(
            f"the file's output {name!r} is {found.dtype} {list(found.shape)}, the artifact's "
            f"{wanted.dtype} {list(wanted.shape)}"
        )
    if not wanted.size or np.array_equal(wanted, found, equal_nan=wanted.dtype.kind == "f"):
        return 0.0
    a, b = wanted.astype(np.float64), found.astype(np.float64)
    if not (np.isfinite(a) == np.isfinite(b)).all():
        return float("inf")
    a, b = a[np.isfinite(a)], b[np.isfinite(a)]
    return float(np.abs(a - b).max() / max(1e-12, float(np.abs(a).max())))
