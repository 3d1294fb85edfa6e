"""A train step bound to memory: built once per batch shape, then run without allocating."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime as ort

from device_sdk.artifact.dtypes import DTYPES
from device_sdk.artifact.graph import Graph, Port
from device_sdk.artifact.safetensors import Array
from device_sdk.artifact.shapes import resolve
from device_sdk.errors import GraphRunError
from device_sdk.runtime.state import StateBanks


class HostTensor:
    """An array in main memory and the OrtValue that aliases it."""

    def __init__(self, port: Port, shape: tuple[int, ...]) -> None:
        self.name = port.name
        self.of = port.of
        self.array: Array = np.zeros(shape, DTYPES[port.dtype])
        self.value = ort.OrtValue.ortvalue_from_numpy(self.array)


class StepBinding:
    """The train graph bound for one batch shape, once per direction between the two banks.

    The same OrtValue is never input and output of a run: onnxruntime would read what it has already
    overwritten. Loss, guard and outputs have memory of their own in either direction, so that a
    dropped step leaves the last finished step's outputs alone.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        graph: Graph,
        banks: StateBanks,
        scalars: Sequence[HostTensor],
        sizes: Mapping[str, int],
        *,
        on_cuda: bool,
    ) -> None:
        self._session = session
        self._on_cuda = on_cuda
        self.batch = [HostTensor(p, resolve(p.shape, sizes)) for p in graph.select("batch")]
        self._feeds = [*self.batch, *scalars]
        # A length that only the graph knows: onnxruntime allocates such outputs at each run.
        self._unsized = [p for p in graph.select("output") if None in p.shape]
        self._state_inputs = [(p.name, p.of) for p in graph.select("state")]
        self._bindings: list[ort.IOBinding] = []
        self._results: list[dict[str, HostTensor]] = []
        self._state_values: list[list[tuple[str, ort.OrtValue]]] = []
        for bank in (0, 1):
            binding = session.io_binding()
            inputs = [(name, banks.value(bank, of)) for name, of in self._state_inputs]
            self._state_values.append(inputs)
            self._bind_inputs(binding, inputs)
            for port in graph.new_state:
                binding.bind_ortvalue_output(port.name, banks.value(1 - bank, port.of))
            results = {}
            for port in graph.outputs:
                if port.role != "state" and None not in port.shape:
                    results[port.name] = HostTensor(port, resolve(port.shape, sizes))
                    binding.bind_ortvalue_output(port.name, results[port.name].value)
            self._bindings.append(binding)
            self._results.append(results)
        self._loss = [results[graph.select("loss")[0].name].array for results in self._results]
        self._guard = [results[graph.select("guard")[0].name].array for results in self._results]
        self._outputs: list[dict[str, Array]] = [
            {p.of: results[p.name].array for p in graph.select("output") if p.name in results}
            for results in self._results
        ]

    def run(self, arrays: Sequence[Array], bank: int) -> tuple[float, float]:
        """Run a step that reads `bank` and writes the other; returns loss and guard.

        `arrays` are the batch's, in the graph's order, of the shapes this was built for. Raises
        GraphRunError when onnxruntime fails.
        """
        for tensor, array in zip(self.batch, arrays, strict=True):
            np.copyto(tensor.array, array)
        binding = self._bindings[bank]
        if self._on_cuda:
            # Binding is what copies an input to where the graph wants it, which is the host for
            # some inputs of a CUDA session: a binding made once would keep feeding old values.
            self._bind_inputs(binding, self._state_values[bank])
        for port in self._unsized:
            binding.bind_output(port.name, "cpu")
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise GraphRunError(
                f"onnxruntime failed inside the train step, which was dropped: {error}"
            ) from error
        if self._on_cuda:
            binding.synchronize_outputs()
        if self._unsized:
            self._collect_unsized(bank)
        return self._loss[bank].item(), self._guard[bank].item()

    def outputs(self, bank: int) -> Mapping[str, Array]:
        """The extra outputs of the last run that read `bank`: views, overwritten by the next."""
        return self._outputs[bank]

    def _bind_inputs(
        self, binding: ort.IOBinding, state: Sequence[tuple[str, ort.OrtValue]]
    ) -> None:
        for name, value in state:
            binding.bind_ortvalue_input(name, value)
        for tensor in self._feeds:
            binding.bind_ortvalue_input(tensor.name, tensor.value)

    def _collect_unsized(self, bank: int) -> None:
        # get_outputs lists values in the order in which their names were first bound: unsized ones
        # were bound last.
        values = self._bindings[bank].get_outputs()[-len(self._unsized) :]
        for port, value in zip(self._unsized, values, strict=True):
            self._outputs[bank][port.of] = value.numpy().copy()
