"""What may run a graph beside the CPU: CUDA, where onnxruntime was built with it, and plugins.

A plugin is a library of its own, in a Python package of its own, that onnxruntime is told of when
something asks for it; none is needed, and none is installed with the device.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from device_sdk.artifact.onnx_reader import OnnxModel
from device_sdk.artifact.safetensors import Array
from device_sdk.errors import NonFiniteStep, ProviderError

_LOG = logging.getLogger("device_sdk")

TOLERANCE: Final = 1e-3
"""Relative error of two train steps against the CPU's that a provider may have."""


@dataclass(frozen=True)
class Provider:
    """An execution provider of onnxruntime.

    `name`: what `providers=` calls it. `title`: what onnxruntime does. `package`: the Python
    package of its plugin, or `library`, the path of one; neither where it is part of onnxruntime.
    `options`: onnxruntime's for it. `leaves_out`: the option that takes the names of nodes which
    the CPU has to run. `needs`: what a machine must have beside the package. `tolerance`: see
    `TOLERANCE`.
    """

    name: str
    title: str
    package: str = ""
    library: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    leaves_out: str = ""
    needs: str = ""
    tolerance: float = TOLERANCE

    @property
    def is_plugin(self) -> bool:
        """Whether it is a library that onnxruntime has to be told of, or was told of already."""
        return bool(self.package or self.library or _devices(self))


CPU: Final = Provider("cpu", "CPUExecutionProvider")
# TF32 keeps 10 bits of mantissa: results would no longer match torch's float32.
CUDA: Final = Provider("cuda", "CUDAExecutionProvider", options={"use_tf32": "0"})
WEBGPU: Final = Provider(
    "webgpu",
    "WebGpuExecutionProvider",
    "onnxruntime_ep_webgpu",
    # With channels last, a convolution of 6 channels to 16 is computed wrongly (0.4.0).
    options={"preferredLayout": "NCHW"},
    leaves_out="forceCpuNodeNames",
    needs="a driver for Vulkan (on Linux with the package libvulkan1), Direct3D 12 or Metal",
)
OPENVINO: Final = Provider("openvino", "OpenVINOExecutionProvider", "onnxruntime_ep_openvino")

KNOWN: Final = (CUDA, WEBGPU, OPENVINO, CPU)
"""What "auto" tries, in this order."""

Providers = str | Provider | Sequence[str | Provider]
"""As callers give them: "auto", a name of `KNOWN`, one of onnxruntime's, a `Provider`, or several,
the preferred one first."""


def candidates(providers: Providers) -> tuple[Provider, ...]:
    """What to try, best first; each may still fail once it gets a graph.

    Raises ProviderError for a provider that is not known, and where none is to be had here.
    """
    if providers == "auto":
        found = [each for each in KNOWN if _obstacle(each, accelerates=True) is None]
        return tuple(found)
    asked = [providers] if isinstance(providers, (str, Provider)) else providers
    if not isinstance(asked, Sequence) or not all(isinstance(one, str | Provider) for one in asked):
        raise ProviderError(f"providers is {asked!r}; expected {_names()}, or a list")
    if not asked:
        raise ProviderError(f"providers is an empty list; expected {_names()}")
    chosen = tuple(each if isinstance(each, Provider) else _named(each) for each in asked)
    obstacles = {each.name: obstacle for each in chosen if (obstacle := _obstacle(each))}
    told = "; ".join(f"{name} cannot be used: {why}" for name, why in obstacles.items())
    usable = tuple(each for each in chosen if each.name not in obstacles)
    if not usable:
        raise ProviderError(f'{told}; providers="cpu" works everywhere')
    if told:
        _LOG.warning("%s", told)
    return usable


def passed_over(providers: Providers) -> str:
    """Why "auto" does not try plugins that are installed; "" where it tries all of them."""
    if providers != "auto":
        return ""
    here = [each for each in KNOWN if each.package and _installed(each.package)]
    obstacles = {each.name: _obstacle(each, accelerates=True) for each in here}
    return "; ".join(f"{name} cannot be used: {why}" for name, why in obstacles.items() if why)


def add_to(options: ort.SessionOptions, provider: Provider, model: OnnxModel) -> None:
    """Give a session's options to a plugin. Raises ProviderError where it would go wrong."""
    if model.ends_in_absent_inputs:
        raise ProviderError(
            f"the graph names absent inputs at a node's end, which makes {provider.name} crash: "
            "export the artifact again"
        )
    own = dict(provider.options)
    if provider.leaves_out:
        own[provider.leaves_out] = "\n".join(left_to_the_cpu(model))
    # One of its devices: with several, each would be another provider of the same session.
    device = min(_devices(provider), key=lambda each: _RANKS.get(_kind(each), 3))
    options.add_provider_for_devices([device], own)


def _names() -> str:
    return ", ".join(f'"{name}"' for name in ["auto", *sorted(each.name for each in KNOWN)])


def _named(name: str) -> Provider:
    for provider in KNOWN:
        if name in (provider.name, provider.title):
            return provider
    offered = {*ort.get_available_providers(), *(each.ep_name for each in ort.get_ep_devices())}
    if name not in offered:
        raise ProviderError(
            f"providers={name!r} is unknown: give {_names()}, a list, or a "
            f"device_sdk.runtime.providers.Provider; this onnxruntime offers "
            f"{', '.join(sorted(offered))}"
        )
    return Provider(name, name)


