"""What a device's owner lets it learn from: named arrays that stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class LocalData:
    """Samples to train on, samples to evaluate with, and samples that their owner agrees to show to
    the other devices.

    Attributes:
        train: arrays by the names of the artifact's batch inputs; row i of each belongs to sample
            i. Never leaves the device. With ``holdout``, what that leaves of the rows given.
        public: the same names, for samples that methods such as mutual learning share with the
            task's devices (and its aggregator). Empty: this device shares none.
        test: the same names, for samples that are never trained on: tasks that ask how good the
            model is get sums over them, and no sample. With ``holdout``, the rows held out.
        holdout: instead of ``test``, hold out about this share of the rows given as ``train``, 0
            to 0.5 (:func:`held_out`). Add new rows at the end, and a row stays on its side.

    Raises ValueError where arrays differ in length or the parts in names or dtypes. Arrays are kept
    as read-only views, not copied, but for rows held out and those left.
    """

    train: Mapping[str, NDArray[Any]]
    public: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    test: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    holdout: InitVar[float] = 0.0

    def __post_init__(self, holdout: float) -> None:
        if not 0 <= holdout <= 0.5:
            raise ValueError(f"holdout is {holdout}; expected a share from 0 to 0.5")
        if holdout and self.test:
            raise ValueError("test and holdout are given; expected one of them")
        for what in ("train", "public", "test"):
            object.__setattr__(self, what, _aligned(what, getattr(self, what)))
        for what, arrays in (("public", self.public), ("test", self.test)):
            if arrays and set(arrays) != set(self.train):
                raise ValueError(
                    f"{what} holds {sorted(arrays)}, train {sorted(self.train)}; expected the same"
                )
            for name, array in arrays.items():
                if array.dtype != self.train[name].dtype:
                    raise ValueError(f"{what} {name!r} is {array.dtype}, train {name!r} is not")
        if holdout:
            out = held_out(self.samples, holdout)
            for what, rows in (("test", out), ("train", ~out)):
                part = {name: array[rows] for name, array in self.train.items()}
                object.__setattr__(self, what, _aligned(what, part))

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return _length(self.train)

    @property
    def public_samples(self) -> int:
        """Number of samples to share."""
        return _length(self.public)

    @property
    def test_samples(self) -> int:
        """Number of samples to evaluate with."""
        return _length(self.test)


def held_out(rows: int, share: float) -> NDArray[np.bool_]:
    """bool [rows]: true for about ``share`` of them, the same ones whatever follows them.

    A row's index alone decides, by a hash without a secret (splitmix64 of Steele et al. 2014): on
    every device, after every restart, and in a home made anew, the same rows are held out. With a
    salt that lives in the home, a device that joined again would evaluate with rows that the
    fleet's model was trained on.
    """
    with np.errstate(over="ignore"):
        mixed = (np.arange(rows, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    drawn: NDArray[np.bool_] = mixed < np.uint64(round(share * 2**64))
    return drawn


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
