"""What a device's owner lets it learn from: named arrays that stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class LocalData:
    """Samples to train on, and samples that their owner agrees to show to the other devices.

    Attributes:
        train: arrays by the names of the artifact's batch inputs; row i of each belongs to sample
            i. Never leaves the device.
        public: the same names, for samples that methods such as mutual learning share with the
            task's devices (and its aggregator). Empty: this device shares none.

    Raises ValueError where arrays differ in length or the two parts in names or dtypes. Arrays are
    kept as read-only views, not copied.
    """

    train: Mapping[str, NDArray[Any]]
    public: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what in ("train", "public"):
            object.__setattr__(self, what, _aligned(what, getattr(self, what)))
        if self.public and set(self.public) != set(self.train):
            raise ValueError(
                f"public holds {sorted(self.public)}, train {sorted(self.train)}; expected the same"
            )
        for name, array in self.public.items():
            if array.dtype != self.train[name].dtype:
                raise ValueError(f"public {name!r} is {array.dtype}, train {name!r} is not")

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return _length(self.train)

    @property
    def public_samples(self) -> int:
        """Number of samples to share."""
        return _length(self.public)


DataSource = Callable[[], LocalData]
"""Asked at the start of each round, so that new samples take part in the next one."""


def _length(arrays: Mapping[str, NDArray[Any]]) -> int:
    return len(next(iter(arrays.values()))) if arrays else 0


def _aligned(what: str, arrays: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    views: dict[str, NDArray[Any]] = {}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise ValueError(f"{what} {name!r} must be a numpy array with a row for each sample")
        view = array.view()
        view.flags.writeable = False
        views[name] = view
    lengths = {name: len(array) for name, array in views.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{what} holds arrays of different lengths: {lengths}")
    return MappingProxyType(views)
