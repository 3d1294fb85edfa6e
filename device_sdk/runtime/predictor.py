"""Graphs in evaluation mode: outputs, and the loss, from the current state."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnxruntime as ort

from device_sdk.artifact.load import CheckedGraph
from device_sdk.artifact.manifest import Manifest
from device_sdk.artifact.parts import Port
from device_sdk.artifact.safetensors import Array
from device_sdk.errors import CallEnded, GraphRunError
from device_sdk.runtime.batch import BatchChecker
from device_sdk.runtime.session import Calls, SessionSettings, make_session
from device_sdk.runtime.state import StateBanks


class Predictor:
    """A session of a graph in evaluation mode that reads a trainer's state in place.

    ``name``: "infer" or "evaluate". ``constants``: the inputs that the graph holds itself.
    """

    def __init__(
        self,
        manifest: Manifest,
        name: str,
        graph: CheckedGraph,
        settings: SessionSettings,
        calls: Calls,
        constants: Collection[str] = (),
    ) -> None:
        self._graph = manifest.graphs[name]
        self._name = "inference" if name == "infer" else "evaluation"
        self._session = make_session(graph, self._graph.file, settings, calls)
        self._calls = calls
        self._host_only = settings.host_only
        self._state = [p for p in self._graph.select("state") if p.name not in constants]
        self._checker = BatchChecker(
            self._graph.select("batch"),
            ignored=[
                *(port.of for port in manifest.graphs["train"].select("batch")),
                *manifest.ignored,
            ],
            least=manifest.least_sizes(),
        )

    def predict(
        self,
        batch: Mapping[str, Array],
        banks: StateBanks,
        axes: Mapping[str, int],
        instead: Mapping[str, Array],
    ) -> list[tuple[Port, Array]]:
        """What each output of the graph is, in memory of its own.

        ``instead``: contiguous contents to use in place of those of some state tensors.
        Raises BatchError for a wrong batch, GraphRunError where onnxruntime fails, CallEnded.
        """
        arrays = self._checker.arrays(batch)
        self._checker.sizes([array.shape for array in arrays], axes)
        binding = self._session.io_binding()
        # The OrtValues alias the arrays and must outlive the run.
        others = {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in instead.items()}
        for port in self._state:
            value = others.get(port.of) or (
                banks.host_value(port.of) if self._host_only else banks.current_value(port.of)
            )
            binding.bind_ortvalue_input(port.name, value)
        values = [
            ort.OrtValue.ortvalue_from_numpy(
                array if array.flags.c_contiguous else array.copy(order="C")
            )
            for array in arrays
        ]
        for port, value in zip(self._graph.select("batch"), values, strict=True):
            binding.bind_ortvalue_input(port.name, value)
        for port in self._graph.outputs:
            binding.bind_output(port.name, "cpu")
        try:
            self._calls.run(self._session, binding)
        except CallEnded:
            raise
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise GraphRunError(
                f"onnxruntime failed inside the {self._name} graph: {error}"
            ) from error
        binding.synchronize_outputs()
        found = binding.get_outputs()
        return [
            (port, value.numpy().copy())
            for port, value in zip(self._graph.outputs, found, strict=True)
        ]
