"""Safe loading: every byte of an artifact is checked before anything runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from device_sdk.artifact import onnx_writer as write
from device_sdk.artifact import safetensors
from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.manifest import (
    INITIAL_FILE,
    MANIFEST_FILE,
    MAX_FILE_BYTES,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
)
from device_sdk.artifact.onnx_reader import (
    Budget,
    GraphValue,
    OnnxModel,
    fields,
    message,
    read_onnx,
    text,
)
from device_sdk.artifact.parts import Dim, FileName, GraphFile, Port, Shape, describe, resolve
from device_sdk.artifact.safetensors import Array
from device_sdk.artifact.submodels import FULL_FILE, part_of, stand_in
from device_sdk.fields import Misfit, require
from device_sdk.system.files import read_small


def read_file(folder: Path, name: str, max_bytes: int) -> bytes:
    """The bytes of a regular file that lies in the folder (a link must not leave it)."""
    try:
        require(FileName, name, "the file's name")
    except Misfit as misfit:
        raise ArtifactError(str(misfit)) from None
    path = folder / name
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder.resolve(strict=True)):
            raise ArtifactError(f"{path} is a link that leaves the artifact's folder")
        return read_small(real, max_bytes)
    except FileNotFoundError:
        raise ArtifactError(f"{path} does not exist: is {folder} an artifact's folder?") from None
    except (OSError, RuntimeError) as error:
        # RuntimeError: how pathlib reports a loop of links before Python 3.13.
        raise ArtifactError(f"{path} cannot be read: {error}") from None


def read_checked(folder: Path, name: str, entry: FileEntry) -> bytes:
    """The bytes of a file whose size and SHA-256 are the manifest's."""
    data = read_file(folder, name, entry.size)
    if len(data) != entry.size:
        raise ArtifactError(
            f"{folder / name} has {len(data)} bytes, the manifest says {entry.size}"
        )
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise ArtifactError(f"{folder / name} was changed: its SHA-256 is not the manifest's")
    return data


# Does an ONNX file hold what the manifest says, and nothing that is not allowed?


def check_agreement(manifest: Manifest, graph: GraphFile, model: OnnxModel) -> None:
    """Raise ArtifactError naming the first point in which file and manifest differ."""
    _check_operators(manifest, graph, model)
    _check_ports(graph, graph.inputs, model.inputs, "input")
    _check_ports(graph, graph.outputs, model.outputs, "output")
    _check_gate(manifest, graph, model)
    defaults = model.initializers & {value.name for value in model.inputs}
    if defaults:
        raise ArtifactError(f"{graph.file}: input {min(defaults)!r} has a default inside the graph")
    for location in sorted(model.external):
        if location not in manifest.files:
            raise ArtifactError(
                f"{graph.file}: a tensor's data lies in {location!r:.200}, which is not one of the "
                "artifact's files"
            )


def _check_operators(manifest: Manifest, graph: GraphFile, model: OnnxModel) -> None:
    for domain, operator in model.operators:
        if domain:
            raise ArtifactError(
                f"{graph.file}: operator {domain}.{operator} is not allowed: artifacts hold "
                "standard ONNX operators only"
            )
    if model.functions:
        raise ArtifactError(
            f"{graph.file}: holds the function {model.functions[0]!r}; functions must be inlined"
        )
    # Other domains' imports are harmless without nodes, but no exporter of ours writes them.
    if model.opsets != {"": manifest.opset}:
        raise ArtifactError(
            f"{graph.file}: imports opsets {model.opsets}, the manifest says {manifest.opset}"
        )
    if model.racing_scatters and not manifest.sequential:
        raise ArtifactError(
            f"{graph.file}: holds ScatterND with a reduction, which races under several threads, "
            "but the manifest does not say sequential"
        )


def _check_gate(manifest: Manifest, graph: GraphFile, model: OnnxModel) -> None:
    """State in place is written by one `If`, whose condition the graph tells as begun.

    What comes before what inside is not looked at: a graph that reads what it has overwritten
    computes other numbers, like any wrong graph, in the memory that is its own.
    """
    in_place = {each.name for each in manifest.state if each.in_place}
    written = {port.name for port in graph.new_state if port.of in in_place}
    if not written:
        return
    begun = tuple(port.name for port in graph.select("begun"))
    if not any(each.inputs == begun and written <= set(each.outputs) for each in model.if_nodes):
        raise ArtifactError(
            f"{graph.file}: state in place is not written by one If behind {begun[0]!r}"
        )


