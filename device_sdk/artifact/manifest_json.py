"""The manifest as JSON: to plain objects and back, and the canonical bytes that its id hashes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from device_sdk.artifact import json_fields
from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.json_fields import JsonFields
from device_sdk.artifact.parts import GraphFile, Member, MetricSource, Port, StateTensor
from device_sdk.artifact.shapes import Shape, checked_name

if TYPE_CHECKING:
    from device_sdk.artifact.manifest import Axis, Manifest

Setting = None | bool | int | float | str | tuple["Setting", ...]
MAX_MANIFEST_BYTES = 16 * 2**20


def canonical(value: object) -> bytes:
    """UTF-8 JSON with sorted keys and no insignificant white space."""
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode("utf-8")
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"the manifest cannot be written as JSON: {error}") from None


def decoded(data: bytes) -> object:
    """The JSON value of manifest.json's bytes."""
    return json_fields.decoded(data, "manifest.json", MAX_MANIFEST_BYTES)


def frozen_settings(settings: Mapping[str, object]) -> dict[str, Setting]:
    """An optimizer's settings with lists as tuples. Raises ArtifactError for other types."""
    return {
        checked_name(key, "optimizer setting"): _frozen(value, 0) for key, value in settings.items()
    }


def _frozen(value: object, depth: int) -> Setting:
    if isinstance(value, (list, tuple)) and depth < 4:
        return tuple(_frozen(entry, depth + 1) for entry in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ArtifactError(f"optimizer settings are finite numbers, not {value}")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ArtifactError(
        f"optimizer settings are numbers, strings and lists of them, not {type(value).__name__}"
    )


def manifest_to_object(manifest: Manifest) -> dict[str, object]:
    """The manifest as JSON values."""
    from device_sdk.artifact.manifest import FORMAT, FORMAT_VERSION

    metrics = {name: _source_to_object(source) for name, source in manifest.metrics.items()}
    return {
        **({"metrics": metrics} if metrics else {}),
        **({"ignored": list(manifest.ignored)} if manifest.ignored else {}),
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "name": manifest.name,
        "opset": manifest.opset,
        "producer": dict(manifest.producer),
        "axes": {name: _axis_to_object(axis) for name, axis in manifest.axes.items()},
        "sequential": manifest.sequential,
        "state": [_state_to_object(tensor) for tensor in manifest.state],
        "optimizer": {
            "name": manifest.optimizer.name,
            "settings": dict(manifest.optimizer.settings),
        },
        "graphs": {
            name: {
                "file": graph.file,
                "inputs": [_port_to_object(port) for port in graph.inputs],
                "outputs": [_port_to_object(port) for port in graph.outputs],
            }
            for name, graph in manifest.graphs.items()
        },
        "files": {
            name: {"bytes": entry.size, "sha256": entry.sha256}
            for name, entry in manifest.files.items()
        },
    }


def _axis_to_object(axis: Axis) -> dict[str, int]:
    least = {"least": axis.least, "least_to_train": axis.least_to_train}
    return {"example": axis.example, **{key: size for key, size in least.items() if size > 1}}


def _source_to_object(source: MetricSource) -> dict[str, str]:
    found = {"output": source.output, "target": source.target, "scale": source.scale}
    return {key: name for key, name in found.items() if name is not None}


def _state_to_object(tensor: StateTensor) -> dict[str, object]:
    found: dict[str, object] = {
        "name": tensor.name,
        "kind": tensor.kind,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
    }
    if tensor.members:
        found["members"] = [
            {"name": member.name, "shape": list(member.shape), "offset": member.offset}
            for member in tensor.members
        ]
    if tensor.like is not None:
        found["like"] = tensor.like
    if tensor.frozen:
        found["frozen"] = True
    if tensor.in_place:
        found["in_place"] = True
    return found


def _port_to_object(port: Port) -> dict[str, object]:
    found: dict[str, object] = {
        "name": port.name,
        "role": port.role,
        "of": port.of,
        "dtype": port.dtype,
        "shape": list(port.shape),
    }
    if port.default is not None:
        found["default"] = port.default
    return found


def manifest_from_object(value: object) -> Manifest:
    """The manifest of JSON values. Raises ArtifactError naming the first thing that is wrong."""
    from device_sdk.artifact.manifest import (
        FORMAT,
        FORMAT_VERSION,
        Axis,
        FileEntry,
        Manifest,
        OptimizerSpec,
    )

    top = JsonFields(value, "manifest")
    # The version comes first: a later version's other keys are no reason to call it malformed.
    if top.take("format") != FORMAT:
        raise ArtifactError(f"manifest: format is not {FORMAT!r}: this is no Tessera artifact")
    version = top.integer("format_version")
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"manifest: format version {version} is unknown to this release, which reads "
            f"{FORMAT_VERSION}: update tessera-edge, or export the artifact again with this one"
        )
    producer = JsonFields(top.take("producer"), "producer")
    optimizer = JsonFields(top.take("optimizer"), "optimizer")
    axes = {}
    for name, entry in top.mapping("axes").items():
        fields = JsonFields(entry, f"axis {name!r}")
        least = [fields.optional(key) for key in ("least", "least_to_train")]
        if not all(isinstance(each, int | None) and not isinstance(each, bool) for each in least):
            raise ArtifactError(
                f"{fields.where}: least and least_to_train are integers, or left out"
            )
        sizes = [each if isinstance(each, int) else 1 for each in least]
        axes[name] = Axis(fields.integer("example"), *sizes)
        fields.end()
    metrics = {}
    for name, entry in top.mapping("metrics").items() if "metrics" in top.names() else ():
        fields = JsonFields(entry, f"metric {name!r}")
        metrics[name] = MetricSource(
            *(_text_or_none(fields, key) for key in ("output", "target", "scale"))
        )
        fields.end()
    ignored = top.array("ignored") if "ignored" in top.names() else []
    if not all(isinstance(name, str) for name in ignored):
        raise ArtifactError("manifest: ignored is a list of names of batch entries")
    files = {}
    for name, entry in top.mapping("files").items():
        fields = JsonFields(entry, f"file {name!r}")
        files[name] = FileEntry(fields.integer("bytes"), fields.text("sha256"))
        fields.end()
    manifest = Manifest(
        name=top.text("name"),
        opset=top.integer("opset"),
        axes=axes,
        state=tuple(_state(entry) for entry in top.array("state")),
        optimizer=OptimizerSpec(
            optimizer.text("name"), frozen_settings(optimizer.mapping("settings"))
        ),
        graphs={name: _graph(entry, name) for name, entry in top.mapping("graphs").items()},
        files=files,
        producer={key: producer.text(key) for key in top.mapping("producer")},
        sequential=top.boolean("sequential"),
        metrics=metrics,
        ignored=tuple(map(str, ignored)),
    )
    optimizer.end()
    top.end()
    return manifest


