"""One function of tensors, recorded and run on onnxruntime beside torch: values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

import export.wing  # noqa: F401  (fills the tables)
from export.axes import Axes
from export.convert import to_onnx
from export.rewrites.patch import trainable
from export.rewrites.randomness import Randomness
from export.trace import Spec, Trace, record

Make = Callable[[int], Sequence[Tensor]]
"""The function's arguments for a size n of its free axis."""


def with_gradients(function: Callable[..., Any], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """The function's results and, of a weighted sum of them, the gradients of its float tensors."""
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
    with torch.enable_grad():
        given = function(*leaves)
        results = [given] if isinstance(given, Tensor) else list(given)
        found = {f"result.{i}": result.detach() for i, result in enumerate(results)}
        smooth = [result for result in results if result.requires_grad]
        if not smooth:
            return found
        parts = [(r * torch.cos(torch.arange(r.numel()).reshape(r.shape))).sum() for r in smooth]
        wanted = [leaf for leaf in leaves if leaf.is_floating_point()]
        gradients = torch.autograd.grad(sum(parts), wanted, allow_unused=True)  # type: ignore[arg-type]
    pairs = enumerate(gradients)
    return found | {f"gradient.{i}": g for i, g in pairs if g is not None}


def recorded(function: Callable[..., Any], make: Make) -> tuple[onnx.ModelProto, Trace]:
    """The function and its gradients as a graph, with the axes that n changes named."""
    few, many = make(4), make(7)
    axes: dict[str, dict[int, str]] = {}
    for i, (a, b) in enumerate(zip(few, many, strict=True)):
        moved = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
        axes[f"batch.{i}"] = {d: f"n{a.shape[d]}_{b.shape[d]}" for d in moved}
    sizes = {axis: int(axis[1]) for named in axes.values() for axis in named.values()}
    named = Axes(axes, sizes)
    specs = {
        f"batch.{i}": Spec(t.dtype, named.shape(f"batch.{i}", t.shape)) for i, t in enumerate(few)
    }
    zero = torch.zeros((), dtype=torch.int64)

    def run(inputs: Any) -> dict[str, Tensor]:
        with trainable(Randomness(zero, zero)):
            return with_gradients(function, list(inputs.values()))

    trace = record(run, specs, named, nn.Module())
    model = to_onnx(trace, trace.outputs, name="function")
    onnx.checker.check_model(model, full_check=True)
    return model, trace


def assert_as_torch(
    function: Callable[..., Any],
    make: Make,
    *,
    sizes: Sequence[int] = (1, 4, 7),
    atol: float = 2e-5,
) -> onnx.ModelProto:
    """``function(*make(n))`` and its gradients on onnxruntime are torch's at each size n."""
    model, trace = recorded(function, make)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    taken = {port.name for port in session.get_inputs()}
    for n in sizes:
        tensors = make(n)
        expected = with_gradients(function, tensors)
        assert list(expected) == trace.outputs
        fed = {f"batch.{i}": t.numpy() for i, t in enumerate(tensors)}
        got = session.run(trace.outputs, {k: v for k, v in fed.items() if k in taken})
        for name, value in zip(trace.outputs, got, strict=True):
            want = expected[name].numpy()
            assert value.shape == want.shape, f"{name} at {n}"
            np.testing.assert_allclose(
                value, want, rtol=1e-4, atol=atol, err_msg=f"{name} at size {n}"
            )
    return model
