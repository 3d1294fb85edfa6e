"""Settings of training that broadcasts carry: what is refused, and the way there and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, asdict, fields
from typing import Any, ClassVar, Self

from device_sdk.fields import require_declared
from device_sdk.wire.arrays.exchange import Scalar


class TrainingSettings:
    """Base of the flat, frozen dataclasses that a broadcast carries beside its tensors.

    Each field's type and bounds are those of its declaration. Raises ValueError, naming the
    setting, for a value outside of them; :meth:`check` adds what a class asks of several at once.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __post_init__(self) -> None:
        require_declared(self)
        self.check()

    def check(self) -> None:
        """Raises ValueError for settings that do not go together."""

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
