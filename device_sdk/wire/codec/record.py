"""A CBOR map with a fixed set of fields, read one typed field at a time."""

from __future__ import annotations

from collections.abc import Collection

from device_sdk.wire.codec import cbor
from device_sdk.wire.codec.errors import WireError


class Record:
    """The fields of one control message. Every getter raises ``WireError("bad-field")``.

    A map whose keys are not exactly the expected ones is refused (``wrong-fields``): a field that
    one end ignores and the other obeys is how two versions of a protocol come to disagree.
    """

    def __init__(self, value: cbor.CborValue, fields: Collection[str]) -> None:
        if not isinstance(value, dict):
            raise WireError("wrong-fields", "expected a map of fields")
        if value.keys() != set(fields):
            # The sender's own key names stay out of the message: it goes to a log.
            raise WireError("wrong-fields", f"expected exactly the fields {sorted(fields)}")
        self._value: dict[str, cbor.CborValue] = value

    @classmethod
    def decode(cls, data: bytes, fields: Collection[str], *, limit_bytes: int) -> Record:
        """Decode canonical CBOR of at most ``limit_bytes`` that holds exactly ``fields``."""
        return cls(cbor.decode(data, limit_bytes=limit_bytes), fields)

    def octets(self, name: str, length: int) -> bytes:
        """A byte string of exactly ``length`` bytes."""
        value = self._value[name]
        if not isinstance(value, bytes) or len(value) != length:
            raise _bad(name, f"a byte string of {length} bytes")
        return value

    def text(self, name: str, limit_bytes: int) -> str:
        """A text string of at most ``limit_bytes`` bytes in UTF-8."""
        value = self._value[name]
        if not isinstance(value, str) or len(value.encode()) > limit_bytes:
            raise _bad(name, f"a text of at most {limit_bytes} bytes")
        return value

    def unsigned(self, name: str, limit: int = 2**64 - 1) -> int:
        """An integer from 0 to ``limit`` inclusive."""
        value = self._value[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
            raise _bad(name, f"an integer from 0 to {limit}")
        return value

    def boolean(self, name: str) -> bool:
        """True or false."""
        value = self._value[name]
        if not isinstance(value, bool):
            raise _bad(name, "true or false")
        return value

    def number(self, name: str) -> float:
        """A finite float (an integer is refused: its encoding is another)."""
        value = self._value[name]
        if not isinstance(value, float):
            raise _bad(name, "a float")
        return value

    def array(self, name: str, limit: int) -> list[cbor.CborValue]:
        """An array of at most ``limit`` items, not looked into."""
        value = self._value[name]
        if not isinstance(value, list) or len(value) > limit:
            raise _bad(name, f"an array of at most {limit} items")
        return value

    def is_null(self, name: str) -> bool:
        """Whether the field is null."""
        return self._value[name] is None

    def any(self, name: str) -> cbor.CborValue:
        """The field's value, whatever it is: for a nested record."""
        return self._value[name]


def _bad(name: str, expected: str) -> WireError:
    return WireError("bad-field", f"field {name!r} must be {expected}")
