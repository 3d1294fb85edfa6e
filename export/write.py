"""Writes an artifact folder: graphs, initial values, and the manifest that describes them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx
import torch
from onnx import helper

from device_sdk.artifact import (
    INITIAL_FILE,
    MANIFEST_FILE,
    Axis,
    FileEntry,
    GraphFile,
    Manifest,
    Member,
    OptimizerSpec,
    Port,
    StateTensor,
    load_artifact,
    safetensors,
)
from device_sdk.artifact.parts import RATE_BY_TRIAL
from export.errors import ExportError
from export.in_place import NEW_BOUNDS
from export.layout import LayoutSlot
from export.lowering.graph import OPSET, every_node
from export.step import Problem, optimizer_tensors

_ROLES = {"new": "state", NEW_BOUNDS: "bounds"}


GRAPHS = ("train", "infer", "evaluate")


@dataclass(frozen=True)
class Graphs:
    """The ONNX models of one problem; ``gradients`` serves verification and is not written."""

    train: onnx.ModelProto
    infer: onnx.ModelProto
    gradients: onnx.ModelProto
    evaluate: onnx.ModelProto | None = None
    in_place: tuple[str, ...] = ()
    """The state tensors that the train graph may write where they lie."""
    squeezed: Sequence[Mapping[str, int]] = ()
    """Sizes of axes at which the step keeps an axis that a ``squeeze()`` drops in torch."""
    least: Mapping[str, int] = field(default_factory=dict)
    """The least sizes of axes that need one above 1."""
    ways: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """The ways that a step can take, in words, by the numbers that ``gradients`` gives."""

    @property
    def in_evaluation_mode(self) -> dict[str, onnx.ModelProto]:
        """Those of the graphs that compute in evaluation mode, by name."""
        found = {"infer": self.infer, "evaluate": self.evaluate}
        return {name: graph for name, graph in found.items() if graph is not None}


def write_artifact(
    problem: Problem,
    made: Graphs,
    directory: Path,
    least: Mapping[str, int],
    to_train: Mapping[str, int],
    rate: float | None = None,
) -> Manifest:
    """Write the folder whole or not at all, and load it once as a device would.

    ``least``: axes' least sizes above 1; ``to_train``: those that a train step needs; ``rate``: the
    learning rate that a trial found, in place of the optimizer's.
    An artifact that is already there is replaced; a folder with other files is refused.
    """
    graphs = {"train": made.train, **made.in_evaluation_mode}
    initial = {
        name: tensor.detach().cpu().contiguous().numpy()
        for name, tensor in {
            **dict(problem.model.named_parameters()),
            **dict(problem.model.named_buffers()),
        }.items()
        if any(member.name == name for slot in problem.slots for member in slot.members)
    }
    files = {
        f"{n}.onnx": graph.SerializeToString(deterministic=True) for n, graph in graphs.items()
    }
    defaults = {**problem.optimizer.hyper(), **({} if rate is None else {"lr": rate})}
    manifest = Manifest(
        name=problem.name,
        opset=OPSET,
        axes={
            name: Axis(size, least.get(name, 1), to_train.get(name, 1))
            for name, size in problem.axes.example.items()
        },
        state=tuple(replace(each, in_place=each.name in made.in_place) for each in _state(problem)),
        optimizer=OptimizerSpec(
            problem.optimizer.name,
            {**problem.optimizer.settings(), **({} if rate is None else {RATE_BY_TRIAL: True})},
        ),
        graphs={
            name: _graph(problem, f"{name}.onnx", graph, defaults) for name, graph in graphs.items()
        },
        files={name: FileEntry.of(data) for name, data in {**files, INITIAL_FILE: b""}.items()},
        producer={"torch": torch.__version__.split("+")[0], "onnx": onnx.__version__},
        sequential=any(map(adds_by_scatter, graphs.values())),
        metrics=problem.metrics,
        ignored=_ignored(problem, graphs),
    )
    if problem.submodel is not None:
        kept = manifest.frozen_members
        held = tuple(sorted(set(problem.submodel.held) & kept))
        fixed = kept - set(held)
        pieces = {n: piece for n, piece in problem.submodel.pieces.items() if n not in fixed}
        submodel = replace(problem.submodel, pieces=pieces, held=held)
        manifest = replace(manifest, submodel=submodel)
    own = {name: array for name, array in initial.items() if name not in manifest.given}
    files[INITIAL_FILE] = safetensors.encode(own)
    entries = {name: FileEntry.of(data) for name, data in files.items()}
    manifest = replace(manifest, files=entries)
    _place({**files, MANIFEST_FILE: manifest.to_json()}, directory)
    return manifest


def _ignored(problem: Problem, graphs: Mapping[str, onnx.ModelProto]) -> tuple[str, ...]:
    """The entries of the example batch that no graph takes."""
    taken = {info.name for graph in graphs.values() for info in graph.graph.input}
    return tuple(name for name in problem.batch if f"batch.{name}" not in taken)


def adds_by_scatter(model: onnx.ModelProto) -> bool:
    """Whether the graph holds a ScatterND that adds, which races under several threads."""
    return any(
        node.op_type == "ScatterND"
        and any(a.name == "reduction" and a.s != b"none" for a in node.attribute)
        for node in every_node(model.graph)
    )


def _place(files: dict[str, bytes], directory: Path) -> None:
    if directory.exists():
        ours = {*files, *(f"{name}.onnx" for name in GRAPHS)}
        strange = sorted(p.name for p in directory.iterdir() if p.name not in ours)
        if strange or not directory.is_dir():
            raise ExportError(
                f"{directory} holds other files ({', '.join(strange[:3])})",
                instead="a new or empty folder, or one with an artifact to replace",
            )
    with replaced(directory) as draft:
        for name, data in files.items():
            (draft / name).write_bytes(data)
        load_artifact(draft)


@contextmanager
def replaced(directory: Path) -> Iterator[Path]:
    """A new folder beside ``directory`` that takes its place when the block ends without an error,
    and is gone otherwise."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        draft.chmod(0o755)
        yield draft
        if directory.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
            os.replace(directory, old / "replaced")
            os.replace(draft, directory)
            shutil.rmtree(old)
        else:
            os.replace(draft, directory)
    finally:
        if draft.exists():
            shutil.rmtree(draft)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _state(problem: Problem) -> tuple[StateTensor, ...]:
    return (
        *(_slot(slot) for slot in problem.slots),
        *(
            StateTensor(held.name, "optimizer", _dtype(held.dtype), held.shape, like=held.like)
            for held in optimizer_tensors(problem)
        ),
        StateTensor("step", "counter", "int64", ()),
    )


def _slot(slot: LayoutSlot) -> StateTensor:
    members = tuple(Member(m.name, m.shape, m.offset) for m in slot.members)
    return StateTensor(
        slot.name, slot.kind, _dtype(slot.dtype), slot.shape, members, frozen=slot.frozen
    )


def _graph(
    problem: Problem, file: str, model: onnx.ModelProto, defaults: Mapping[str, float]
) -> GraphFile:
    inputs = tuple(_port(problem, info, defaults) for info in model.graph.input)
    outputs = tuple(_port(problem, info, defaults) for info in model.graph.output)
    return GraphFile(file, inputs, outputs)


def _port(problem: Problem, info: onnx.ValueInfoProto, defaults: Mapping[str, float]) -> Port:
    kind, _, of = info.name.partition(".")
    tensor = info.type.tensor_type
    names = set(problem.axes.names)
    shape: list[int | str | None] = []
    for dim in tensor.shape.dim:
        if dim.HasField("dim_value"):
            shape.append(dim.dim_value)
        else:
            shape.append(dim.dim_param if dim.dim_param in names else None)
    default = defaults[of] if kind == "hyper" else None
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    return Port(info.name, _ROLES.get(kind, kind), of or kind, dtype, tuple(shape), default)
