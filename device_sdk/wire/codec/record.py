"""A CBOR map with a fixed set of fields, read one typed field at a time."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from device_sdk.fields import Fields
from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError


class Record(Fields):
    """The fields of one control message. Every getter raises ``WireError("bad-field")``.

    A map whose keys are not exactly the expected ones is refused at once (``wrong-fields``). No
    refusal repeats the sender's own names and values: it goes to a log. A number is a float, since
    an integer's encoding is another.
    """

    __slots__ = ()
    numbers = (float,)

    def __init__(self, value: cbor.CborValue, fields: Collection[str]) -> None:
        if not isinstance(value, dict):
            raise WireError("wrong-fields", "expected a map of fields")
        if value.keys() != set(fields):
            raise WireError("wrong-fields", f"expected exactly the fields {sorted(fields)}")
        self._values = value

    @classmethod
    def decode(cls, data: bytes, fields: Collection[str], *, limit_bytes: int) -> Record:
        """Decode canonical CBOR of at most ``limit_bytes`` that holds exactly ``fields``."""
        return cls(cbor.decode(data, limit_bytes=limit_bytes), fields)

    def take(self, key: str, default: Any = None) -> Any:
        """A field's value, whatever it is: for a nested record."""
        return self._values[key]

    def wrong(self, key: str, value: object, expected: str) -> WireError:
        """The refusal of a value."""
        return WireError("bad-field", f"field {key!r} must be {expected}")

    def octets(self, name: str, length: int) -> bytes:
        """A byte string of exactly ``length`` bytes."""
        value = self._values[name]
        if not isinstance(value, bytes) or len(value) != length:
            raise self.wrong(name, value, f"a byte string of {length} bytes")
        return value

    def unsigned(self, name: str, limit: int = 2**64 - 1) -> int:
        """An integer from 0 to ``limit`` inclusive."""
        value = self._values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
            raise self.wrong(name, value, f"an integer from 0 to {limit}")
        return value
