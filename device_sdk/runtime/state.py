"""Two banks of state tensors: a step reads one and writes the other.

What a step keeps lies in both, and so does what it writes in place: there the graph itself decides
whether the step is whole, before it writes, and says when it has begun and when it is done.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import onnxruntime as ort

from device_sdk.artifact import safetensors
from device_sdk.artifact.errors import ArtifactError
from device_sdk.artifact.manifest import Manifest
from device_sdk.artifact.parts import (
    DTYPES,
    GraphFile,
    Member,
    Shape,
    StateTensor,
    axes_of,
    describe,
    resolve,
)
from device_sdk.artifact.safetensors import Array
from device_sdk.errors import CheckpointError, StateError
from device_sdk.runtime.session import HostTensor
from device_sdk.system.files import write_atomically

_TORN = (
    "a step failed while it wrote new state over the old, so that the state is neither: restore a "
    "checkpoint, set the whole state, or reset"
)
_IN_A_STEP = (
    "a step is being run, by another thread, and writes new state over the old: a trainer is for "
    "one thread at a time"
)


class Slot(Protocol):
    """The memory of one state tensor in one bank. `value` is what sessions are bound to."""

    value: ort.OrtValue

    def read(self) -> Array:
        """The contents; a view or a copy, so copy before the next write."""
        ...

    def resize(self, shape: tuple[int, ...]) -> None:
        """Another shape, contents undefined. `value` changes: bind again."""
        ...

    def write(self, array: Array) -> None:
        """Copy an array of the slot's shape in."""
        ...


