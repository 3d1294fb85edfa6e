"""Small ladders, as methods are built of them: one matrix ``net.w`` and a vector ``net.b``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aggregator.methods.fedavg import FedAvgMethod, FedAvgSettings
from aggregator.methods.submodels import Rung
from device_sdk.artifact.submodels import Piece, Submodel
from device_sdk.methods.fedavg.contract import SharedTensor, shared_tensors

_ID = "0" * 64


def FULL(rung: int, rungs: int) -> Submodel:
    """The full model's place."""
    return Submodel(rung, rungs, _ID)


def arrays_of(shape: tuple[int, ...], seed: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "net.w": rng.standard_normal(shape).astype(np.float32),
        "net.b": rng.standard_normal(6).astype(np.float32),
    }


def layout_of(shape: tuple[int, ...]) -> tuple[SharedTensor, ...]:
    return shared_tensors(arrays_of(shape), {})


def factored_rung(
    rung: int, rungs: int, shape: tuple[int, ...], rank: int, of: str = "net.w"
) -> Rung:
    m, n = shape[0], int(np.prod(shape[1:]))
    arrays = {
        "net.b": np.zeros(6, np.float32),
        "net.w.left": np.zeros((m, rank), np.float32),
        "net.w.right": np.zeros((rank, n), np.float32),
    }
    pieces = {f"net.w.{role}": Piece(of, role) for role in ("left", "scale", "right")}
    submodel = Submodel(rung, rungs, _ID, pieces, ("net.w.scale",))
    scale = shared_tensors({"net.w.scale": np.zeros(rank, np.float32)}, {})
    return Rung(shared_tensors(arrays, {}), submodel, held=scale)


def sliced_rung(rung: int, rungs: int, shape: tuple[int, ...], of: str = "net.w") -> Rung:
    arrays = {"net.w": np.zeros(shape, np.float32), "net.b": np.zeros(6, np.float32)}
    return Rung(shared_tensors(arrays, {}), Submodel(rung, rungs, _ID, {"net.w": Piece(of)}))


def movable_method(units: int, kept: int, settings: FedAvgSettings) -> FedAvgMethod:
    """Of a matrix ``net.w`` [2 x units, 3 x units] and a full model, of whose units any may be
    trained by the smaller rung."""
    rungs = []
    for rung, size in ((1, kept), (2, units)):
        arrays = {
            "net.w": np.zeros((2 * size, 3 * size), np.float32),
            "net.b": np.zeros(6, np.float32),
        }
        pieces = {"net.w": Piece("net.w", "slice", (2, 1))} if size < units else {}
        submodel = Submodel(rung, 2, _ID, pieces, (), units, size)
        rungs.append(Rung(shared_tensors(arrays, {}), submodel))
    return FedAvgMethod(arrays_of((2 * units, 3 * units)), {}, settings, rungs=rungs)


def ladder_method(
    shape: tuple[int, ...],
    ranks: Sequence[int] = (),
    slices: Sequence[tuple[int, ...]] = (),
    settings: FedAvgSettings | None = None,
) -> FedAvgMethod:
    """A method whose last rung is the full model."""
    count = len(ranks) + len(slices) + 1
    small = [factored_rung(place, count, shape, rank) for place, rank in enumerate(ranks, 1)]
    small += [sliced_rung(place, count, each) for place, each in enumerate(slices, 1)]
    rungs = [*small, Rung(layout_of(shape), FULL(count, count))]
    return FedAvgMethod(arrays_of(shape), {}, settings, rungs=rungs)
