"""An artifact's inference graph with its parameters inside, beside the artifact it was made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import export
from device_sdk.artifact import ArtifactError, load_artifact
from device_sdk.artifact.onnx_reader import read_onnx
from device_sdk.artifact.standalone import packed, standalone_onnx, unpacked
from device_sdk.factorisation import packaged_artifact
from device_sdk.standalone_check import require_same_outputs, run_standalone

NOTES = {"task": "clicks", "version": "3"}


class Convolutional(torch.nn.Module):
    """Packed parameters, one too large for the pack, float and integer buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.wide = torch.nn.Linear(144, 500)
        self.out = torch.nn.Linear(500, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found = torch.relu(self.norm(self.conv(image))).flatten(1)
        return self.out(torch.relu(self.wide(found)))


class Reshaped(torch.nn.Module):
    """A parameter that is used in another shape than its own, and one of no axis."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(6, 2))
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x @ self.table.reshape(3, 4)


def images() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return Convolutional(), {"x": torch.randn(4, 1, 8, 8)}


def rows() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return Reshaped(), {"x": torch.randn(5, 3)}


def sequences() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return torch.nn.Sequential(_Gru(), torch.nn.Linear(7, 2)), {"x": torch.randn(3, 6, 5)}


class _Gru(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(5, 7, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(x)[0][:, -1]


def exported(
    folder: Path, model: torch.nn.Module, batch: dict[str, torch.Tensor], output: str = "logits"
) -> Path:
    def loss(
        model: torch.nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        found = model(batch["x"])
        return (found**2).mean(), {output: found}

    export.train_step(
        model,
        loss,
        batch,
        optimizer=export.Sgd(lr=0.1),
        dynamic={"x": {0: "batch"}},
        directory=folder,
    )
    return folder


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [images, rows, sequences])
def test_the_file_says_what_the_artifact_says(
    tmp_path: Path, make: Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]]
) -> None:
    model, batch = make()
    folder = exported(tmp_path / "artifact", model, batch)
    artifact = load_artifact(folder)
    rng = np.random.default_rng(0)
    # Another model than the first one; variances stay above 0.
    trained = {
        name: np.asarray(
            array + rng.random(array.shape, "f4") if array.dtype.kind == "f" else array
        )
        for name, array in artifact.initial.items()
    }
    data = standalone_onnx(artifact, trained, producer=("tessera", "1"), metadata=NOTES)
    found = onnx.load_from_string(data)
    onnx.checker.check_model(found, full_check=True)
    assert require_same_outputs(folder, trained, data, rng) < 1e-5
    # Inputs and outputs by the names that users know, the batch's length free; each parameter once,
    # by torch's name.
    assert [
        (each.name, each.type.tensor_type.shape.dim[0].dim_param) for each in found.graph.input
    ] == [("x", "batch")]
    assert [each.name for each in found.graph.output] == ["logits"]
    names = [each.name for each in found.graph.initializer]
    parameters = {name for name, _ in model.named_parameters()}
    assert len(set(names)) == len(names)
    flat = {name for name in parameters if f"{name}.flat" in names}
    assert parameters - flat <= set(names) and flat == ({"table"} if make is rows else set())
    assert {each.key: each.value for each in found.metadata_props} == NOTES
    # torch agrees.
    model.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in trained.items()}, strict=False)
    wanted = model.eval()(batch["x"]).detach().numpy()
    answer = run_standalone(data, {"x": batch["x"].numpy()})["logits"]
    np.testing.assert_allclose(answer, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


def test_a_file_with_another_parameter_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path / "artifact", *rows())
    artifact = load_artifact(folder)
    other = {name: array + np.float32(0.1) for name, array in artifact.initial.items()}
    data = standalone_onnx(artifact, other, producer=("tessera", "1"), metadata={})
    with pytest.raises(ArtifactError, match=r"differ from the artifact's .* it was not written"):
        require_same_outputs(folder, artifact.initial, data, np.random.default_rng(0))


def test_what_the_model_lacks_or_has_in_another_shape_is_named(tmp_path: Path) -> None:
    artifact = load_artifact(exported(tmp_path / "artifact", *rows()))
    scale = {"scale": artifact.initial["scale"]}
    for model, message in (
        (scale, "lacks 'table'"),
        (
            {**scale, "table": np.zeros((2, 6), np.float32)},
            r"float32 \[2, 6\]; expected .*\[6, 2\]",
        ),
        ({**scale, "table": np.zeros((6, 2))}, "'table' is float64"),
    ):
        with pytest.raises(ArtifactError, match=message):
            standalone_onnx(artifact, model, producer=("", ""), metadata={})


def test_an_output_may_be_called_as_a_parameter_is(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.scale = torch.nn.Parameter(torch.ones(3))
    model.forward = lambda x: x * model.scale  # type: ignore[method-assign]
    folder = exported(tmp_path / "artifact", model, {"x": torch.randn(5, 3)}, output="scale")
    artifact = load_artifact(folder)
    data = standalone_onnx(artifact, artifact.initial, producer=("", ""), metadata={})
    assert [each.name for each in read_onnx(data).outputs] == ["output.scale"]
    assert require_same_outputs(folder, artifact.initial, data, np.random.default_rng(1)) < 1e-5


def test_parameters_with_free_sizes_come_in_theirs() -> None:
    artifact = load_artifact(packaged_artifact())
    rng = np.random.default_rng(2)
    sizes = {"users.weight": (3, 5), "items.weight": (40, 5)}
    model = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in sizes.items()}
    data = standalone_onnx(artifact, model, producer=("tessera", "1"), metadata={})
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    assert require_same_outputs(packaged_artifact(), model, data, rng) < 1e-5


def test_a_pack_is_taken_apart_and_put_together(tmp_path: Path) -> None:
    artifact = load_artifact(exported(tmp_path / "artifact", *images()))
    for tensor in artifact.manifest.state:
        if tensor.kind in ("parameter", "buffer") and tensor.name in ("packed", "buffers"):
            arrays = {member.name: artifact.initial[member.name] for member in tensor.members}
            again = unpacked(tensor, packed(tensor, arrays))
            assert again.keys() == arrays.keys()
            for name, array in arrays.items():
                np.testing.assert_array_equal(again[name], array)
