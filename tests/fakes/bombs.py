"""Artifacts that are valid in every byte and do harm when they run."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from device_sdk.artifact import MANIFEST_FILE
from device_sdk.artifact.strict_json import canonical

Bomb = Literal[
    "loop", "constants", "kernel", "memory", "crash", "late-crash", "late-loop", "late-memory"
]
_Parts = tuple[list[onnx.NodeProto], dict[str, np.ndarray]]
_SUM = "bomb.sum"
_SIDE = 16_000


def make_bomb(kind: Bomb, of: Path, folder: Path, graph: str = "train", *, after: int = 1) -> Path:
    """The artifact ``of`` with a bomb in one of its graphs, on the way to its first float output.

    ``loop``: 2^62 turns; ``constants``: a product of 16,000 x 16,000 constants; ``kernel``: the
    same of what only a run knows; ``memory``: 16 GiB; ``crash``: -2^31 divided by -1, which ends
    the process with SIGFPE on x86; ``late-``: once ``after`` steps were right.
    """
    shutil.copytree(of, folder)
    manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
    file = manifest["graphs"][graph]["file"]
    model = onnx.load(folder / file)
    wanted = [each["name"] for each in manifest["graphs"][graph]["outputs"]]
    floats = {each.name for each in model.graph.output if each.type.tensor_type.elem_type == 1}
    roles = {each["name"]: each["role"] for each in manifest["graphs"][graph]["outputs"]}
    output = next(n for n in wanted if n in floats and roles[n] in ("loss", "output"))
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            if name == output:
                node.output[place] = "bomb.before"
    nodes, constants = _BOMBS[kind](_step_input(manifest, graph))
    if kind.startswith("late-"):
        nodes, constants = _late(_step_input(manifest, graph), after, nodes, constants)
    for name, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    model.graph.node.extend(nodes)
    model.graph.node.append(helper.make_node("Add", ["bomb.before", _SUM], [output]))
    data = model.SerializeToString()
    (folder / file).write_bytes(data)
    manifest["files"][file] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST_FILE).write_bytes(canonical(manifest))
    return folder


def _step_input(manifest: dict[str, object], graph: str) -> str:
    ports = manifest["graphs"][graph]["inputs"]  # type: ignore[index]
    return next((each["name"] for each in ports if each["of"] == "step"), "")


def _late(
    step: str, after: int, nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray]
) -> _Parts:
    """The same where the first ``after`` steps are all the first one."""
    for node in nodes:
        node.input[:] = ["bomb.late" if each == step else each for each in node.input]
    first = [
        helper.make_node("Sub", [step, "bomb.right"], ["bomb.since"]),
        helper.make_node("Max", ["bomb.since", "bomb.first"], ["bomb.late"]),
    ]
    numbers = {"bomb.right": np.array(after - 1, np.int64), "bomb.first": np.array(0, np.int64)}
    return [*first, *nodes], {**constants, **numbers}


def _loop(turns: str, start: np.ndarray) -> _Parts:
    kinds = {"bomb.i": TensorProto.INT64, "bomb.c": TensorProto.BOOL, "bomb.x": TensorProto.FLOAT}
    inside = [helper.make_tensor_value_info(name, kind, []) for name, kind in kinds.items()]
    outside = [
        helper.make_tensor_value_info("bomb.c2", TensorProto.BOOL, []),
        helper.make_tensor_value_info("bomb.x2", TensorProto.FLOAT, []),
    ]
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["bomb.c"], ["bomb.c2"]),
            helper.make_node("Neg", ["bomb.x"], ["bomb.x2"]),
        ],
        "bomb.body",
        inside,
        outside,
    )
    nodes = [helper.make_node("Loop", [turns, "bomb.true", "bomb.zero"], [_SUM], body=body)]
    return nodes, {"bomb.true": np.array(True), "bomb.zero": np.array(0, np.float32), turns: start}


def _endless(step: str) -> _Parts:
    return _loop("bomb.turns", np.array(2**62, np.int64))


def _late_loop(step: str) -> _Parts:
    nodes, constants = _loop("bomb.turns", np.array(0, np.int64))
    del constants["bomb.turns"]
    nodes = [
        helper.make_node("Cast", [step], ["bomb.step"], to=TensorProto.INT64),
        helper.make_node("Mul", ["bomb.step", "bomb.many"], ["bomb.turns"]),
        *nodes,
    ]
    return nodes, {**constants, "bomb.many": np.array(2**62, np.int64)}


def _product(shape: list[onnx.NodeProto], constants: dict[str, np.ndarray]) -> _Parts:
    one = numpy_helper.from_array(np.array([1.0], np.float32))
    nodes = [
        *shape,
        helper.make_node("ConstantOfShape", ["bomb.shape"], ["bomb.a"], value=one),
        helper.make_node("MatMul", ["bomb.a", "bomb.a"], ["bomb.b"]),
        helper.make_node("ReduceMin", ["bomb.b"], [_SUM], keepdims=0),
    ]
    return nodes, constants


def _constants(step: str) -> _Parts:
    return _product([], {"bomb.shape": np.array([_SIDE, _SIDE], np.int64)})


def _known_at_run(step: str, most: int) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """``bomb.shape``: [most, most] wherever the step's number is."""
    nodes = [
        helper.make_node("Cast", [step], ["bomb.step"], to=TensorProto.INT64),
        helper.make_node("Mul", ["bomb.step", "bomb.none"], ["bomb.nothing"]),
        helper.make_node("Add", ["bomb.side", "bomb.nothing"], ["bomb.shape"]),
    ]
    constants = {"bomb.none": np.array(0, np.int64), "bomb.side": np.array([most] * 2, np.int64)}
    return nodes, constants


