"""All that the exporter takes of torch's insides, which another release of torch may not have.

Everything else is imported from here. What is used, replaced or extended under a private name is
listed, and looked for before any of it is used: what is missing is said at once, in a sentence.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

TAKEN: Mapping[str, Sequence[str]] = {
    "torch": ("_grouped_mm", "_sparse_sum"),
    "torch.Tensor": (
        "_backward_hooks", "_indices", "_post_accumulate_grad_hooks", "_values", "_version",
    ),
    "torch._C": (
        "DisableTorchFunction", "_are_functorch_transforms_active", "_autograd._get_sequence_nr",
        "_current_autograd_node",
    ),
    "torch._VF": (
        "_pack_padded_sequence", "_pad_packed_sequence", "gru", "gru_cell", "lstm", "lstm_cell",
        "rnn_relu", "rnn_tanh",
    ),
    "torch._decomp": ("core_aten_decompositions", "decomposition_table", "get_decompositions"),
    "torch._dispatch.python": ("enable_python_dispatcher",),
    "torch._ops": ("OpOverload",),
    "torch._subclasses.fake_tensor": ("FakeTensorMode", "is_fake", "maybe_get_fake_mode"),
    "torch.autograd.function": (
        "BackwardCFunction.saved_tensors", "Function.apply", "FunctionCtx.save_for_backward",
    ),
    "torch.distributions.Distribution": ("_validate_args",),
    "torch.fx._lazy_graph_module": ("_use_lazy_graph_module",),
    "torch.fx.experimental.proxy_tensor": (
        "PythonKeyTracer", "_ProxyTensor", "_extract_tensor_metadata", "fetch_sym_proxy",
        "get_proxy_mode", "get_proxy_slot", "make_fx", "set_proxy_slot", "track_tensor",
    ),
    "torch.fx.experimental.sym_node": ("SymNode",),
    "torch.fx.experimental.symbolic_shapes": (
        "DimDynamic", "GuardOnDataDependentSymNode", "StatelessSymbolicContext",
        "uninteresting_files",
    ),
    "torch.fx.experimental.symbolic_shapes.ShapeEnv()": (
        "_get_sloc", "_maybe_evaluate_static", "_set_replacement", "backed_var_to_val",
        "create_unbacked_symbool", "evaluate_expr", "guards", "replacements", "size_like",
        "unbacked_symfloat_counter", "unbacked_symint_counter",
    ),
    "torch.nn.RNNBase": ("check_forward_args",),
    "torch.nn.functional": ("_in_projection_packed",),
    "torch.nn.modules.batchnorm": ("_BatchNorm.forward",),
    "torch.nn.modules.transformer": ("_detect_is_causal_mask",),
    "torch.ops.aten": ("_local_scalar_dense.default",),
    "torch.optim.optimizer": (
        "Optimizer._optimizer_step_post_hooks", "Optimizer._optimizer_step_pre_hooks",
        "_global_optimizer_post_hooks", "_global_optimizer_pre_hooks",
    ),
    "torch.utils._python_dispatch": ("TorchDispatchMode", "_disable_current_modes"),
    "torch.utils._pytree": ("tree_leaves", "tree_map"),
    "torch.utils._sympy.functions": (
        "Min", "Mod", "PythonMod",
        *(f"OpaqueUnaryFn_{name}" for name in ("cos", "exp", "log", "log2", "sin", "sqrt", "tanh")),
    ),
    "torch.utils._sympy.symbol": ("SymT", "symbol_is_type"),
    "torch.utils.checkpoint": ("CheckpointFunction",),
}  # fmt: skip
"""Names by where they are looked up; "()" is what a class makes."""


def missing(taken: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Those of these names that the installed torch has not."""
    for place, names in taken.items():
        try:
            owner = _found(place)
        except (ImportError, AttributeError):
            yield place
            continue
        for name in names:
            try:
                _attribute(owner, name)
            except AttributeError:
                yield f"{place}.{name}"


def _found(place: str) -> Any:
    path = place.removesuffix("()")
    owner: Any
    try:
        owner = importlib.import_module(path)
    except ImportError:
        above, _, name = path.rpartition(".")
        owner = getattr(_found(above) if above else torch, name)
    return owner() if place.endswith("()") else owner


def _attribute(owner: Any, path: str) -> Any:
    for name in path.split("."):
        # What each instance has may be declared in its class alone.
        declared = isinstance(owner, type) and name in inspect.get_annotations(owner)
        owner = None if declared else getattr(owner, name)
    return owner


def supported() -> str:
    """The releases of torch that this package asks for."""
    asked = metadata.requires("tessera-edge") or ()
    return next((each.partition(";")[0] for each in asked if each.startswith("torch")), "torch")


if gone := list(missing(TAKEN)):
    raise ImportError(
        f"torch {torch.__version__} has no {', '.join(gone)}, which the exporter takes of it; "
        f"it supports {supported()}"
    )

from torch._decomp import (
    core_aten_decompositions,
    decomposition_table,
    get_decompositions,
)
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake, maybe_get_fake_mode
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
)
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
    uninteresting_files,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy import functions as torch_sympy
from torch.utils._sympy.functions import Min, Mod, PythonMod
from torch.utils._sympy.symbol import SymT, symbol_is_type

__all__ = [
    "BackwardCFunction",
    "DimDynamic",
    "FakeTensorMode",
    "FunctionCtx",
    "GuardOnDataDependentSymNode",
    "Min",
    "Mod",
    "OpOverload",
    "PythonKeyTracer",
    "PythonMod",
    "ShapeEnv",
    "StatelessSymbolicContext",
    "SymNode",
    "SymT",
    "TorchDispatchMode",
    "core_aten_decompositions",
    "decomposition_table",
    "disable_current_modes",
    "enable_python_dispatcher",
    "get_decompositions",
    "get_proxy_mode",
    "get_proxy_slot",
    "is_fake",
    "make_fx",
    "maybe_get_fake_mode",
    "proxy_tensor",
    "symbol_is_type",
    "torch_sympy",
    "tree_leaves",
    "tree_map",
    "uninteresting_files",
    "use_lazy_graph_module",
]
