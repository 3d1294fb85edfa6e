"""Settings of training that broadcasts carry: what is refused, and the way there and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, fields
from typing import Any, ClassVar, Self

from device_sdk.wire.arrays.exchange import Scalar


class TrainingSettings:
    """Base of the flat, frozen dataclasses that a broadcast carries beside its tensors."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def as_scalars(self) -> dict[str, Scalar]:
        """The settings as a broadcast carries them."""
        return dict(asdict(self))

    @classmethod
    def from_scalars(cls, values: Mapping[str, Scalar]) -> Self:
        """Read a broadcast's settings; names of other parts are ignored.

        Raises ValueError for missing names, and what the class raises for values that it refuses.
        """
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in values]
        if missing:
            raise ValueError(f"the broadcast lacks the training settings {', '.join(missing)}")
        return cls(**{name: values[name] for name in names})


def require_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raises ValueError unless ``value`` is an integer within the bounds, which are included."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):  # type: ignore[operator]
        bounds = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise ValueError(f"{name} is {value!r}; expected an integer {bounds}")


def require_number(
    name: str, value: object, least: float, most: float, *, above: bool = False
) -> None:
    """Raises ValueError unless ``value`` is finite and within the bounds.

    They are included; with ``above`` the lower one is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; expected a finite number")
    if not least <= value <= most or (above and value == least):
        low = f"above {least:g}" if above else f"at least {least:g}"
        raise ValueError(f"{name} is {value}; expected a number {low} and at most {most:g}")


def require_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Raises ValueError unless ``value`` is one of ``known``."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")


def require_flags(settings: object, names: Sequence[str]) -> None:
    """Raises ValueError unless all attributes of these names are booleans."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; expected true or false")
