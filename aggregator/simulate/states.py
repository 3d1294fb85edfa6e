"""What virtual devices keep to themselves between rounds, packed so that a fleet's fits."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_sdk.methods.state import State

_Kind = tuple[tuple[str, np.dtype[Any], np.dtype[Any], int], ...]
_PLACE, _LENGTH = struct.Struct("<H"), struct.Struct("<I")


class StateStore:
    """Learners' states by device, each as one byte string: integers in as few bytes as they need.

    What is got is what was put, bit for bit.
    """

    def __init__(self) -> None:
        self._packed: dict[int, bytes] = {}
        # Names, dtypes and numbers of axes: of few kinds in one fleet.
        self._kinds: list[_Kind] = []
        self._places: dict[_Kind, int] = {}

    @property
    def nbytes(self) -> int:
        """Of all states together."""
        return sum(map(len, self._packed.values()))

    def put(self, device: int, state: State) -> None:
        """Keep a copy of the state; an empty one takes no room."""
        if not state:
            self._packed.pop(device, None)
            return
        arrays = {name: (array, _narrowest(array)) for name, array in state.items()}
        kind = tuple(
            (name, array.dtype, dtype, array.ndim) for name, (array, dtype) in arrays.items()
        )
        if kind not in self._places:
            self._places[kind] = len(self._kinds)
            self._kinds.append(kind)
        parts = [_PLACE.pack(self._places[kind])]
        parts += [_LENGTH.pack(n) for array, _ in arrays.values() for n in array.shape]
        parts += [array.astype(dtype).tobytes() for array, dtype in arrays.values()]
        self._packed[device] = b"".join(parts)

    def get(self, device: int) -> State | None:
        """The state that was put last; None for none."""
        packed = self._packed.get(device)
        if packed is None:
            return None
        (place,) = _PLACE.unpack_from(packed)
        kind = self._kinds[place]
        offset = _PLACE.size
        shapes = []
        for _, _, _, axes in kind:
            shapes.append(struct.unpack_from(f"<{axes}I", packed, offset))
            offset += _LENGTH.size * axes
        found: dict[str, NDArray[Any]] = {}
        for (name, dtype, stored, _), shape in zip(kind, shapes, strict=True):
            count = int(np.prod(shape, dtype=np.int64))
            array = np.frombuffer(packed, stored, count, offset).reshape(shape)
            found[name] = array.astype(dtype)
            offset += count * stored.itemsize
        return found


def _narrowest(array: NDArray[Any]) -> np.dtype[Any]:
    if array.dtype.kind != "i" or array.size == 0:
        return array.dtype
    found = np.result_type(np.min_scalar_type(array.min()), np.min_scalar_type(array.max()))
    return found if found.kind in "iu" else array.dtype  # no integer holds -1 and 2^63