def _check_ports(
    graph: GraphFile, ports: tuple[Port, ...], values: list[GraphValue], side: str
) -> None:
    found = {value.name: value for value in values}
    if len(found) != len(values):
        raise ArtifactError(f"{graph.file}: two {side}s have the same name")
    wanted = {port.name for port in ports}
    for name in sorted(wanted - set(found)):
        raise ArtifactError(f"{graph.file}: has no {side} {name!r}, which the manifest lists")
    for name in sorted(set(found) - wanted):
        raise ArtifactError(f"{graph.file}: has an {side} {name!r} that the manifest does not list")
    for port in ports:
        value = found[port.name]
        if value.dtype != port.dtype:
            raise ArtifactError(
                f"{graph.file}: {side} {port.name!r} is {value.dtype}, the manifest says "
                f"{port.dtype}"
            )
        if not _shapes_agree(port.shape, value.shape, strict=side == "input"):
            shown = "no shape" if value.shape is None else describe(value.shape)
            raise ArtifactError(
                f"{graph.file}: {side} {port.name!r} has {shown}, the manifest says "
                f"{describe(port.shape)}"
            )


def _shapes_agree(port: Shape, value: Shape | None, *, strict: bool) -> bool:
    if value is None:
        # onnxruntime infers an output's shape itself where the file leaves it out.
        return not strict
    return len(port) == len(value) and all(
        _dims_agree(wanted, found, strict) for wanted, found in zip(port, value, strict=True)
    )


def _dims_agree(wanted: Dim, found: Dim, strict: bool) -> bool:
    if wanted is None:
        return True
    return wanted == found or (found is None and not strict)


@dataclass(frozen=True)
class CheckedGraph:
    """An ONNX file's bytes, the files its tensors refer to, and what was read from it."""

    onnx: bytes
    external: Mapping[str, bytes]
    model: OnnxModel