def _text_or_none(fields: JsonFields, key: str) -> str | None:
    value = fields.optional(key)
    if value is not None and not isinstance(value, str):
        raise ArtifactError(f"{fields.where}: {key} is a text")
    return value


def _named(value: object, what: str) -> JsonFields:
    name = f" {value.get('name')!r:.80}" if isinstance(value, dict) else ""
    return JsonFields(value, what + name)


def _state(value: object) -> StateTensor:
    fields = _named(value, "state tensor")
    members = fields.optional("members")
    if members is not None and not (isinstance(members, list) and members):
        raise ArtifactError(f"{fields.where}: members is a list that is not empty")
    like = fields.optional("like")
    if like is not None and not isinstance(like, str):
        raise ArtifactError(f"{fields.where}: like is the name of a state tensor")
    frozen, in_place = (_flag(fields, key) for key in ("frozen", "in_place"))
    tensor = StateTensor(
        name=fields.text("name"),
        kind=fields.text("kind"),
        dtype=fields.text("dtype"),
        shape=_shape(fields),
        members=tuple(_member(entry) for entry in members or ()),
        like=like,
        frozen=frozen,
        in_place=in_place,
    )
    fields.end()
    return tensor


def _flag(fields: JsonFields, key: str) -> bool:
    value = fields.optional(key)
    if value not in (None, True):
        raise ArtifactError(f"{fields.where}: {key} is true, or left out")
    return value is not None


def _member(value: object) -> Member:
    fields = JsonFields(value, "member")
    member = Member(fields.text("name"), _shape(fields), fields.integer("offset"))
    fields.end()
    return member


def _graph(value: object, name: str) -> GraphFile:
    fields = JsonFields(value, f"graph {name!r}")
    graph = GraphFile(
        file=fields.text("file"),
        inputs=tuple(_port(entry) for entry in fields.array("inputs")),
        outputs=tuple(_port(entry) for entry in fields.array("outputs")),
    )
    fields.end()
    return graph


def _port(value: object) -> Port:
    fields = _named(value, "graph input or output")
    default = fields.optional("default")
    if default is not None and not isinstance(default, float):
        raise ArtifactError(f"{fields.where}: default is written with a decimal point or exponent")
    port = Port(
        name=fields.text("name"),
        role=fields.text("role"),
        of=fields.text("of"),
        dtype=fields.text("dtype"),
        shape=_shape(fields),
        default=default,
    )
    fields.end()
    return port


def _shape(fields: JsonFields) -> Shape:
    shape = []
    for dim in fields.array("shape"):
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, (int, str))):
            raise ArtifactError(
                f"{fields.where}: {dim!r:.80} is no length: expected a positive integer, the name "
                "of an axis, or (in an output) null"
            )
        shape.append(dim)
    return tuple(shape)
