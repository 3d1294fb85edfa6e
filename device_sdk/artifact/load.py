"""Safe loading: every byte of an artifact is checked before anything runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from device_sdk.artifact import safetensors
from device_sdk.artifact.agreement import check_agreement
from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.folder import read_checked, read_file
from device_sdk.artifact.manifest import INITIAL_FILE, MANIFEST_FILE, Manifest
from device_sdk.artifact.manifest_json import MAX_MANIFEST_BYTES
from device_sdk.artifact.onnx_reader import OnnxModel, read_onnx
from device_sdk.artifact.shapes import resolve


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
    return Manifest.parse(read_file(Path(directory), MANIFEST_FILE, MAX_MANIFEST_BYTES))


def load_artifact(directory: str | os.PathLike[str]) -> Artifact:
    """Read and check an artifact folder.

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
    initial = read_checked(folder, INITIAL_FILE, manifest.files[INITIAL_FILE])
    # Files that nothing uses (a licence, say) are still part of what the id vouches for.
    for name in sorted(set(manifest.files) - used):
        read_checked(folder, name, manifest.files[name])
    return Artifact(manifest, graphs, checked_initial(manifest, initial))


def checked_initial(manifest: Manifest, data: bytes) -> Mapping[str, safetensors.Array]:
    """Initial parameters and buffers by torch's names, checked against the manifest."""
    tensors = safetensors.decode(data).tensors
    sizes = manifest.example_sizes
    wanted = {}
    for state, member in manifest.members():
        wanted[member.name] = (state.dtype, resolve(member.shape, sizes))
    odd = sorted(set(wanted) ^ set(tensors))
    if odd:
        side = "lacks" if odd[0] in wanted else "holds the unknown"
        raise ArtifactError(f"{INITIAL_FILE} {side} tensor {odd[0]!r}")
    for name, (dtype, shape) in wanted.items():
        array = tensors[name]
        if (array.dtype.name, array.shape) != (dtype, shape):
            raise ArtifactError(
                f"{INITIAL_FILE}: {name!r} is {array.dtype.name}{list(array.shape)}, the manifest "
                f"says {dtype}{list(shape)}"
            )
    return {name: tensors[name] for name in wanted}
