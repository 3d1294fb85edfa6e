"""onnxruntime sessions: provider, threads and options, made from bytes that were checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnxruntime as ort

from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.load import CheckedGraph
from device_sdk.artifact.parts import DTYPES, Port
from device_sdk.artifact.safetensors import Array
from device_sdk.errors import CallEnded, ProviderError
from device_sdk.runtime.providers import CPU, Provider, Providers, add_to, candidates
from device_sdk.system.watch import Watch

# An array in main memory together with the OrtValue that aliases it.


class HostTensor:
    """Memory for one input or output of a graph, starting at zero."""

    def __init__(self, port: Port, shape: tuple[int, ...]) -> None:
        self.name = port.name
        self.of = port.of
        self.array: Array = np.zeros(shape, DTYPES[port.dtype])
        self.value = ort.OrtValue.ortvalue_from_numpy(self.array)


# What onnxruntime does for one trainer, such that a watch can end it.


class Calls:
    """Counts onnxruntime's calls for a watch, and gives it what ends them.

    A run ends between two nodes, in a Loop's body too; an opening between two transformations.
    """

    def __init__(self, watch: Watch | None = None, artifact_id: str = "") -> None:
        self._watch = Watch() if watch is None else watch
        self._artifact_id = artifact_id
        self._options = _run_options()

    @property
    def ended(self) -> bool:
        """Whether the watch has ended them."""
        return bool(self._watch.ended)

    def run(self, session: ort.InferenceSession, binding: ort.IOBinding) -> None:
        """Raises CallEnded, and what onnxruntime does."""
        watch = self._watch
        watch.calls_for(self._artifact_id, self._terminate)
        watch.calls += 1
        try:
            # Behind the line that says what ends this call: whoever ends it meanwhile is seen.
            if watch.ended:
                raise CallEnded(_told(watch))
            session.run_with_iobinding(binding, self._options)
        except Exception as error:
            if not watch.ended:
                raise
            self._options = _run_options()  # a terminated one ends every run
            raise CallEnded(_told(watch)) from error
        finally:
            watch.calls += 1

    @contextmanager
    def opening(self, end: Callable[[], None]) -> Iterator[None]:
        """A session is opened within, which ``end`` cancels. Raises CallEnded."""
        watch = self._watch
        watch.calls_for(self._artifact_id, end)
        watch.calls += 1
        try:
            if watch.ended:
                raise CallEnded(_told(watch))
            yield
        except Exception as error:
            if not watch.ended:
                raise
            raise CallEnded(_told(watch)) from error
        finally:
            watch.calls += 1

    def _terminate(self) -> None:
        self._options.terminate = True


def _run_options() -> ort.RunOptions:
    options = ort.RunOptions()
    # No graph is captured, which is so without a word too; but then onnxruntime throws and catches
    # an exception at each run, which takes as long as a small model's step.
    options.add_run_config_entry("gpu_graph_id", "-1")
    return options


def _told(watch: Watch) -> str:
    if watch.ended == "stopped":
        return "the device was stopped in the middle of a step"
    return "a step of the artifact, or the opening of its graphs, did not end in its time"


_LOG = logging.getLogger("device_sdk")
_LEAST_FOLDED_BYTES: Final = 1 << 24


def _most_folded_bytes(graph: CheckedGraph) -> int:
    """What is computed of constants when a session is opened may be as large as all constants are
    together: one that is laid out anew is, and one that is made of a few numbers is a bomb."""
    given = len(graph.onnx) + sum(map(len, graph.external.values()))
    return max(_LEAST_FOLDED_BYTES, given)


@dataclass(frozen=True)
class SessionSettings:
    """The provider that runs what it can (the CPU runs the rest), and threads in one operator."""

    provider: Provider
    threads: int
    patterns: bool = True
    """Whether a batch shape's second run takes all of its memory as one block."""

    @property
    def providers(self) -> tuple[str, ...]:
        """onnxruntime's names, the preferred one first."""
        return tuple(dict.fromkeys((self.provider.title, CPU.title)))

    @property
    def host_only(self) -> bool:
        """Whether every input is read from main memory, where it is bound."""
        return self.provider.title == CPU.title


def make_session(
    graph: CheckedGraph, file: str, settings: SessionSettings, calls: Calls
) -> ort.InferenceSession:
    """A session of exactly the checked bytes.

    Raises ArtifactError when onnxruntime refuses the graph, ProviderError when the first provider
    that was asked for could not be used, CallEnded where it took too long.
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
    # An opening runs nodes whose inputs are constants, and nothing can end one of them.
    options.add_session_config_entry(
        "optimization.constant_folding_max_output_size_in_bytes", str(_most_folded_bytes(graph))
    )
    if graph.external:
        options.add_external_initializers_from_files_in_memory(
            list(graph.external),
            list(graph.external.values()),
            [len(data) for data in graph.external.values()],
        )
    provider, titles = settings.provider, settings.providers
    plugin = provider.is_plugin
    try:
        if plugin:
            add_to(options, provider, graph.model)
        with calls.opening(lambda: options.set_load_cancellation_flag(True)):
            session = ort.InferenceSession(
                graph.onnx,
                options,
                providers=None if plugin else list(titles),
                provider_options=None
                if plugin
                else [dict(provider.options), *({} for _ in titles[1:])],
                # The built-in fallback prints to stdout and hides which provider is used.
                enable_fallback=0,
            )
    except (ProviderError, CallEnded):
        raise
    except Exception as error:  # onnxruntime's exceptions share no base class
        if not settings.host_only:
            raise ProviderError(f"no session with {provider.title}: {error}") from error
        raise ArtifactError(f"{file}: onnxruntime refuses the graph: {error}") from error
    if provider.title not in session.get_providers():
        raise ProviderError(
            f"onnxruntime left out {provider.title}: are its libraries installed? "
            'providers="cpu" works everywhere'
        )
    return session


def open_session(
    graph: CheckedGraph,
    file: str,
    providers: Providers,
    threads: int,
    calls: Calls,
    *,
    patterns: bool = True,
) -> tuple[ort.InferenceSession, SessionSettings]:
    """The session for the first candidate that works, and what it was made with.

    Raises ProviderError where none does; "auto" ends with the CPU.
    """
    choices = candidates(providers)
    for provider in choices:
        settings = SessionSettings(provider, threads, patterns)
        try:
            session = make_session(graph, file, settings, calls)
        except ProviderError as error:
            if provider is choices[-1]:
                raise
            _LOG.warning("%s: %s; trying the next provider", file, error)
            continue
        _LOG.info("%s runs on %s", file, provider.title)
        return session, settings
    raise ProviderError("no provider was given")