def _kernel(step: str) -> _Parts:
    return _product(*_known_at_run(step, _SIDE))


def _memory(step: str) -> _Parts:
    shape, constants = _known_at_run(step, 2**16)
    one = numpy_helper.from_array(np.array([1.0], np.float32))
    nodes = [
        *shape,
        helper.make_node("ConstantOfShape", ["bomb.shape"], ["bomb.a"], value=one),
        helper.make_node("ReduceMin", ["bomb.a"], [_SUM], keepdims=0),
    ]
    return nodes, constants


def _late_memory(step: str) -> _Parts:
    """256 TiB more with each step: more than there are addresses, wherever it runs."""
    one = numpy_helper.from_array(np.array([1.0], np.float32))
    nodes = [
        helper.make_node("Mul", [step, "bomb.side"], ["bomb.shape"]),
        helper.make_node("ConstantOfShape", ["bomb.shape"], ["bomb.a"], value=one),
        helper.make_node("ReduceSum", ["bomb.a"], [_SUM], keepdims=0),
    ]
    return nodes, {"bomb.side": np.array([2**46], np.int64)}


def _division(step: str, *, late: bool) -> _Parts:
    """-2^31 by -1, which is no int32; where ``late``, by 1 at first."""
    first = ["bomb.step", "bomb.one"] if late else ["bomb.one", "bomb.one"]
    nodes = [
        helper.make_node("Cast", [step], ["bomb.step"], to=TensorProto.INT32),
        helper.make_node("Min", first, ["bomb.now"]),
        helper.make_node("Add", ["bomb.now", "bomb.now"], ["bomb.twice"]),
        helper.make_node("Sub", ["bomb.one", "bomb.twice"], ["bomb.divisor"]),
        helper.make_node("Div", ["bomb.least", "bomb.divisor"], ["bomb.quotient"]),
        helper.make_node("Cast", ["bomb.quotient"], [_SUM], to=TensorProto.FLOAT),
    ]
    return nodes, {"bomb.one": np.array(1, np.int32), "bomb.least": np.array(-(2**31), np.int32)}


_BOMBS: dict[Bomb, Callable[[str], _Parts]] = {
    "loop": _endless,
    "constants": _constants,
    "kernel": _kernel,
    "memory": _memory,
    "crash": lambda step: _division(step, late=False),
    "late-crash": lambda step: _division(step, late=True),
    "late-loop": _late_loop,
    "late-memory": _late_memory,
}
