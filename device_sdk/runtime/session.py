"""onnxruntime sessions: provider, threads and options, made from bytes that were checked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.load import CheckedGraph
from device_sdk.artifact.parts import Port
from device_sdk.artifact.safetensors import Array
from device_sdk.artifact.shapes import DTYPES
from device_sdk.errors import ProviderError

# An array in main memory together with the OrtValue that aliases it.


class HostTensor:
    """Memory for one input or output of a graph, starting at zero."""

    def __init__(self, port: Port, shape: tuple[int, ...]) -> None:
        self.name = port.name
        self.of = port.of
        self.array: Array = np.zeros(shape, DTYPES[port.dtype])
        self.value = ort.OrtValue.ortvalue_from_numpy(self.array)


CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
_LOG = logging.getLogger("device_sdk")
# TF32 keeps 10 bits of mantissa: results would no longer match torch's float32.
_OPTIONS = {CUDA: {"use_tf32": "0"}}


@dataclass(frozen=True)
class SessionSettings:
    """Execution providers in order of preference, and threads inside one operator."""

    providers: tuple[str, ...]
    threads: int
    patterns: bool = True
    """Whether a batch shape's second run takes all of its memory as one block."""

    @property
    def on_cuda(self) -> bool:
        """Whether state lives in the memory of a CUDA device."""
        return self.providers[0] == CUDA

    @property
    def host_only(self) -> bool:
        """Whether every input is read from main memory, where it is bound."""
        return self.providers == (CPU,)


def make_session(graph: CheckedGraph, file: str, settings: SessionSettings) -> ort.InferenceSession:
    """A session of exactly the checked bytes.

    Raises ArtifactError when onnxruntime refuses the graph, ProviderError when the first provider
    that was asked for could not be used.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # Freed memory goes back to the arena either way; the planner's own search for what may take
    # whose place is quadratic in the nodes, and its patterns were larger (a UNet: 1,005 MiB, not
    # 722).
    options.enable_mem_reuse = False
    # The arena stays on, and patterns for small models: a batch-normalised MLP's step takes 15 %
    # longer without. The block lies beside what the first run took, so large models do without.
    options.enable_mem_pattern = settings.patterns
    # Failures are raised; printing them to stderr as well would be noise in an app.
    options.log_severity_level = 4
    # Threads that spin give good medians and p90s many times worse, and drain batteries.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Otherwise bytes that look like onnxruntime's own format would bypass the ONNX checks.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    if graph.external:
        options.add_external_initializers_from_files_in_memory(
            list(graph.external),
            list(graph.external.values()),
            [len(data) for data in graph.external.values()],
        )
    try:
        session = ort.InferenceSession(
            graph.onnx,
            options,
            providers=list(settings.providers),
            provider_options=[_OPTIONS.get(name, {}) for name in settings.providers],
            # The built-in fallback prints to stdout and hides which provider is used.
            enable_fallback=0,
        )
    except Exception as error:  # onnxruntime's exceptions share no base class
        if settings.providers != (CPU,):
            raise ProviderError(f"no session with {settings.providers[0]}: {error}") from error
        raise ArtifactError(f"{file}: onnxruntime refuses the graph: {error}") from error
    if settings.providers[0] not in session.get_providers():
        raise ProviderError(
            f"onnxruntime left out {settings.providers[0]}: are its libraries installed? "
            'providers="cpu" works everywhere'
        )
    return session


def open_session(
    graph: CheckedGraph,
    file: str,
    providers: str | Sequence[str],
    threads: int,
    *,
    patterns: bool = True,
) -> tuple[ort.InferenceSession, SessionSettings]:
    """The session for the first choice of providers that works, and what it was made with.

    `providers` is "auto" (CUDA where it works, else CPU), "cpu", "cuda", or a list of onnxruntime's
    own names.
    """
    choices = provider_choices(providers, ort.get_available_providers())
    for choice in choices[:-1]:
        settings = SessionSettings(choice, threads, patterns)
        try:
            session = make_session(graph, file, settings)
        except ProviderError as error:
            _LOG.warning("%s: %s; trying the next provider", file, error)
            continue
        _LOG.info("%s runs on %s", file, choice[0])
        return session, settings
    settings = SessionSettings(choices[-1], threads, patterns)
    session = make_session(graph, file, settings)
    _LOG.info("%s runs on %s", file, settings.providers[0])
    return session, settings


def provider_choices(
    providers: str | Sequence[str], available: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """The lists of providers to try, best first. Raises ProviderError for an unknown provider."""
    if providers == "cpu":
        return ((CPU,),)
    if providers == "cuda":
        wanted: tuple[str, ...] = (CUDA, CPU)
    elif providers == "auto":
        return ((CUDA, CPU), (CPU,)) if CUDA in available else ((CPU,),)
    elif isinstance(providers, str):
        raise ProviderError(
            f'providers={providers!r} is unknown: give "auto", "cpu", "cuda", or a list of '
            f"onnxruntime's names ({', '.join(available)})"
        )
    else:
        wanted = tuple(providers)
    missing = [name for name in wanted if name not in available]
    if missing or not wanted:
        raise ProviderError(
            f"this build of onnxruntime offers {', '.join(available)}, "
            f"but not {', '.join(missing) or 'an empty list'}"
        )
    return (wanted,)
