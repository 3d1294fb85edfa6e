"""A train step bound to memory: bound again only where a shape changes, never allocating."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnxruntime as ort

from device_sdk.artifact.graph import Graph
from device_sdk.artifact.safetensors import Array
from device_sdk.errors import GraphRunError
from device_sdk.runtime.batch_memory import BatchMemory
from device_sdk.runtime.host_tensor import HostTensor
from device_sdk.runtime.state import StateBanks


class StepRunner:
    """The train graph bound twice, once per direction between the two banks of state.

    The same OrtValue is never input and output of a run: onnxruntime would read what it has already
    overwritten. `scalars` are the hyper-parameters and the seed, whose arrays the caller sets.
    `host_only` says that no execution provider but the CPU's takes part.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        graph: Graph,
        banks: StateBanks,
        scalars: Sequence[HostTensor],
        *,
        host_only: bool,
    ) -> None:
        self._session = session
        self._banks = banks
        self._scalars = scalars
        self._host_only = host_only
        self._old = {port.of: port.name for port in graph.select("state")}
        self._new = {port.of: port.name for port in graph.new_state}
        # A length that only the graph knows: onnxruntime allocates such outputs at each run.
        self._unsized = [port for port in graph.select("output") if None in port.shape]
        self._bindings = (session.io_binding(), session.io_binding())
        loss, guard = graph.select("loss")[0], graph.select("guard")[0]
        self._loss = (HostTensor(loss, ()), HostTensor(loss, ()))
        self._guard = (HostTensor(guard, ()), HostTensor(guard, ()))
        self._memory: BatchMemory | None = None
        for bank, binding in enumerate(self._bindings):
            # First, so that they also come first when the outputs are collected.
            for port in self._unsized:
                binding.bind_output(port.name, "cpu")
            for tensor in (self._loss[bank], self._guard[bank]):
                binding.bind_ortvalue_output(tensor.name, tensor.value)
            for tensor in scalars:
                binding.bind_ortvalue_input(tensor.name, tensor.value)
        self.bind_state(self._old)

    def bind_state(self, names: Iterable[str]) -> None:
        """Bind state tensors whose memory has changed."""
        for name in names:
            for bank, binding in enumerate(self._bindings):
                binding.bind_ortvalue_input(self._old[name], self._banks.value(bank, name))
                binding.bind_ortvalue_output(self._new[name], self._banks.value(1 - bank, name))

    def run(self, memory: BatchMemory, arrays: Sequence[Array]) -> tuple[float, float]:
        """Run a step from the current bank into the other; returns loss and guard.

        `arrays` are the batch's, in the graph's order, of the shapes that `memory` is for. Raises
        GraphRunError when onnxruntime fails.
        """
        for entry, array in zip(memory.inputs, arrays, strict=True):
            entry.take(array)
        if memory is not self._memory:
            self._bind_batch(memory)
        bank = self._banks.current
        binding = self._bindings[bank]
        if not self._host_only:
            self._bind_inputs(binding, memory, bank)
        else:
            for entry in memory.inputs:
                if entry.in_place:
                    binding.bind_ortvalue_input(entry.name, entry.value)
        for port in self._unsized:
            binding.bind_output(port.name, "cpu")
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise GraphRunError(
                f"onnxruntime failed inside the train step, which was dropped: {error}"
            ) from error
        if not self._host_only:
            binding.synchronize_outputs()
        if self._unsized:
            self._collect_unsized(binding, memory.outputs[bank])
        return self._loss[bank].array.item(), self._guard[bank].array.item()

    def _bind_batch(self, memory: BatchMemory) -> None:
        for bank, binding in enumerate(self._bindings):
            for entry in memory.inputs:
                binding.bind_ortvalue_input(entry.name, entry.value)
            for tensor in memory.results[bank]:
                binding.bind_ortvalue_output(tensor.name, tensor.value)
        self._memory = memory

    def _bind_inputs(self, binding: ort.IOBinding, memory: BatchMemory, bank: int) -> None:
        # Binding is what copies an input to where the graph wants it: batches to the device, and
        # some of the state (the step count, say) to the host, where CUDA sessions compute shapes
        # and counters. A binding made once would keep feeding the copies made then.
        for name, port_name in self._old.items():
            binding.bind_ortvalue_input(port_name, self._banks.value(bank, name))
        for entry in memory.inputs:
            binding.bind_ortvalue_input(entry.name, entry.value)
        for tensor in self._scalars:
            binding.bind_ortvalue_input(tensor.name, tensor.value)

    def _collect_unsized(self, binding: ort.IOBinding, outputs: dict[str, Array]) -> None:
        # get_outputs lists values in the order in which their names were first bound.
        values = binding.get_outputs()[: len(self._unsized)]
        for port, value in zip(self._unsized, values, strict=True):
            outputs[port.of] = value.numpy().copy()