def _obstacle(provider: Provider, *, accelerates: bool = False) -> str | None:
    """Why it cannot be used here, None where it can; `accelerates`: not on a processor."""
    if not provider.is_plugin:
        offered = ort.get_available_providers()
        if provider.title in offered:
            return None
        return f"this build of onnxruntime offers {', '.join(offered)}, but not {provider.title}"
    if not provider.library and provider.package and not _installed(provider.package):
        return f"it needs `pip install {provider.package.replace('_', '-')}`"
    try:
        devices = _registered(provider)
    except Exception as error:  # a library that does not fit raises what it likes
        return f"its library cannot be loaded: {error}"
    if not devices:
        needs = f": it needs {provider.needs}" if provider.needs else ""
        return f"it finds no device that it could run on{needs}"
    if accelerates and all(_kind(device) == "CPU" for device in devices):
        return "it would run on the processor"
    return None


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _registered(provider: Provider) -> list[Any]:
    """The plugin's devices, once onnxruntime knows its library."""
    if not _devices(provider):
        path = provider.library or importlib.import_module(provider.package).get_library_path()
        try:
            ort.register_execution_provider_library(provider.title, path)
        except Exception as error:
            # An earlier look, or the app itself, may have registered it, and found no device.
            if "already registered" not in str(error):
                raise
    return _devices(provider)


def _devices(provider: Provider) -> list[Any]:
    """onnxruntime's devices that the provider can run on; none where it is built in."""
    return [
        each
        for each in ort.get_ep_devices()
        if each.ep_name == provider.title and "library_path" in each.ep_metadata
    ]


_RANKS: Final = {"GPU": 0, "NPU": 1, "CPU": 2}


def _kind(device: Any) -> str:
    return str(device.device.type.name)


# A shader's storage buffers that every WebGPU has: the input and 7 pieces.
_MOST_PIECES: Final = 7


def left_to_the_cpu(model: OnnxModel) -> list[str]:
    """Nodes that WebGPU takes and cannot run (0.4.0): a maximum's indices, and many pieces.

    Raises ProviderError for one without a name, which cannot be left out.
    """
    found = []
    for node in model.many_outputs:
        if node.operator == "MaxPool" or (node.operator == "Split" and node.outputs > _MOST_PIECES):
            if not node.name:
                raise ProviderError(
                    f"its {node.operator} with {node.outputs} outputs cannot run there, and "
                    "without a name it cannot be left to the CPU: export the artifact again"
                )
            found.append(node.name)
    return found


# Does a provider train as the CPU does? Two steps of each, compared by state tensor.

State = Mapping[str, Array]

STEPS: Final = 2
ROUNDING: Final = 3e-7
_DRAWS: Final = 3
# What a provider may differ by, in what the CPU differs by from itself.
_YARDSTICK: Final = 4.0
# Changes below this share of a tensor's norm are rounding, whatever they are of.
_FLOOR: Final = 1e-4


@dataclass(frozen=True)
class Agreement:
    """`text` says how far apart the two are, of which state tensor."""

    holds: bool
    text: str


def compare(
    start: State,
    ours: State,
    theirs: State,
    tolerance: float,
    walk: Callable[[State], State],
) -> Agreement:
    """Whether a provider's steps are the CPU's.

    `start`: the state before the steps; `ours`, `theirs`: behind them, the provider's and the
    CPU's. `walk` is the CPU's steps from another start.
    """
    errors = _errors(start, ours, theirs)
    allowed = dict.fromkeys(errors, tolerance)
    if any(not error <= tolerance for error in errors.values()):
        rng = np.random.default_rng(0)
        for _ in range(_DRAWS):
            with contextlib.suppress(NonFiniteStep):
                shaken = walk(_shaken(start, rng))
                for name, error in _errors(start, shaken, theirs).items():
                    allowed[name] = max(allowed[name], _YARDSTICK * error)
    worst = max(errors, key=lambda name: errors[name] / allowed[name])
    return Agreement(
        errors[worst] <= allowed[worst],
        f"two steps' change of {worst!r} is off by {errors[worst]:.1e} of the CPU's "
        f"(allowed: {allowed[worst]:.1e})",
    )


def _shaken(state: State, rng: np.random.Generator) -> dict[str, Array]:
    """The state, each float moved by a rounding error or two."""
    return {
        name: array * (1 + ROUNDING * rng.standard_normal(array.shape)).astype(array.dtype)
        if np.issubdtype(array.dtype, np.floating)
        else array
        for name, array in state.items()
    }


def _errors(start: State, ours: State, theirs: State) -> dict[str, float]:
    return {name: relative_error(ours[name], theirs[name], start[name]) for name in theirs}


def relative_error(ours: Array, theirs: Array, start: Array | None = None) -> float:
    """L2 error of `ours`, relative to how far `theirs` lies from `start` (zero). Infinite where
    one is not finite, or an integer is another."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not np.issubdtype(theirs.dtype, np.floating):
        return 0.0 if np.array_equal(ours, theirs) else float("inf")
    wanted = theirs.astype(np.float64)
    moved = wanted if start is None else wanted - start
    scale = max(float(np.linalg.norm(moved)), _FLOOR * float(np.linalg.norm(wanted)), 1e-30)
    error = float(np.linalg.norm(ours - wanted)) / scale
    return error if np.isfinite(error) else float("inf")