class HostSlot:
    """A slot in main memory, which only grows, so that changing shapes back and forth is cheap."""

    def __init__(self, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> None:
        self._flat: Array = np.zeros(math.prod(shape), dtype)
        self._view: Array
        self.resize(shape)

    def read(self) -> Array:
        return self._view

    def resize(self, shape: tuple[int, ...]) -> None:
        size = math.prod(shape)
        if size > self._flat.size:
            self._flat = np.zeros(size, self._flat.dtype)
        self._view = self._flat[:size].reshape(shape)
        # The OrtValue aliases the array: what the graph writes is read without a copy.
        self.value = ort.OrtValue.ortvalue_from_numpy(self._view)

    def write(self, array: Array) -> None:
        np.copyto(self._view, array, casting="no")


class DeviceSlot:
    """A slot in the memory of an accelerator."""

    def __init__(
        self, dtype: np.dtype[np.generic], shape: tuple[int, ...], memory: ort.OrtMemoryInfo
    ) -> None:
        self._dtype = dtype
        self._memory = memory
        self.resize(shape)

    def read(self) -> Array:
        array = np.empty(self._shape, self._dtype)
        self._copy(self.value, ort.OrtValue.ortvalue_from_numpy(array))
        return array

    def resize(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self.value = ort.OrtValue.ortvalue_from_shape_and_type(
            list(shape), self._dtype, memory_info=self._memory
        )
        self.write(np.zeros(shape, self._dtype))

    def write(self, array: Array) -> None:
        self._copy(ort.OrtValue.ortvalue_from_numpy(np.array(array, order="C")), self.value)

    def _copy(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
        ort.copy_tensors([source], [target])


class CudaSlot(DeviceSlot):
    """A slot in a CUDA device's memory, by the calls that a built-in provider has."""

    def read(self) -> Array:
        array: Array = self.value.numpy()
        return array

    def resize(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self.value = ort.OrtValue.ortvalue_from_numpy(
            np.zeros(shape, self._dtype), "cuda", self._memory.device_id
        )

    def write(self, array: Array) -> None:
        self.value.update_inplace(np.array(array, order="C"))


def _slot(
    dtype: np.dtype[np.generic], shape: tuple[int, ...], memory: ort.OrtMemoryInfo | None
) -> Slot:
    if memory is None:
        return HostSlot(dtype, shape)
    return (CudaSlot if memory.name == "Cuda" else DeviceSlot)(dtype, shape, memory)


def device_memory(session: ort.InferenceSession) -> dict[str, ort.OrtMemoryInfo]:
    """Where a session reads its inputs, by their names; those in main memory are left out.

    What lies there is not copied when it is bound.
    """
    names = [each.name for each in session.get_inputs()]
    places = zip(names, session.get_input_memory_infos(), strict=True)
    return {name: memory for name, memory in places if not _in_main_memory(memory)}


def _in_main_memory(memory: ort.OrtMemoryInfo) -> bool:
    elsewhere: bool = memory.device_mem_type != ort.OrtDeviceMemoryType.DEFAULT
    return elsewhere or memory.name == "Cpu"


@dataclass(frozen=True)
class Head:
    """What is current: a bank, the number of finished steps, and the last one's outputs.

    One object, so that no signal comes between the parts of a commit.
    """

    bank: int = 0
    steps: int = 0
    outputs: Mapping[str, Array] = field(default_factory=dict)


class WriteGate:
    """What a graph that writes in place says of a run. The arrays are what it is bound to.

    `begun` is written before the first state tensor, `done` after the last. `bounds`, one a bank,
    is what the graph knows of the state from the step before.
    """

    def __init__(self, graph: GraphFile) -> None:
        self.begun, self.done = (HostTensor(graph.select(r)[0], ()) for r in ("begun", "done"))
        (port,) = graph.select("bounds")
        self.bounds = tuple(HostTensor(port, resolve(port.shape, {})) for _ in (0, 1))

    def forget(self) -> None:
        """Nothing is known of the state."""
        for each in self.bounds:
            each.array.fill(np.inf)


class StateBanks:
    """All state tensors, twice but for those that a step keeps, and those `in_place`.

    `places`: the memory of an accelerator for each state tensor that does not lie in main memory.
    `gate` is None for graphs without one.
    """

    def __init__(
        self,
        tensors: tuple[StateTensor, ...],
        shapes: Mapping[str, tuple[int, ...]],
        places: Mapping[str, ort.OrtMemoryInfo],
        kept: Collection[str] = (),
        in_place: Collection[str] = (),
        gate: WriteGate | None = None,
    ) -> None:
        def slot(tensor: StateTensor) -> Slot:
            return _slot(DTYPES[tensor.dtype], shapes[tensor.name], places.get(tensor.name))

        self.shapes = dict(shapes)
        self.gate = gate
        self._in_place = frozenset(in_place)
        single = {*kept, *in_place}
        first = {t.name: slot(t) for t in tensors}
        second = {t.name: first[t.name] if t.name in single else slot(t) for t in tensors}
        self._banks: tuple[dict[str, Slot], dict[str, Slot]] = (first, second)
        self._head = Head()
        # What is current once the step that runs is done.
        self._next: Head | None = None
        self._running = False

    @property
    def head(self) -> Head:
        """What is current. A step in place that was done when a signal came is part of it."""
        if self._next is not None and self._in_place and self._says("done"):
            self._head = self._next
            self._next = None
        return self._head

    @property
    def current(self) -> int:
        """The bank that holds the state."""
        return self.head.bank

    @property
    def torn(self) -> bool:
        """Whether a step has failed while it wrote in place."""
        return bool(self._in_place) and self._says("begun") and not self._says("done")

    def _says(self, what: str) -> bool:
        return self.gate is not None and bool(getattr(self.gate, what).array)

    def begin(self, outputs: Mapping[str, Array]) -> None:
        """A step from the current bank into the other is about to run, and fills in `outputs`.

        Raises StateError where the last one has torn the state.
        """
        self._refuse_torn()
        head = self.head
        self._next = None
        if self.gate is not None:
            self.gate.begun.array[...] = False
            self.gate.done.array[...] = False
        self._next = Head(1 - head.bank, head.steps + 1, outputs)
        self._running = True

    def end(self) -> None:
        """The step runs no more, whether it was done or failed."""
        self._running = False

    def commit(self) -> None:
        """Make what the step has written the current state."""
        if self._next is not None and not self._in_place:
            self._head = self._next
            self._next = None

    def take_up(self, head: Head) -> None:
        """Take up other state, all of which was written, or a part that is whole by itself."""
        self._head = head
        self._next = None
        if self.gate is not None:
            self.gate.begun.array[...] = False

    def value(self, bank: int, name: str) -> ort.OrtValue:
        """What to bind for a state tensor in a bank."""
        return self._banks[bank][name].value

    def current_value(self, name: str) -> ort.OrtValue:
        """The current contents where they lie. Raises StateError as ``read``."""
        return self._whole(name).value

    def host_value(self, name: str) -> ort.OrtValue:
        """The current contents in main memory, for a session that reads no other."""
        return ort.OrtValue.ortvalue_from_numpy(self.read(name))

    def read(self, name: str) -> Array:
        """The current contents, as a view where that is possible.

        Raises StateError where they are torn, or a step is writing them.
        """
        return self._whole(name).read()

    def _whole(self, name: str) -> Slot:
        if name in self._in_place:
            self._refuse_torn()
        return self._banks[self.current][name]

    def require_whole(self, given: Collection[str]) -> None:
        """Raises StateError where state is torn that is not given anew."""
        if self._running or not self._in_place <= set(given):
            self._refuse_torn()

    def _refuse_torn(self) -> None:
        if self.torn:
            raise StateError(_IN_A_STEP if self._running else _TORN)

    def write(self, name: str, array: Array) -> bool:
        """Replace a state tensor. True where the shape changes, so that it must be bound again."""
        if self.gate is not None:
            self.gate.forget()
        resized = self.shapes[name] != array.shape
        if resized:
            for bank in self._banks:
                bank[name].resize(array.shape)
            self.shapes[name] = array.shape
        self._banks[self.current][name].write(array)
        return resized


# Parameters and buffers by torch's names: where they lie inside state tensors.


def check_tensor(what: str, array: object, dtype: str, rank: int) -> None:
    """Refuse what is no numpy array of the dtype and rank."""
    if not isinstance(array, (np.ndarray, np.generic)):
        raise StateError(f"{what} is of type {type(array).__name__}, expected a numpy array")
    if array.dtype != DTYPES[dtype]:
        raise StateError(
            f"{what} is {array.dtype}, expected {dtype}. To fix it, convert it with "
            f".astype(np.{dtype})"
        )
    if array.ndim != rank:
        raise StateError(f"{what} has {array.ndim} axes, expected {rank}")


def new_sizes(
    axes: Mapping[str, int], given: Mapping[str, tuple[Shape, tuple[int, ...]]]
) -> dict[str, int]:
    """Sizes of the state's axes once tensors of the given (declared, actual) shapes are set.

    `axes` holds the present sizes. Raises StateError where the given tensors disagree with each
    other or with a fixed length.
    """
    sizes = dict(axes)
    origin: dict[str, str] = {}
    for name, (declared, actual) in given.items():
        for wanted, length in zip(declared, actual, strict=True):
            if isinstance(wanted, str) and length > 0:
                if wanted in origin and sizes[wanted] != length:
                    raise StateError(
                        f"{name!r} has {length} along axis {wanted!r}, but {origin[wanted]!r} has "
                        f"{sizes[wanted]}: tensors that share an axis must agree"
                    )
                sizes[wanted] = length
                origin[wanted] = name
            elif wanted != length:
                raise StateError(
                    f"{name!r} has shape {list(actual)}, expected {describe(declared)} with no "
                    "empty axis"
                )
    return sizes


class Members:
    """Where each parameter and buffer lies."""

    def __init__(self, manifest: Manifest) -> None:
        self._places: Final[dict[str, tuple[StateTensor, Member]]] = {
            member.name: (tensor, member) for tensor, member in manifest.members()
        }
        # Looked at for each member of each device in a simulated round.
        self._packed: Final[dict[str, tuple[slice, tuple[int, ...]]]] = {
            member.name: packed_place(member)
            for _, member in manifest.members()
            if not axes_of(member.shape)
        }

    def place(self, name: str) -> tuple[StateTensor, Member]:
        """The state tensor that holds a parameter or buffer, and its place in it."""
        try:
            return self._places[name]
        except KeyError:
            known = ", ".join(sorted(self._places))
            raise StateError(
                f"{name!r} is no parameter or buffer here; known are {known}"
            ) from None

    def of_kind(self, kind: str) -> list[str]:
        """Names of all parameters, or of all buffers, in order."""
        return [name for name, (tensor, _) in self._places.items() if tensor.kind == kind]

    def view(self, name: str, state: Array) -> Array:
        """The parameter or buffer inside its state tensor's contents, which are contiguous."""
        if name not in self._packed:
            return state
        part, shape = self._packed[name]
        return state.reshape(-1)[part].reshape(shape)


def initial_state(manifest: Manifest, initial: Mapping[str, Array]) -> dict[str, Array]:
    """All state tensors at the start: parameters and buffers as given by name, the rest zero.

    What is zero takes no memory.
    """
    sizes, members = manifest.example_sizes, Members(manifest)
    state: dict[str, Array] = {}
    for tensor in manifest.state:
        shape, dtype = resolve(tensor.shape, sizes), DTYPES[tensor.dtype]
        if not tensor.members:
            state[tensor.name] = np.broadcast_to(np.zeros((), dtype), shape)
        elif axes_of(tensor.shape):
            (member,) = tensor.members
            state[tensor.name] = initial[member.name]
        else:
            state[tensor.name] = np.zeros(shape, dtype)
            for member in tensor.members:
                members.view(member.name, state[tensor.name])[...] = initial[member.name]
    return state


def packed_place(member: Member) -> tuple[slice, tuple[int, ...]]:
    """Where a member of fixed shape lies in its flat state tensor, and its shape."""
    shape = resolve(member.shape, {})
    return slice(member.offset, member.offset + math.prod(shape)), shape


# A trainer's state in one file: safetensors, with the artifact's id and a checksum over it all.

_FORMAT = "tessera-checkpoint-1"
_BLANK = "0" * 64
MAX_CHECKPOINT_BYTES = 2**33


@dataclass(frozen=True)
class Checkpoint:
    """State tensors by name, the id of their artifact, and the run's seed."""

    artifact: str
    seed: int
    state: Mapping[str, safetensors.Array]


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write the file; a crash in the middle leaves the old one."""
    write_atomically(path, encode_checkpoint(checkpoint))


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file. Raises CheckpointError when it is damaged, OSError when it cannot be read."""
    size = Path(path).stat().st_size
    if size > MAX_CHECKPOINT_BYTES:
        raise CheckpointError(f"{path} has {size} bytes: that is no checkpoint")
    try:
        return decode_checkpoint(Path(path).read_bytes())
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The file's bytes. The checksum covers everything, with zeros in its own place."""
    data = safetensors.encode(
        checkpoint.state,
        {
            "format": _FORMAT,
            "sha256": _BLANK,
            "artifact": checkpoint.artifact,
            "seed": str(checkpoint.seed),
        },
    )
    digest = hashlib.sha256(data).hexdigest().encode("ascii")
    return data.replace(_BLANK.encode("ascii"), digest, 1)


def decode_checkpoint(data: bytes) -> Checkpoint:
    """Read a file's bytes. Raises CheckpointError for anything but what was written."""
    try:
        decoded = safetensors.decode(data)
    except ArtifactError as error:
        raise CheckpointError(f"not a checkpoint, or damaged: {error}") from None
    metadata = decoded.metadata
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"not a checkpoint of format {_FORMAT}")
    digest = metadata.get("sha256", "")
    blank = data.replace(digest.encode("utf-8"), _BLANK.encode("ascii"), 1) if digest else data
    if hashlib.sha256(blank).hexdigest() != digest:
        raise CheckpointError("damaged: its SHA-256 does not match its contents")
    try:
        return Checkpoint(metadata["artifact"], int(metadata["seed"]), decoded.tensors)
    except (KeyError, ValueError):
        raise CheckpointError("its artifact's id or seed is missing") from None
