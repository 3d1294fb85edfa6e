"""Fixtures for the exporter's tests: parity with torch is the definition of right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import export


class WithoutBfloat16(TorchDispatchMode):
    """Inside, what torch's own code casts to bfloat16 stays as exact as it is."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            return args[0].clone()
        return func(*args, **kwargs)


@pytest.fixture
def assert_parity(tmp_path: Path) -> Callable[..., export.Exported]:
    """Exports a model and returns the artifact; verification raises where it differs from torch.

    ``loss`` defaults to a smooth scalar of the output, so that every output element matters.
    """

    def check(
        model: torch.nn.Module,
        batch: dict[str, torch.Tensor],
        *,
        loss: Any = None,
        dynamic: dict[str, dict[int, str]] | None = None,
        optimizer: export.Optimizer | None = None,
    ) -> export.Exported:
        if dynamic is None:
            dynamic = {name: {0: "batch"} for name, tensor in batch.items() if tensor.dim() > 0}
        exported = export.train_step(
            model,
            loss or _smooth_loss,
            batch,
            optimizer=optimizer or export.Sgd(lr=0.1),
            dynamic=dynamic,
            directory=tmp_path / "artifact",
        )
        assert exported.report is not None
        moved = [
            c
            for c in exported.report.comparisons
            if c.tensor.startswith("gradient") and c.torch_error > 0
        ]
        assert moved, "no gradient of this model is ever non-zero: the comparison says nothing"
        for file in exported.directory.glob("*.onnx"):
            refuse_trailing_absences(onnx.load(file).graph)
        return exported

    return check


@pytest.fixture
def assert_parity_of_each(
    assert_parity: Callable[..., export.Exported],
) -> Callable[..., export.Exported]:
    """As ``assert_parity``, of several models in one export, side by side.

    Each has parameters, a loss and an output of its own, so that each is compared on its own, and
    a mismatch names it.
    """

    def check(
        models: Mapping[str, torch.nn.Module],
        batch: dict[str, torch.Tensor],
        losses: Mapping[str, Any] | None = None,
        *,
        optimizer: export.Optimizer | None = None,
    ) -> export.Exported:
        def loss(together: Any, batch: dict[str, torch.Tensor]) -> Any:
            total, outputs = torch.zeros(()), {}
            for name in models:
                found = (losses[name] if losses else _smooth_loss)(together[name], batch)
                value, own = found if isinstance(found, tuple) else (found, {"output": found})
                total, outputs[name] = total + value, own["output"]
            return total, outputs

        exported = assert_parity(torch.nn.ModuleDict(models), batch, loss=loss, optimizer=optimizer)
        assert exported.report is not None
        moved = {
            c.tensor.removeprefix("gradient of ").partition(".")[0]
            for c in exported.report.comparisons
            if c.tensor.startswith("gradient of ") and c.torch_error > 0
        }
        compared = {c.tensor for c in exported.report.comparisons}
        for name in models:
            assert name in moved, f"no gradient of {name} is ever non-zero"
            assert {f"output.{name}", f"prediction output.{name}"} <= compared
        return exported

    return check


def refuse_trailing_absences(graph: onnx.GraphProto) -> None:
    """An absent optional input at a node's end is left out: OpenVINO stops at one named ""."""
    for node in graph.node:
        assert not node.input or node.input[-1], f"{node.op_type} {list(node.input)}"
        for attribute in node.attribute:
            refuse_trailing_absences(attribute.g)


def _smooth_loss(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    output = model(*batch.values())
    flat = output.reshape(output.shape[0], -1)
    pattern = torch.linspace(-1.0, 1.0, flat.shape[1]).to(flat.dtype)
    return (flat * pattern + 0.1 * flat * flat).sum(1).mean(), {"output": output}
