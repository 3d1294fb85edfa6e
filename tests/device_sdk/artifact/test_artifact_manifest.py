"""The manifest: canonical bytes, round trips, and everything it refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.artifact import (
    ArtifactError,
    Axis,
    FileEntry,
    GraphFile,
    Manifest,
    Member,
    OptimizerSpec,
    Port,
    StateTensor,
)
from device_sdk.artifact.submodels import Piece, Submodel
from tests.fakes.handmade import factor_parts, frozen_manifest, gated_manifest, linear_parts

LINEAR, FACTORS, FROZEN = linear_parts()[0], factor_parts()[0], frozen_manifest()
GATED = gated_manifest()
PIECES = {"linear.weight": Piece("net.w", "slice", (2, 1)), "linear.bias": Piece("net.b")}
PART = dataclasses.replace(LINEAR, submodel=Submodel(1, 2, "0" * 64, PIECES))
BYTES = PART.to_json()


@pytest.mark.parametrize("manifest", [LINEAR, FACTORS, FROZEN, GATED, PART])
def test_round_trip_is_exact(manifest: Manifest) -> None:
    data = manifest.to_json()
    again = Manifest.parse(data)
    assert again == manifest
    assert again.to_json() == data
    assert again.id == hashlib.sha256(data).hexdigest()
    assert data == json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()


def test_settings_keep_their_types() -> None:
    settings = {
        "betas": [0.9, 0.999],
        "eps": 1e-08,
        "q": 3,
        "decoupled": True,
        "note": "é",
        "x": None,
    }
    manifest = dataclasses.replace(LINEAR, optimizer=OptimizerSpec("adam", settings))
    again = Manifest.parse(manifest.to_json())
    assert again == manifest
    assert again.optimizer.settings == {**settings, "betas": (0.9, 0.999)}
    with pytest.raises(ArtifactError, match="finite"):
        OptimizerSpec("adam", {"eps": float("inf")})
    with pytest.raises(ArtifactError, match="not dict"):
        OptimizerSpec("adam", {"eps": {}})


def test_a_least_size() -> None:
    axes = {name: dataclasses.replace(axis, least=2) for name, axis in LINEAR.axes.items()}
    manifest = dataclasses.replace(LINEAR, axes=axes)
    value = json.loads(manifest.to_json())
    assert value["axes"]["batch"]["least"] == 2
    assert Manifest.parse(manifest.to_json()) == manifest
    assert (manifest.least_sizes(), LINEAR.least_sizes()) == ({"batch": 2}, {})


def changed(edit: Callable[[Any], object], data: bytes = BYTES) -> bytes:
    value = json.loads(data)
    edit(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def test_what_a_step_keeps() -> None:
    assert (LINEAR.kept, FROZEN.kept) == (frozenset(), {"mean"})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m["state"][0].update(in_place=False), "in_place is False; expected left out"),
        (lambda m: m["state"][1].update(in_place=True), "in_place is true of parameters and"),
        (lambda m: m["graphs"]["train"]["inputs"].pop(), "come together"),
        (lambda m: m["graphs"]["train"]["outputs"].pop(), "come together"),
        (lambda m: m["graphs"]["train"]["outputs"].pop(-2), "come together"),
        (lambda m: m["graphs"]["train"]["outputs"][-1].update(shape=[4]), "of one fixed length"),
        (lambda m: m["graphs"]["train"]["outputs"][-2].update(dtype="int64"), "is a bool scalar"),
        (
            lambda m: m["graphs"]["infer"]["inputs"].append(m["graphs"]["train"]["inputs"][-1]),
            "come",
        ),
    ],
)
def test_gates(edit: Callable[[Any], object], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        Manifest.parse(changed(edit, GATED.to_json()))


def test_state_in_place_needs_a_gate() -> None:
    state = tuple(dataclasses.replace(t, in_place=t.name == "packed") for t in LINEAR.state)
    with pytest.raises(ArtifactError, match="has no outputs begun and done"):
        dataclasses.replace(LINEAR, state=state)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.update(format_version=2), "format version 2 is unknown.*reads 1: update"),
        (lambda m: m.update(format_version=0), "format version 0 is unknown.*export the artifact"),
        (lambda m: m.update(format="other"), "no Tessera artifact"),
        (lambda m: m.update(extra=1), "a map with extra.; expected a map of axes, files"),
        (lambda m: m.pop("state"), "a map without state"),
        (lambda m: m.update(opset="20"), "opset is '20'; expected an integer"),
        (lambda m: m.update(opset=True), "opset is True; expected an integer"),
        (lambda m: m.update(sequential=0), "sequential is 0; expected true or false"),
        (lambda m: m["axes"].clear(), "axis 'batch' is not declared"),
        (lambda m: m["axes"].update(batch={"example": 0}), "example is 0; .* at least 1"),
        (lambda m: m["axes"].update(batch={"example": 4, "least": 5}), "is 4, below 5"),
        (lambda m: m["axes"].update(batch={"example": 4, "least": 0}), "least is 0; .* at least 1"),
        (
            lambda m: m["axes"].update(batch={"example": 4, "least": True}),
            "least is True; expected an integer",
        ),
        (
            lambda m: m["axes"].update(batch={"example": 4, "least": 1}),
            "expected left out where",
        ),
        (lambda m: m["state"].pop(3), "exactly one counter"),
        (lambda m: m["state"].append(m["state"][0]), "packed given more than once"),
        (
            lambda m: m["state"][0].update(kind="weights"),
            "expected one of parameter",
        ),
        (
            lambda m: m["state"][0].update(dtype="bfloat16"),
            "expected one of float32",
        ),
        (lambda m: m["state"][0].update(shape=[14]), "its members need 15 elements, it has 14"),
        (lambda m: m["state"][0]["members"][1].update(offset=11), "overlaps"),
        (lambda m: m["state"][0]["members"][1].update(offset=-1), "offset is -1; .* at least 0"),
        (lambda m: m["state"][1].update(frozen=True), "changes the frozen state 'mean'"),
        (lambda m: m["state"][1].update(frozen=False), "frozen is False; expected left out"),
        (lambda m: m["state"][0].update(frozen=True), "frozen is true of buffers only"),
        (lambda m: m["state"][2].update(like="mean"), r"expected that, after fixed axes"),
        (lambda m: m["state"][2].update(like="step"), "neither a parameter nor a buffer"),
        (lambda m: m["state"][2].update(like=None), "like is None; expected left out"),
        (lambda m: m["graphs"].pop("train"), "'train' is missing"),
        (lambda m: m["graphs"].update(other=m["graphs"]["train"]), "expected one of train, infer"),
        (lambda m: m["graphs"]["train"].update(file="../train.onnx"), "expected a file name"),
        (lambda m: m["graphs"]["train"].update(file="/etc/passwd"), "expected a file name"),
        (lambda m: m["graphs"]["train"].update(file="CON.onnx"), "expected a file name"),
        (lambda m: m["graphs"]["train"].update(file="other.onnx"), "no entry for other.onnx"),
        (lambda m: m["graphs"]["train"]["outputs"].pop(2), "without a matching output: packed"),
        (lambda m: m["graphs"]["train"]["inputs"].pop(0), "without a matching input: packed"),
        (lambda m: m["graphs"]["train"]["outputs"].pop(1), "has no guard output"),
        (
            lambda m: m["graphs"]["train"]["outputs"][0].update(role="batch"),
            "not one of the outputs",
        ),
        (
            lambda m: m["graphs"]["train"]["outputs"][0].update(shape=[1]),
            "loss is a float32 scalar",
        ),
        (lambda m: m["graphs"]["train"]["inputs"][0].update(shape=[16]), "but its state tensor"),
        (lambda m: m["graphs"]["train"]["inputs"][0].update(of="pack"), "unknown state 'pack'"),
        (
            lambda m: m["graphs"]["train"]["inputs"][4].update(shape=[None, 4]),
            "only an output",
        ),
        (
            lambda m: m["graphs"]["train"]["inputs"][4].update(shape=[0, 4]),
            r"shape\[0\] is 0; ",
        ),
        (
            lambda m: m["graphs"]["train"]["inputs"][4].update(shape=[1.5, 4]),
            r"\[0\] is 1.5; ",
        ),
        (
            lambda m: m["graphs"]["train"]["inputs"][6].pop("default"),
            "and only they",
        ),
        (
            lambda m: m["graphs"]["train"]["inputs"][6].update(default=1),
            "default is 1; ",
        ),
        (
            lambda m: m["graphs"]["train"]["inputs"][4].update(default=1.0),
            "and only they",
        ),
        (lambda m: m["graphs"]["infer"]["outputs"].clear(), "no output"),
        (lambda m: m["graphs"]["infer"]["inputs"][1].update(dtype="float64"), "differs between"),
        (
            lambda m: m["files"].update({"a/b": m["files"]["train.onnx"]}),
            "expected a file name",
        ),
        (
            lambda m: m["files"].update({"..": m["files"]["train.onnx"]}),
            "expected a file name",
        ),
        (
            lambda m: m["files"].update({"manifest.json": m["files"]["train.onnx"]}),
            "cannot describe itself",
        ),
        (lambda m: m["files"].pop("initial.safetensors"), "no entry for initial.safetensors"),
        (lambda m: m["files"]["train.onnx"].update(sha256="ABC"), "expected a SHA-256"),
        (lambda m: m["files"]["train.onnx"].update(bytes=-1), "is -1; expected an integer from 0"),
        (lambda m: m.update(name="a\nb"), "expected a name"),
        (lambda m: m.update(name=""), "expected a name"),
    ],
)
def test_refusals(edit: Callable[[Any], object], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        Manifest.parse(changed(edit))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "no Tessera artifact"),
        (b"[" * 100_000, "nested too deeply|not JSON"),
        (b'{"a":1,"a":2}', "same key twice"),
        (b'{"a":NaN}', "NaN is no JSON number"),
        (b'{"a":' + b"9" * 10_000 + b"}", "not JSON"),
        (json.dumps(json.loads(BYTES), indent=1).encode(), "canonical"),
        (BYTES + b"\n", "canonical"),
        (BYTES.replace(b'"linear"', b'"\\u006cinear"'), "canonical"),
        (BYTES.replace(b'"linear"', b'"\\ud800"'), "expected a name"),
    ],
)
def test_bytes_that_are_no_manifest(data: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        Manifest.parse(data)


def test_construction_refuses_what_parsing_refuses() -> None:
    with pytest.raises(ArtifactError, match="exactly one member of the same shape"):
        StateTensor("w", "parameter", "float32", ("n",), (Member("w", (3,), 0),))
    with pytest.raises(ArtifactError, match="lists its members"):
        StateTensor("w", "parameter", "float32", (3,))
    with pytest.raises(ArtifactError, match="say what it is like"):
        dataclasses.replace(
            FACTORS, state=(*FACTORS.state, StateTensor("m", "optimizer", "float32", ("k",)))
        )
    with pytest.raises(ArtifactError, match="counter is an int64 scalar"):
        StateTensor("step", "counter", "int32", ())
    with pytest.raises(ArtifactError, match="more than one seed"):
        GraphFile("g.onnx", tuple(Port(n, "seed", n, "int64", ()) for n in "ab"), ())
    with pytest.raises(ArtifactError, match=r"a shape of at most .* elements"):
        Member("w", (2**30, 2**30), 0)
    with pytest.raises(ArtifactError, match="example is True; expected an integer of at least 1"):
        Axis(True)
    assert FileEntry.of(b"abc").size == 3


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.data())
def test_a_manifest_with_any_value_replaced_parses_or_is_refused(data: st.DataObject) -> None:
    root = json.loads(BYTES)
    node, key = root, data.draw(st.sampled_from(sorted(root)))
    while isinstance(node[key], (dict, list)) and node[key] and data.draw(st.booleans()):
        node = node[key]
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = data.draw(st.sampled_from(keys))
    if isinstance(node, dict) and data.draw(st.booleans()):
        node[data.draw(st.text(max_size=5))] = node.pop(key)
    else:
        node[key] = data.draw(json_values)
    mutated = json.dumps(root, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    try:
        manifest = Manifest.parse(mutated.encode("utf-8", "surrogatepass"))
    except ArtifactError:
        return
    assert manifest.to_json() == mutated.encode()


@given(st.binary(max_size=200), st.integers(0, len(BYTES)))
def test_random_bytes_are_refused(noise: bytes, cut: int) -> None:
    for data in (noise, BYTES[:cut] + noise, BYTES[:cut] + noise + BYTES[cut + len(noise) :]):
        try:
            assert Manifest.parse(data).to_json() == data
        except ArtifactError:
            continue
