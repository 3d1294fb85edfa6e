"""A method's model as named arrays: what is kept of a version, and what one may begin with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
_MOST_NAMED = 12


class ModelMismatch(ValueError):
    """Arrays that are no model of the method, which is unchanged; the message says how."""


def fitted(
    wanted: Mapping[str, tuple[int, ...]], given: Arrays, ignored: Collection[str] = ()
) -> dict[str, NDArray[np.float32]]:
    """The arrays of these names and shapes, as float32, in the order of ``wanted``.

    ``ignored``: names that may be given and are not asked for. Raises ModelMismatch.
    """
    odd = [f"{name!r} {list(wanted[name])} is missing" for name in wanted if name not in given]
    odd += [f"{name!r} is unknown" for name in given if name not in wanted and name not in ignored]
    for name, shape in wanted.items():
        array = given.get(name)
        if array is None:
            continue
        if array.shape != shape or array.dtype.kind != "f":
            found = f"{array.dtype} {list(array.shape)}"
            odd.append(f"{name!r} is {found}, expected float32 {list(shape)}")
        elif not np.isfinite(array.astype(np.float32)).all():
            odd.append(f"{name!r} holds numbers that are not finite")
    if odd:
        more = f"; and {len(odd) - _MOST_NAMED} more" if len(odd) > _MOST_NAMED else ""
        raise ModelMismatch("; ".join(odd[:_MOST_NAMED]) + more)
    return {name: given[name].astype(np.float32) for name in wanted}
