"""What is written without the onnx package is what the onnx package reads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import helper, numpy_helper

from device_sdk.artifact import ArtifactError
from device_sdk.artifact import onnx_writer as write
from device_sdk.artifact.onnx_reader import read_onnx
from device_sdk.artifact.parts import DTYPES

NAMES = st.text(min_size=1, max_size=20)
_SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0)
ARRAYS = st.sampled_from(sorted(DTYPES)).flatmap(lambda dtype: arrays.arrays(dtype, _SHAPES))
VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(width=32, allow_nan=False),
    st.text(max_size=10),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
)


@given(NAMES, ARRAYS)
def test_a_tensor_is_read_back(name: str, array: np.ndarray) -> None:
    found = onnx.TensorProto.FromString(write.tensor(name, array))
    assert found.name == name and tuple(found.dims) == array.shape
    again = numpy_helper.to_array(found)
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


@given(st.dictionaries(st.sampled_from(("axis", "alpha", "mode", "pads")), VALUES))
def test_a_nodes_attributes_are_read_back(values: dict[str, write.Attribute]) -> None:
    found = onnx.NodeProto.FromString(write.node("Any", ["a", ""], ["b"], **values))
    assert (found.op_type, list(found.input), list(found.output)) == ("Any", ["a", ""], ["b"])
    read = {each.name: helper.get_attribute_value(each) for each in found.attribute}
    wanted = {n: v.encode() if isinstance(v, str) else v for n, v in values.items()}
    assert read == wanted


@given(NAMES, st.lists(st.one_of(st.none(), st.integers(0, 2**40), NAMES), max_size=4))
def test_lengths_are_numbers_names_or_neither(name: str, shape: list[int | str | None]) -> None:
    found = onnx.ValueInfoProto.FromString(write.value_info(name, "float32", tuple(shape)))
    dims = list(found.type.tensor_type.shape.dim)
    read = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims]
    assert (found.name, read) == (name, shape)


def test_a_whole_file_is_read_by_both_readers() -> None:
    nodes = [write.node("MatMul", ["x", "w"], ["y"])]
    graph = write.graph(
        "one",
        nodes,
        [write.value_info("x", "float32", ("batch", 2))],
        [write.value_info("y", "float32", ("batch", 3))],
        [write.tensor("w", np.ones((2, 3), np.float32))],
    )
    notes = {"b": "2", "a": "ü"}
    data = write.model(graph, opset=18, ir_version=8, producer=("tessera", "1"), metadata=notes)
    found = onnx.load_from_string(data)
    onnx.checker.check_model(found, full_check=True)
    assert (found.producer_name, found.producer_version, found.ir_version) == ("tessera", "1", 8)
    assert [(each.key, each.value) for each in found.metadata_props] == [("a", "ü"), ("b", "2")]
    ours = read_onnx(data)
    assert ours.initializers == {"w"} and ours.opsets == {"": 18}
    assert [(each.name, each.shape) for each in ours.inputs] == [("x", ("batch", 2))]


def test_a_dtype_that_no_artifact_has_is_refused() -> None:
    with pytest.raises(ArtifactError, match="'z': dtype complex64"):
        write.tensor("z", np.zeros(2, np.complex64))
