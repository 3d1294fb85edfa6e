"""The seed that a graph gets at each step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import onnxruntime as ort

from device_sdk.artifact.load import CheckedGraph
from device_sdk.artifact.manifest import Manifest
from device_sdk.artifact.parts import GraphFile, Port
from device_sdk.artifact.safetensors import Array
from device_sdk.errors import BatchError, CallEnded, GraphRunError
from device_sdk.runtime.batch import BatchChecker, BatchMemory
from device_sdk.runtime.session import Calls, HostTensor, SessionSettings, make_session
from device_sdk.runtime.state import StateBanks

_MASK = 2**64 - 1


def step_seed(seed: int, step: int) -> int:
    """A seed in [0, 2**31) for step number `step` (counted from 0) of a run with seed `seed`.

    SplitMix64's output function (Steele, Lea and Flood 2014) on seed and step, so that neighbouring
    steps and neighbouring seeds share nothing. 31 bits, because graphs hash in 32-bit integers.
    """
    value = (seed * 0x9E3779B97F4A7C15 + (step + 1) * 0xD1B54A32D192ED03) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) >> 33


# The scalar inputs of a step that are neither state nor batch: hyper-parameters and the seed.

_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)


class StepScalars:
    """Memory for the scalars. `defaults` are the artifact's values of the hyper-parameters."""

    def __init__(self, graph: GraphFile) -> None:
        self._hyper = [HostTensor(port, ()) for port in graph.select("hyper")]
        self._seed = [HostTensor(port, ()) for port in graph.select("seed")]
        self.defaults = {port.of: float(port.default or 0.0) for port in graph.select("hyper")}

    @property
    def tensors(self) -> list[HostTensor]:
        """What to bind."""
        return [*self._hyper, *self._seed]

    def set(self, hyper: Mapping[str, float] | None, seed: int, step: int) -> None:
        """Fill in one step's values; `hyper` replaces defaults. Raises BatchError if wrong."""
        values = self._checked(hyper) if hyper else self.defaults
        for tensor in self._hyper:
            tensor.array[...] = values[tensor.of]
        for tensor in self._seed:
            tensor.array[...] = step_seed(seed, step)

    def _checked(self, hyper: Mapping[str, float]) -> dict[str, float]:
        for name, value in hyper.items():
            if name not in self.defaults:
                raise BatchError(
                    f"hyper-parameter {name!r} is unknown; this artifact takes "
                    f"{', '.join(self.defaults) or 'none'}"
                )
            # Written so that NaN fails, too.
            if not isinstance(value, (int, float, np.number)) or not abs(value) <= _FLOAT32_MAX:
                raise BatchError(
                    f"hyper-parameter {name!r} is {value!r}, expected a finite float32 number"
                )
        return {**self.defaults, **hyper}


# A train step bound to memory: bound again only where a shape changes, never allocating.


class StepOutputs(Mapping[str, Array]):
    """The extra outputs of a run: in memory of known size, or where onnxruntime has put them.

    The latter are taken when they are looked at, so that nothing is left to do between a run and
    its commit. They stay until the binding runs again, two steps later.
    """

    def __init__(
        self, sized: Mapping[str, Array], unsized: Sequence[Port], binding: ort.IOBinding
    ) -> None:
        self._sized = sized
        # get_outputs lists values in the order in which their names were first bound.
        self._places = {port.of: place for place, port in enumerate(unsized)}
        self._binding = binding

    def __getitem__(self, name: str) -> Array:
        if name not in self._places:
            return self._sized[name]
        array: Array = self._binding.get_outputs()[self._places[name]].numpy()
        return array

    def __iter__(self) -> Iterator[str]:
        return iter((*self._sized, *self._places))

    def __len__(self) -> int:
        return len(self._sized) + len(self._places)


class StepRunner:
    """The train graph bound twice, once per direction between the two banks of state.

    The same OrtValue is input and output of a run for state in place only: elsewhere onnxruntime
    would read what it has already overwritten. `scalars` are the hyper-parameters and the seed,
    whose arrays the caller sets. `host_only` says that no execution provider but the CPU's takes
    part. `constants` are the names of the inputs that the session holds itself.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        graph: GraphFile,
        banks: StateBanks,
        scalars: Sequence[HostTensor],
        calls: Calls,
        *,
        host_only: bool,
        constants: Collection[str] = (),
    ) -> None:
        self._session = session
        self._banks = banks
        self._scalars = scalars
        self._calls = calls
        self._host_only = host_only
        self._old = {
            port.of: port.name for port in graph.select("state") if port.name not in constants
        }
        self._new = {port.of: port.name for port in graph.new_state}
        # A length that only the graph knows: onnxruntime allocates such outputs at each run.
        self._unsized = [port for port in graph.select("output") if None in port.shape]
        self._bindings = (session.io_binding(), session.io_binding())
        loss, guard = graph.select("loss")[0], graph.select("guard")[0]
        self._loss = (HostTensor(loss, ()), HostTensor(loss, ()))
        self._guard = (HostTensor(guard, ()), HostTensor(guard, ()))
        self._new_bounds = next((p.name for p in graph.outputs if p.role == "bounds"), "")
        self._memory: BatchMemory | None = None
        for bank, binding in enumerate(self._bindings):
            # First, so that they also come first when the outputs are collected.
            for port in self._unsized:
                binding.bind_output(port.name, "cpu")
            for tensor in (self._loss[bank], self._guard[bank]):
                binding.bind_ortvalue_output(tensor.name, tensor.value)
            gate = banks.gate
            if gate is not None:
                for flag in (gate.begun, gate.done):
                    binding.bind_ortvalue_output(flag.name, flag.value)
                binding.bind_ortvalue_output(self._new_bounds, gate.bounds[1 - bank].value)
            for tensor in self._inputs(bank):
                binding.bind_ortvalue_input(tensor.name, tensor.value)
        self.bind_state({*self._old, *self._new})

    def _inputs(self, bank: int) -> list[HostTensor]:
        """The inputs that are neither state nor batch."""
        gate = self._banks.gate
        return [*self._scalars, *([] if gate is None else [gate.bounds[bank]])]

    def bind_state(self, names: Iterable[str]) -> None:
        """Bind state tensors whose memory has changed."""
        for name in names:
            for bank, binding in enumerate(self._bindings):
                if name in self._old:
                    binding.bind_ortvalue_input(self._old[name], self._banks.value(bank, name))
                if name in self._new:
                    binding.bind_ortvalue_output(self._new[name], self._banks.value(1 - bank, name))

    def run(self, memory: BatchMemory, arrays: Sequence[Array]) -> tuple[float, float]:
        """Run a step from the current bank into the other; returns loss and guard.

        `arrays` are the batch's, in the graph's order, of the shapes that `memory` is for. Raises
        GraphRunError when onnxruntime fails, StateError where it failed before and tore the state,
        or another thread is in a step; CallEnded.
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
        self._banks.begin(StepOutputs(memory.outputs[bank], self._unsized, binding))
        try:
            self._calls.run(self._session, binding)
        except CallEnded:
            raise
        except Exception as error:  # onnxruntime's exceptions share no base class
            after = "and left the state torn" if self._banks.torn else "which was dropped"
            raise GraphRunError(
                f"onnxruntime failed inside the train step, {after}: {error}"
            ) from error
        finally:
            self._banks.end()
        if not self._host_only:
            binding.synchronize_outputs()
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
        for tensor in self._inputs(bank):
            binding.bind_ortvalue_input(tensor.name, tensor.value)


# Graphs in evaluation mode: outputs, and the loss, from the current state.


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