@dataclass(frozen=True)
class Artifact:
    """A checked artifact in memory. Make sessions from these bytes, not from the folder's files.

    `initial` maps torch's names of parameters and buffers to read-only arrays.
    """

    manifest: Manifest
    graphs: Mapping[str, CheckedGraph]
    initial: Mapping[str, safetensors.Array]


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Only the manifest of an artifact folder; the other files stay unread and unchecked."""
    if (Path(directory) / FULL_FILE).is_file():
        names = sorted(each.name for each in Path(directory).iterdir() if each.is_dir())
        raise ArtifactError(
            f"{directory} is a ladder's folder; its artifacts are the rungs in it: "
            f"{', '.join(names)}"
        )
    return Manifest.parse(read_file(Path(directory), MANIFEST_FILE, MAX_MANIFEST_BYTES))


def load_artifact(
    directory: str | os.PathLike[str], shared: MutableMapping[str, bytes] | None = None
) -> Artifact:
    """Read and check an artifact folder.

    ``shared``: bytes by name of the files that rungs of a ladder share, as far as they were read
    before; it gets this artifact's, so that several rungs hold one copy.

    Raises ArtifactError naming what is wrong: a missing or changed file, an unknown format version,
    an operator outside the standard domain, tensor data outside the listed files, or a graph or
    initial value that disagrees with the manifest.
    """
    folder = Path(directory)
    manifest = read_manifest(folder)
    used = {INITIAL_FILE}
    graphs = {}
    for name, graph in manifest.graphs.items():
        onnx = read_checked(folder, graph.file, manifest.files[graph.file])
        model = read_onnx(onnx)
        check_agreement(manifest, graph, model)
        external = {
            location: read_checked(folder, location, manifest.files[location])
            for location in sorted(model.external)
        }
        graphs[name] = CheckedGraph(onnx, external, model)
        used |= {graph.file, *external}
    # Files that nothing uses (a licence, say) are still part of what the id vouches for.
    for name in sorted(set(manifest.files) - used):
        read_checked(folder, name, manifest.files[name])
    return Artifact(manifest, graphs, load_initial(folder, manifest, shared))


def load_initial(
    directory: str | os.PathLike[str],
    manifest: Manifest,
    shared: MutableMapping[str, bytes] | None = None,
) -> Mapping[str, safetensors.Array]:
    """Initial parameters and buffers of an artifact folder, which must be the manifest's.

    A submodel's are parts of the full model where that lies beside its folder, as the exporter
    leaves it; on a device, where a task brings them, stand-ins.
    """
    folder = Path(directory)
    data = read_checked(folder, INITIAL_FILE, manifest.files[INITIAL_FILE])
    beside = folder.resolve().parent
    known = {} if shared is None else shared
    if manifest.shared is not None and manifest.shared_file not in known:
        name = manifest.shared_file
        known[name] = read_checked(beside, name, manifest.shared)
    initial = checked_initial(manifest, data, known.get(manifest.shared_file))
    if manifest.submodel is None or not (beside / FULL_FILE).exists():
        return initial
    full = read_file(beside, FULL_FILE, MAX_FILE_BYTES)
    if hashlib.sha256(full).hexdigest() != manifest.submodel.full:
        raise ArtifactError(f"{beside / FULL_FILE} is not of the model that {folder} is a part of")
    shapes = {name: initial[name].shape for name in initial if name in manifest.given}
    parts = part_of(safetensors.decode(full).tensors, manifest.submodel, shapes)
    return {**initial, **parts}


def checked_initial(
    manifest: Manifest, data: bytes, shared: bytes | None = None
) -> Mapping[str, safetensors.Array]:
    """Initial parameters and buffers by torch's names, checked against the manifest; stand-ins for
    those that a task brings, and for those that lie in the shared file where that is not given."""
    tensors = dict(safetensors.decode(data).tensors)
    sizes = manifest.example_sizes
    found: dict[str, safetensors.Array] = {}
    wanted = {
        member.name: (state.dtype, resolve(member.shape, sizes))
        for state, member in manifest.members()
    }
    own = set(wanted) - manifest.given
    beside = own - set(tensors) if manifest.shared is not None else set()
    if shared is not None:
        others = safetensors.decode(shared).tensors
        tensors |= {name: others[name] for name in beside & set(others)}
        beside = set()
    odd = sorted((own - beside) ^ set(tensors))
    if odd:
        side = "lacks" if odd[0] in wanted else "holds the unknown"
        raise ArtifactError(f"{INITIAL_FILE} {side} tensor {odd[0]!r}")
    for name, (dtype, shape) in wanted.items():
        array = tensors[name] if name in tensors else stand_in(shape)
        if (array.dtype.name, array.shape) != (dtype, shape):
            raise ArtifactError(
                f"{INITIAL_FILE}: {name!r} is {array.dtype.name}{list(array.shape)}, the manifest "
                f"says {dtype}{list(shape)}"
            )
        found[name] = array
    return found


def rung_folders(directory: Path) -> list[Path]:
    """The artifacts of a ladder's folder, smallest first; the folder itself where it is no ladder.

    Raises ArtifactError where it has none, or no full model's values, one of them is none of a
    submodel, or two are of one rung.
    """
    if not (directory / FULL_FILE).is_file():
        own = (directory / MANIFEST_FILE).exists()
        inside = () if own else directory.glob(f"*/{MANIFEST_FILE}")
        if not any(read_manifest(each.parent).submodel for each in inside):
            return [directory]
        raise ArtifactError(
            f"{FULL_FILE}, the full model's first values, is missing in {directory}: keep the "
            "folder as export.submodels wrote it"
        )
    found: dict[int, Path] = {}
    for each in directory.iterdir():
        if each.is_dir():
            submodel = read_manifest(each).submodel
            if submodel is None:
                raise ArtifactError(f"{each} lies in a ladder's folder, and is no submodel")
            if submodel.rung in found:
                raise ArtifactError(
                    f"{found[submodel.rung].name} and {each.name} in {directory} are both rung "
                    f"{submodel.rung}: remove one of them"
                )
            found[submodel.rung] = each
    if not found:
        raise ArtifactError(f"{directory} is a ladder's folder without any rung in it")
    return [found[rung] for rung in sorted(found)]


# A graph whose inputs that never change are constants: onnxruntime can then work ahead with them.

_GRAPH, _INITIALIZER, _INPUT = 7, 5, 11


def with_constants(graph: CheckedGraph, values: Mapping[str, Array]) -> CheckedGraph:
    """The checked graph with some of its inputs, by their names, as initializers.

    The data lie beside the file, as `external` data do, so that they are copied only once.
    """
    if not values:
        return graph
    budget = Budget()
    files: dict[str, bytes] = {}
    constants = []
    for index, (name, array) in enumerate(values.items()):
        # No name of an artifact's file has a slash in it.
        location = f"constant/{index}"
        files[location] = array.tobytes()
        constants.append(write.data(_INITIALIZER, write.external_tensor(name, array, location)))
    parts = []
    for number, wire, value in fields(memoryview(graph.onnx), budget):
        if number != _GRAPH:
            parts.append(write.copied(number, wire, value))
            continue
        body = [
            write.copied(inner, kind, each)
            for inner, kind, each in fields(message(wire, value, "graph"), budget)
            if inner != _INPUT or _name(message(kind, each, "input"), budget) not in values
        ]
        parts.append(write.data(_GRAPH, b"".join([*body, *constants])))
    return CheckedGraph(b"".join(parts), {**graph.external, **files}, graph.model)


def _name(value_info: memoryview, budget: Budget) -> str:
    for number, wire, value in fields(value_info, budget):
        if number == 1:
            return text(wire, value, "input's name")
    return ""


# Reading an artifact's files without trusting the folder.
