"""An artifact's inference graph with its parameters inside: a file that needs nothing of ours.

The graph's state inputs become initializers. A pack is taken apart: the ``Split`` and ``Reshape``
nodes that did so at run time go, and each parameter is an initializer under torch's name; one that
the model uses in another shape than its own is there as one row, ``NAME.flat``. What else a pack's
nodes do is left to them, with the pack as one initializer. Inputs and outputs are called what the
manifest calls them; their named axes stay free.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.artifact import onnx_writer as write
from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.load import Artifact
from device_sdk.artifact.onnx_reader import Budget, fields, integer, message, text
from device_sdk.artifact.parts import Member, StateTensor, resolve

_FLAT = ".flat"


def standalone_onnx(
    artifact: Artifact,
    model: Mapping[str, NDArray[Any]],
    *,
    producer: tuple[str, str],
    metadata: Mapping[str, str],
) -> bytes:
    """The file's bytes.

    ``model``: parameters and buffers by torch's names, all that the inference graph reads.
    Raises ArtifactError where the artifact cannot predict, or for arrays that are missing or do not
    fit.
    """
    manifest = artifact.manifest
    if "infer" not in manifest.graphs:
        raise ArtifactError(f"{manifest.name} has no inference graph: export it with predict=")
    if artifact.graphs["infer"].external:
        raise ArtifactError(f"{manifest.name}: parts of its inference graph lie in other files")
    ports = manifest.graphs["infer"]
    graph = _Graph.parse(artifact.graphs["infer"].onnx)
    names: dict[str, str] = {}
    inside: dict[str, NDArray[Any]] = {}
    for port in ports.select("state"):
        tensor = manifest.state_by_name[port.of]
        if not tensor.members:
            raise ArtifactError(f"the inference graph reads {tensor.kind} state {tensor.name!r}")
        arrays = {member.name: _array(member, tensor, model) for member in tensor.members}
        if is_packed(tensor):
            apart = graph.take_apart(port.name, tensor)
            names |= apart
            flat = {f"{name}{_FLAT}": array.reshape(-1) for name, array in arrays.items()}
            inside |= {name: {**flat, **arrays}[name] for name in apart.values()}
            if graph.reads(port.name):
                inside[port.name] = packed(tensor, arrays)
        else:
            (names[port.name],) = arrays
            inside |= arrays
    batch, outputs = ports.select("batch"), ports.select("output")
    for port in (*batch, *outputs):
        # A label may be an output, too; and a graph's values all have names of their own.
        taken = {*inside, *names.values()}
        names[port.name] = port.name if port.of in taken else port.of
    body = graph.written(
        names,
        [write.value_info(names[port.name], port.dtype, port.shape) for port in batch],
        [write.value_info(names[port.name], port.dtype, port.shape) for port in outputs],
        [write.tensor(name, array) for name, array in inside.items()],
    )
    return write.model(
        body,
        opset=manifest.opset,
        ir_version=graph.ir_version,
        producer=producer,
        metadata=metadata,
    )


def is_packed(tensor: StateTensor) -> bool:
    """Whether a state tensor holds its members one after the other, and not just one as it is."""
    return len(tensor.members) != 1 or tensor.members[0].shape != tensor.shape


def packed(tensor: StateTensor, arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """The state tensor that holds its members' arrays, which are of fixed shapes."""
    whole = np.zeros(resolve(tensor.shape, {}), dtype=tensor.dtype)
    flat = whole.reshape(-1)
    for member in tensor.members:
        array = arrays[member.name]
        flat[member.offset : member.offset + array.size] = array.reshape(-1)
    return whole


