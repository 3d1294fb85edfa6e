"""Random numbers inside a step: one stream for torch's reference and for the graph."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import export
from device_sdk import Trainer
from export.rewrites.randomness import Randomness

# What the masks were when they were drawn in 64-bit numbers: seed, step, shape, share kept; the
# hash of 70 calls' packed masks. A device in the field draws these.
RECORDED = [
    (0, 0, (3, 5), 0.5, "dbabc09cc074755a"),
    (12345, 7, (2, 3, 4), 0.9, "542d817fdcb3f447"),
    (-1, 2**40, (100,), 0.25, "08854960b8c28142"),
    (2**62 + 11, 3, (17, 1, 1), 0.75, "3380064659784341"),
    (2**31 - 1, 2**31, (1, 1000), 1 / 3, "9f293e3709dc595b"),
]


def _randomness(seed: int, step: int) -> Randomness:
    return Randomness(torch.tensor(seed), torch.tensor(step))


def _mix_in_python(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def _bits_in_python(seed: int, step: int, call: int, elements: int) -> list[int]:
    key = _mix_in_python((seed + 0x9E3779B9 * call) % 2**32)
    key = _mix_in_python((key + step * 0x85EBCA77) % 2**32)
    return [_mix_in_python((i * 0x9E3779B1 + key) % 2**32) for i in range(elements)]


@pytest.mark.parametrize(("seed", "step", "shape", "share", "digest"), RECORDED)
def test_masks_are_those_of_earlier_versions(
    seed: int, step: int, shape: tuple[int, ...], share: float, digest: str
) -> None:
    draw = _randomness(seed, step)
    masks = [draw.keep_mask(shape, share).numpy() for _ in range(70)]
    packed = b"".join(np.packbits(mask).tobytes() for mask in masks)
    assert hashlib.sha256(packed).hexdigest()[:16] == digest
    for call in (1, 64, 65):
        bits = _bits_in_python(seed, step, call, int(np.prod(shape)))
        assert masks[call - 1].ravel().tolist() == [b < round(share * 2**32) for b in bits]


def _drawing(
    draw: Callable[[Tensor, Tensor], Tensor], like: Tensor, free: Sequence[int], folder: Path
) -> Any:
    """Runs a graph whose output is ``draw(parameter, batch entry)``, at any seed and step."""
    model = nn.Linear(1, 1)
    export.train_step(
        model,
        lambda m, b: ((m.weight**2).sum(), {"drawn": draw(m.weight, b["x"])}),
        {"x": like},
        optimizer=export.Sgd(0.0),
        dynamic={"x": {axis: f"n{axis}" for axis in free}} if free else {},
        directory=folder,
        verify=False,
    )
    graph = onnx.load(folder / "train.onnx")
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])

    def run(x: Tensor, seed: int, step: int) -> np.ndarray:
        feeds = {
            "state.packed": np.ones(2, np.float32),
            "state.step": np.array(step),
            "seed": np.array(seed),
            "batch.x": x.numpy(),
            "hyper.lr": np.array(0, np.float32),
        }
        names = {port.name for port in session.get_inputs()}
        given = {name: value for name, value in feeds.items() if name in names}
        drawn: np.ndarray = session.run(["output.drawn"], given)[0]
        return drawn

    return run


@pytest.mark.parametrize(
    ("shape", "free", "repeats"),
    [
        ((3, 5), (0,), 1),
        ((2, 3, 4), (0, 2), 1),
        ((7,), (0,), 1),
        ((1, 1000), (), 11),
        ((17, 1, 1), (0,), 1),
    ],
)
def test_the_graph_draws_the_same_masks(
    shape: tuple[int, ...], free: tuple[int, ...], repeats: int, tmp_path: Path
) -> None:
    """Of every seed, step and call, at the sizes of the export and at others."""
    shares = (0.5, 0.9, 0.1, 1 / 3, 1 - 1e-9, 1 - 1e-12)
    calls = [share for share in shares for _ in range(repeats)]

    def masks(weight: Tensor, x: Tensor) -> Tensor:
        drawn = [torch.nn.functional.dropout(x, 1 - share, True) != 0 for share in calls]
        return torch.stack(drawn).to(torch.float32)

    run = _drawing(masks, torch.ones(shape), free, tmp_path / "artifact")
    for seed, step in ((0, 0), (-1, 1), (2**31 - 1, 2**31), (2**62 + 11, 2**40 + 5), (77, 3)):
        sizes = [5 * size + seed % 3 if axis in free else size for axis, size in enumerate(shape)]
        for given in (list(shape), sizes):
            draw = _randomness(seed, step)
            expected = [draw.keep_mask(given, 1 - (1 - share)).numpy() for share in calls]
            got = run(torch.ones(given), seed, step)
            np.testing.assert_array_equal(got, np.stack(expected).astype(np.float32))


def test_no_64_bit_arithmetic_touches_the_elements(tmp_path: Path) -> None:
    """onnxruntime divides and masks 64-bit numbers several times more slowly."""
    run = _drawing(
        lambda weight, x: nn.functional.dropout(x, 0.1, True),
        torch.ones(4, 6),
        (0,),
        tmp_path / "artifact",
    )
    assert run(torch.ones(9, 6), 1, 1).shape == (9, 6)
    kinds = {node.op_type for node in onnx.load(tmp_path / "artifact" / "train.onnx").graph.node}
    assert kinds.isdisjoint({"Div", "Mod", "BitwiseAnd"})
    trainer = Trainer(tmp_path / "artifact")
    trainer.step({"x": np.ones((3, 6), np.float32)})
