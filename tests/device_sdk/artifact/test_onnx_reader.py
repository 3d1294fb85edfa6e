"""The minimal ONNX reader against the onnx package, and against hostile bytes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from device_sdk.artifact import ArtifactError
from device_sdk.artifact.onnx_reader import read_onnx
from tests.fakes.handmade import factor_parts, linear_parts

LINEAR = linear_parts()[1]["train.onnx"]
FACTORS = factor_parts()[1]["train.onnx"]


def model_with(
    nodes: list[onnx.NodeProto], functions: list[onnx.FunctionProto] | None = None
) -> onnx.ModelProto:
    return helper.make_model(
        helper.make_graph(nodes, "g", [], []),
        functions=functions or [],
        opset_imports=[helper.make_opsetid("", 20)],
    )


@pytest.mark.parametrize("data", [LINEAR, FACTORS])
def test_reads_what_the_onnx_package_reads(data: bytes) -> None:
    model, found = onnx.load_from_string(data), read_onnx(data)
    assert found.operators == Counter(("", node.op_type) for node in model.graph.node)
    assert found.opsets == {"": 20}
    assert found.initializers == {tensor.name for tensor in model.graph.initializer}
    for ours, theirs in ((found.inputs, model.graph.input), (found.outputs, model.graph.output)):
        assert [value.name for value in ours] == [value.name for value in theirs]
        for value, info in zip(ours, theirs, strict=True):
            kind = info.type.tensor_type
            assert helper.tensor_dtype_to_np_dtype(kind.elem_type) == np.dtype(value.dtype)
            assert value.shape == tuple(
                dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else None)
                for dim in kind.shape.dim
            )


def test_counts_scatters_that_race() -> None:
    assert read_onnx(FACTORS).racing_scatters == 3
    plain = helper.make_node("ScatterND", ["a", "b", "c"], ["d"], reduction="none")
    assert read_onnx(model_with([plain]).SerializeToString()).racing_scatters == 0


def test_finds_operators_in_subgraphs_and_functions() -> None:
    inner = helper.make_graph(
        [helper.make_node("Evil", [], ["y"], domain="com.other")], "i", [], []
    )
    middle = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=inner)], "m", [], []
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=middle, else_branch=inner)
    function = helper.make_function(
        "default",
        "F",
        [],
        ["y"],
        [helper.make_node("Odd", [], ["y"], domain="d")],
        [helper.make_opsetid("", 20)],
    )
    found = read_onnx(model_with([node], [function]).SerializeToString())
    assert found.operators[("com.other", "Evil")] == 2
    assert found.operators[("d", "Odd")] == 1
    assert found.functions == ["F"]
    alias = helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx")
    assert read_onnx(model_with([alias]).SerializeToString()).operators == {("", "Relu"): 1}


def external_tensor(location: str) -> TensorProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def test_finds_external_data_wherever_a_tensor_can_be() -> None:
    constant = helper.make_node("Constant", [], ["c"], value=external_tensor("a"))
    branch = helper.make_graph([], "b", [], [], initializer=[external_tensor("b")])
    model = model_with([constant, helper.make_node("If", ["c"], ["y"], then_branch=branch)])
    model.graph.initializer.append(external_tensor("../c"))
    model.graph.sparse_initializer.add().values.CopyFrom(external_tensor("d"))
    listed = helper.make_node("X", [], ["y"])
    attribute = listed.attribute.add(name="many", type=onnx.AttributeProto.TENSORS)
    attribute.tensors.append(external_tensor("e"))
    model.graph.node.append(listed)
    without_location = TensorProto(name="v", data_location=TensorProto.EXTERNAL)
    model.graph.initializer.append(without_location)
    assert read_onnx(model.SerializeToString()).external == {"a", "b", "../c", "d", "e", ""}


def test_refuses_what_other_parsers_would_merge() -> None:
    model = model_with([helper.make_node("Relu", ["x"], ["y"])])
    evil = model_with([helper.make_node("Evil", ["x"], ["y"], domain="com.other")])
    twice = onnx.ModelProto()
    twice.graph.CopyFrom(evil.graph)
    # Protobuf merges the two graphs: onnx sees both nodes.
    data = model.SerializeToString() + twice.SerializeToString()
    assert len(onnx.load_from_string(data).graph.node) == 2
    with pytest.raises(ArtifactError, match="given twice"):
        read_onnx(data)


def test_nesting_is_bounded() -> None:
    graph = helper.make_graph([], "g", [], [])
    for _ in range(25):
        graph = helper.make_graph(
            [helper.make_node("If", ["c"], ["y"], then_branch=graph)], "g", [], []
        )
    model = helper.make_model(graph)
    with pytest.raises(ArtifactError, match="nested"):
        read_onnx(model.SerializeToString())


def test_time_is_bounded() -> None:
    # 4 MB of empty nodes: without a budget, 2 million of them.
    body = b"\x0a\x00" * 2_000_000
    size = bytearray()
    length = len(body)
    while length:
        size.append((length & 0x7F) | (0x80 if length > 0x7F else 0))
        length >>= 7
    with pytest.raises(ArtifactError, match="more fields"):
        read_onnx(b"\x3a" + bytes(size) + body)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no graph"),
        (b"\x3a", "cut off"),
        (b"\x3a\x05ab", "past the end"),
        (b"\x38\x01", "wrong wire type"),
        (b"\x3b", "wire type 3"),
        (b"\x00\x00", "out of range"),
        (b"\x08" + b"\xff" * 10 + b"\x01", "too long"),
        (b"\x08" + b"\xff" * 9 + b"\x7f", "64 bits"),
        (b"\xa2\x01\x00", "training info"),
        (b"\x42\x02\x0a\x05", "past the end"),
    ],
)
def test_malformed_bytes(data: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        read_onnx(data)


@settings(max_examples=300)
@given(st.data())
def test_only_artifact_errors_escape_mutations(data: st.DataObject) -> None:
    base = bytearray(data.draw(st.sampled_from([LINEAR, FACTORS])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(base) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                base[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del base[at : at + data.draw(st.integers(1, 30))]
            case _:
                base[at:at] = data.draw(st.binary(min_size=1, max_size=12))
        if not base:
            break
    try:
        found = read_onnx(bytes(base))
    except ArtifactError:
        return
    # What we accept, an honest parser reads the same way.
    try:
        model = onnx.load_from_string(bytes(base))
    except Exception:  # protobuf is stricter about text inside the fields we skip
        return
    assert sum(found.operators.values()) >= len(model.graph.node)


@given(st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    try:
        read_onnx(data)
    except ArtifactError:
        return
