"""Files: artifacts, checkpoints, task files."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from aggregator.errors import AggregatorError, TaskError
from aggregator.methods.attention import AttentionSettings
from aggregator.methods.fedavg import FedAvgSettings
from aggregator.methods.mutual import MutualSettings
from aggregator.methods.prototypes import PrototypesSettings
from aggregator.methods.scatter import ScatterMethod
from aggregator.methods.teacher_logits import TeacherLogitsSettings
from aggregator.task.file import read_task
from aggregator.task.template import task_template
from aggregator.task.warm_start import WarmStart
from device_sdk.artifact import Artifact, FileEntry, GraphFile, MetricSource, OptimizerSpec
from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.load import CheckedGraph, check_agreement, checked_initial, with_constants
from device_sdk.artifact.manifest import INITIAL_FILE, Manifest
from device_sdk.artifact.onnx_reader import read_onnx
from device_sdk.artifact.safetensors import decode, encode
from device_sdk.artifact.standalone import standalone_onnx
from device_sdk.errors import CheckpointError
from device_sdk.factorisation import packaged_artifact
from device_sdk.methods.mutual.contract import MutualTraining
from device_sdk.methods.prototypes.contract import PrototypesTraining
from device_sdk.methods.teacher_logits.contract import TeacherLogitsTraining
from device_sdk.runtime.state import Checkpoint, decode_checkpoint, encode_checkpoint
from device_sdk.wire.codec.errors import WireError
from device_sdk.wire.publish.content import pack_artifact, unpack_artifact
from tests.fakes.handmade.linear import frozen_manifest, gated_manifest, linear_parts
from tests.fakes.handmade.writing import LOSS
from tests.fuzz.target import Target

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_REFUSED = (ArtifactError,)


def _bundle(data: bytes) -> None:
    unpack_artifact(data, hashlib.sha256(_files()["manifest.json"]).digest())


def _manifest(data: bytes) -> None:
    Manifest.parse(data)


def _constants(data: bytes) -> None:
    """A train graph that a manifest agrees with, with its frozen state inside."""
    manifest = linear_parts()[0]
    model = read_onnx(data)
    check_agreement(manifest, manifest.graphs["train"], model)
    frozen = {"state.mean": np.ones(4, np.float32)}
    inside = read_onnx(with_constants(CheckedGraph(data, {}, model), frozen).onnx)
    assert {value.name for value in model.inputs} - {v.name for v in inside.inputs} == set(frozen)
    assert inside.initializers == model.initializers | set(frozen)


def _whole_manifest() -> Manifest:
    """One that has every field."""
    frozen = frozen_manifest()
    infer = frozen.graphs["infer"]
    batch = frozen.graphs["train"].select("batch")
    states = tuple(infer.select("state"))
    evaluate = GraphFile("evaluate.onnx", (*states, *batch), (LOSS, *infer.outputs))
    settings = {"clipped.norm": 1.0, "rest.optimizer": "adamw", "rest.betas": [0.9, 0.999]}
    return replace(
        frozen,
        sequential=True,
        ignored=("row_id",),
        metrics={"loss": MetricSource(), "mae": MetricSource("prediction", "y")},
        graphs={**frozen.graphs, "evaluate": evaluate},
        files={**frozen.files, "evaluate.onnx": FileEntry.of(b"")},
        optimizer=OptimizerSpec("sgd", {**settings, "rest.parameters": ["linear.weight"]}),
    )


@lru_cache
def _files() -> dict[str, bytes]:
    folder = packaged_artifact()
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@lru_cache
def _task_folder() -> Path:
    # In memory where there is such a file system: the parser is what is tried here.
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    (folder / "items.tsv").write_text("a\tA film\n")
    (folder / "model").mkdir()
    for name in ("broker-password", "ca.pem", "client.pem", "client.key"):
        (folder / name).write_text("secret\n")
    return folder


def _task(data: bytes) -> None:
    path = _task_folder() / "task.toml"
    path.write_bytes(data)
    read_task(path)


def _standalone(data: bytes) -> None:
    """An inference graph that a manifest agrees with, with its parameters put inside."""
    manifest, files = linear_parts()
    infer = manifest.graphs["infer"]
    model = read_onnx(data)
    check_agreement(manifest, infer, model)
    initial = checked_initial(manifest, files[INITIAL_FILE])
    artifact = Artifact(manifest, {"infer": CheckedGraph(data, {}, model)}, initial)
    read_onnx(standalone_onnx(artifact, initial, producer=("tessera", "1"), metadata={}))


def _warm_start(data: bytes) -> None:
    path = _task_folder() / "model.safetensors"
    path.write_bytes(data)
    method = ScatterMethod(np.ones((3, 2), np.float32))
    # No other version is asked for, so no store.
    WarmStart.read(path.name, path.parent).begin(method, None, None, ("a", "b", "c"))  # type: ignore[arg-type]
    assert np.isfinite(method.items).all() and method.version == 0


def _model_files() -> Sequence[bytes]:
    items = np.arange(6, dtype=np.float32).reshape(3, 2)
    ids = {"items": json.dumps(["c", "a", "x"])}
    return [encode({"items": items}, ids), encode({"items": items[:2].astype(np.float16)})]


def _onnx_seeds() -> Sequence[bytes]:
    return [data for name, data in _files().items() if name.endswith(".onnx")]


def _checkpoint() -> bytes:
    state = {"items": np.ones((2, 3), dtype=np.float32), "step": np.asarray(3)}
    return encode_checkpoint(Checkpoint("0" * 64, 1, state))


FILE_TARGETS = (
    Target(
        "manifest-json",
        _manifest,
        lambda: [
            _files()["manifest.json"],
            _whole_manifest().to_json(),
            gated_manifest().to_json(),
        ],
        _REFUSED,
        1 << 14,
    ),
    Target("constants", _constants, lambda: [linear_parts()[1]["train.onnx"]], _REFUSED, 1 << 15),
    Target("onnx", read_onnx, _onnx_seeds, _REFUSED, 1 << 15),
    Target("safetensors", decode, lambda: [_files()["initial.safetensors"]], _REFUSED, 1 << 13),
    Target(
        "standalone",
        _standalone,
        lambda: [linear_parts()[1]["infer.onnx"]],
        _REFUSED,
        1 << 15,
    ),
    Target("warm-start", _warm_start, _model_files, (AggregatorError,)),
    Target("bundle", _bundle, lambda: [pack_artifact(_files())], (WireError,), 1 << 16),
    Target("checkpoint", decode_checkpoint, lambda: [_checkpoint()], (CheckpointError,)),
    Target(
        "task",
        _task,
        lambda: [task_template().encode(), _uncommented().encode(), *map(_method_task, _METHODS)],
        (TaskError,),
    ),
)


_METHODS: Mapping[str, DataclassInstance] = {
    "attention": AttentionSettings(),
    "fedavg": FedAvgSettings(),
    "mutual": MutualSettings(MutualTraining(3)),
    "prototypes": PrototypesSettings(PrototypesTraining(3), trained=True),
    "teacher_logits": TeacherLogitsSettings(TeacherLogitsTraining(3)),
}


def _method_task(method: str) -> bytes:
    """A task of a method on arrays, with every key of the method's tables."""
    artifacts = 'artifacts = ["model"]'
    head = f'[task]\nmethod = "{method}"\n{artifacts}\n[broker]\nurl = "mqtt://127.0.0.1"\n'
    return "\n".join([head, *_toml(method, _METHODS[method])]).encode()


def _toml(table: str, settings: DataclassInstance) -> Iterator[str]:
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    yield f"[{table}]"
    yield from (
        f"{name} = {json.dumps(value)}"
        for name, value in values.items()
        if isinstance(value, (bool, int, float, str))
    )
    for name, value in values.items():
        if is_dataclass(value):
            yield from _toml(f"{table}.{name}", value)


def _uncommented() -> str:
    """Every key of the template, so that the fuzzer finds them all."""
    every = re.sub(r"(?m)^# (?:e\.g\. )?(?=\w+ = |\[)", "", task_template())
    return every.replace("mqtt://", "mqtts://")