def unpacked(tensor: StateTensor, whole: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The inverse of :func:`packed`: the members by torch's names, copies."""
    if not is_packed(tensor):
        return {tensor.members[0].name: whole.copy()}
    found, flat = {}, whole.reshape(-1)
    for member in tensor.members:
        shape = resolve(member.shape, {})
        end = member.offset + math.prod(shape)
        found[member.name] = flat[member.offset : end].reshape(shape).copy()
    return found


def _array(member: Member, tensor: StateTensor, model: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    array = model.get(member.name)
    if array is None:
        raise ArtifactError(f"the model lacks {member.name!r}, which the inference graph reads")
    fits = array.dtype.name == tensor.dtype and len(array.shape) == len(member.shape)
    for found, wanted in zip(array.shape, member.shape, strict=False):
        fits &= isinstance(wanted, str) or found == wanted
    if not fits:
        raise ArtifactError(
            f"{member.name!r} is {array.dtype} {list(array.shape)}; expected {tensor.dtype} "
            f"{list(member.shape)}"
        )
    return array


# An ONNX file taken apart as far as values are named, so that they can get other names.

_NODE, _NAME, _INITIALIZER, _INPUT, _OUTPUT, _VALUE = 1, 2, 5, 11, 12, 13
_SUBGRAPHS = (6, 11)
# The file is part of a checked artifact: no more than a guard.
_MOST_FIELDS = 20_000_000


@dataclass
class _Node:
    """A node's parts. ``reads``: all values that it does, inside its subgraphs too."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    operator: str = ""
    attributes: list[bytes] = field(default_factory=list)
    rest: bytes = b""
    reads: set[str] = field(default_factory=set)

    @classmethod
    def parse(cls, raw: memoryview, budget: Budget) -> _Node:
        found = cls()
        for number, wire, value in fields(raw, budget):
            if number == 1:
                found.inputs.append(text(wire, value, "node's input"))
            elif number == 2:
                found.outputs.append(text(wire, value, "node's output"))
            elif number == 5:
                attribute = message(wire, value, "attribute")
                found.attributes.append(bytes(attribute))
                for inner in _subgraph_nodes(attribute, budget):
                    found.reads |= inner.reads
            else:
                if number == 4:
                    found.operator = text(wire, value, "operator")
                found.rest += write.copied(number, wire, value)
        found.reads |= set(found.inputs)
        return found

    def written(self, names: Mapping[str, str], budget: Budget) -> bytes:
        parts = [write.data(1, names.get(each, each)) for each in self.inputs]
        parts += [write.data(2, names.get(each, each)) for each in self.outputs]
        parts.append(self.rest)
        parts += [write.data(5, _renamed_attribute(raw, names, budget)) for raw in self.attributes]
        return b"".join(parts)


@dataclass
class _Graph:
    """The main graph of a file."""

    budget: Budget
    ir_version: int = 0
    name: str = ""
    nodes: list[_Node] = field(default_factory=list)
    initializers: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def parse(cls, onnx: bytes) -> _Graph:
        found = cls(Budget(_MOST_FIELDS))
        for number, wire, value in fields(memoryview(onnx), found.budget):
            if number == 1:
                found.ir_version = integer(wire, value, "IR version")
            elif number == 7:
                found._parse_body(message(wire, value, "graph"))
        return found

    def _parse_body(self, raw: memoryview) -> None:
        for number, wire, value in fields(raw, self.budget):
            if number == _NODE:
                self.nodes.append(_Node.parse(message(wire, value, "node"), self.budget))
            elif number == _NAME:
                self.name = text(wire, value, "graph's name")
            elif number == _INITIALIZER:
                held = message(wire, value, "initializer")
                self.initializers[_tensor_name(held, self.budget)] = bytes(held)
            elif number not in (_INPUT, _OUTPUT, _VALUE):
                raise ArtifactError(f"ONNX file: a graph with field {number} is not taken apart")

    def reads(self, name: str) -> bool:
        """Whether any node reads a value."""
        return any(name in node.reads for node in self.nodes)

    def take_apart(self, pack: str, tensor: StateTensor) -> dict[str, str]:
        """Drop the nodes that take a pack apart; the members' names by the values that they gave.

        These are a ``Split`` at the members' offsets, and a ``Reshape`` of each part to its
        member's shape; a part that is used otherwise is the member as one row, ``NAME.flat``.
        """
        shapes = {member.name: resolve(member.shape, {}) for member in tensor.members}
        at = {(member.offset, math.prod(shapes[member.name])): member for member in tensor.members}
        found: dict[str, str] = {}
        for node in [*self.nodes]:
            if node.operator != "Split" or node.inputs[:1] != [pack] or len(node.inputs) != 2:
                continue
            sizes = self._integers(node.inputs[1])
            if len(sizes) != len(node.outputs):
                continue
            starts = itertools.accumulate(sizes[:-1], initial=0)
            parts = dict(zip(node.outputs, zip(starts, sizes, strict=True), strict=True))
            apart: dict[str, str] = {}
            gone = [node]
            for value, user in self._uses(set(parts)):
                member = at.get(parts[value])
                if member is not None and len(shapes[member.name]) == 1:
                    apart[value] = member.name
                elif member is not None and self._reshapes(user, value, shapes[member.name]):
                    apart[user.outputs[0]] = member.name
                    gone.append(user)
                elif member is not None:
                    apart[value] = f"{member.name}{_FLAT}"
                else:
                    break
            else:
                self.nodes = [each for each in self.nodes if each not in gone]
                found |= apart
        return found

    def _uses(self, values: set[str]) -> list[tuple[str, _Node]]:
        return [(value, node) for node in self.nodes for value in sorted(node.reads & values)]

    def _reshapes(self, node: _Node, value: str, shape: tuple[int, ...]) -> bool:
        if node.operator != "Reshape" or len(node.inputs) != 2 or len(node.outputs) != 1:
            return False
        given, wanted = node.inputs
        return given == value and wanted in self.initializers and self._integers(wanted) == [*shape]

    def _integers(self, name: str) -> list[int]:
        """The int64 numbers of an initializer; none where it is no such."""
        for number, wire, value in fields(
            memoryview(self.initializers.get(name, b"")), self.budget
        ):
            if number == 9:
                held = message(wire, value, "raw data")
                return [] if len(held) % 8 else np.frombuffer(held, dtype="<i8").tolist()
        return []

    def written(
        self,
        names: Mapping[str, str],
        inputs: list[bytes],
        outputs: list[bytes],
        initializers: list[bytes],
    ) -> bytes:
        """The graph's message, its values called by ``names`` where these have another for them."""
        read = {value for node in self.nodes for value in node.reads}
        own = [*self.initializers, *(value for node in self.nodes for value in node.outputs)]
        taken, renamed = {*names.values(), *own}, dict(names)
        for value in own:
            if value in names.values() and value not in names:
                renamed[value] = _free_name(value, taken)
        kept = [
            _renamed_tensor(raw, renamed, self.budget)
            for name, raw in self.initializers.items()
            if name in read
        ]
        nodes = [node.written(renamed, self.budget) for node in self.nodes]
        return write.graph(self.name, nodes, inputs, outputs, [*initializers, *kept])


def _free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _tensor_name(raw: memoryview, budget: Budget) -> str:
    for number, wire, value in fields(raw, budget):
        if number == 8:
            return text(wire, value, "tensor name")
    return ""


def _renamed_tensor(raw: bytes, names: Mapping[str, str], budget: Budget) -> bytes:
    found = []
    for number, wire, value in fields(memoryview(raw), budget):
        if number == 8:
            name = text(wire, value, "tensor name")
            found.append(write.data(8, names.get(name, name)))
        else:
            found.append(write.copied(number, wire, value))
    return b"".join(found)


def _renamed_attribute(raw: bytes, names: Mapping[str, str], budget: Budget) -> bytes:
    """An attribute whose subgraphs read the values under their new names."""
    found = []
    for number, wire, value in fields(memoryview(raw), budget):
        if number in _SUBGRAPHS:
            body = _renamed_graph(message(wire, value, "subgraph"), names, budget)
            found.append(write.data(number, body))
        else:
            found.append(write.copied(number, wire, value))
    return b"".join(found)


def _renamed_graph(raw: memoryview, names: Mapping[str, str], budget: Budget) -> bytes:
    found = []
    for number, wire, value in fields(raw, budget):
        if number == _NODE:
            node = _Node.parse(message(wire, value, "node"), budget)
            found.append(write.data(_NODE, node.written(names, budget)))
        else:
            found.append(write.copied(number, wire, value))
    return b"".join(found)


def _subgraph_nodes(attribute: memoryview, budget: Budget) -> Iterator[_Node]:
    for number, wire, value in fields(attribute, budget):
        if number in _SUBGRAPHS:
            for inner, kind, each in fields(message(wire, value, "subgraph"), budget):
                if inner == _NODE:
                    yield _Node.parse(message(kind, each, "node"), budget)
