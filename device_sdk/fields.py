"""A map with known keys, read strictly: CBOR records, JSON objects, TOML tables and settings.

Each key is asked for by name with what its value must be, and a key that nobody asked for is
refused: what one end ignores and the other obeys is how two of them come to disagree. A format is
a subclass of :class:`Fields`, which says what is raised and how a place is named. A dataclass of
settings declares its types and bounds once; :func:`require_declared` holds its values to them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, dataclass, is_dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    get_args,
    get_origin,
    get_type_hints,
)

_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Within:
    """The numbers that a setting may be: ``Annotated[float, Within(0, 1, above=True)]``.

    ``least`` and ``most`` are among them, but for ``above`` and ``below``; with ``or_zero`` so is
    0, wherever the bounds lie.
    """

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    below: bool = False
    or_zero: bool = False

    def __contains__(self, value: float) -> bool:
        if self.or_zero and value == 0:
            return True
        least, most = self.least, self.most
        return (least < value if self.above else least <= value) and (
            value < most if self.below else value <= most
        )

    def words(self, noun: str) -> str:
        """What is expected: such as "a number above 0 and at most 1"."""
        noun = f"0 or {noun}" if self.or_zero else noun
        low, high = _in_words(self.least), _in_words(self.most)
        if low and high and not self.above and not self.below:
            return f"{noun} from {low} to {high}"
        parts = []
        if low:
            parts.append(f"{'above' if self.above else 'of at least'} {low}")
        if high:
            parts.append(f"{'below' if self.below else 'at most'} {high}")
        return " ".join([noun, " and ".join(parts)]).rstrip()


def _in_words(bound: float) -> str:
    if isinstance(bound, int):
        return f"{bound:,}"
    return f"{bound:g}" if math.isfinite(bound) else ""


@dataclass(frozen=True, slots=True)
class OneOf:
    """The texts that a setting may be, where they are not known to the type checker."""

    known: tuple[str, ...]


UNBOUNDED = Within()


class Settings(Protocol):
    """A dataclass whose fields say what they may be."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class Fields:
    """The keys of one map. ``where`` names it in refusals, which are of the class ``fault``."""

    __slots__ = ("_known", "_values", "where")
    fault: ClassVar[type[Exception]] = ValueError
    numbers: ClassVar[tuple[type, ...]] = (int, float)

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._known: set[str] = set()
        self.where = where

    def name(self, key: str) -> str:
        """The key with its place."""
        return ".".join(part for part in (self.where, key) if part)

    def error(self, key: str, what: str) -> Exception:
        """A refusal that names the key in full."""
        return self.fault(f"{self.name(key)} {what}")

    def wrong(self, key: str, value: object, expected: str) -> Exception:
        """The refusal of a value."""
        return self.error(key, f"is {value!r:.80}; expected {expected}")

    def names(self) -> tuple[str, ...]:
        """The keys that there are: for a map whose keys are names of the sender's own."""
        return tuple(self._values)

    def take(self, key: str, default: Any = MISSING) -> Any:
        """A value, whatever it is. Without a default it must be there."""
        self._known.add(key)
        value = self._values.get(key, default)
        if value is MISSING:
            raise self.error(key, "is missing")
        return value

    def text(self, key: str, most_bytes: int | None = None, default: Any = MISSING) -> str:
        """A text, of at most ``most_bytes`` in UTF-8."""
        value = self.take(key, default)
        if not isinstance(value, str) or (
            most_bytes is not None and len(value.encode()) > most_bytes
        ):
            bound = "" if most_bytes is None else f" of at most {most_bytes} bytes"
            raise self.wrong(key, value, f"a text{bound}")
        return value

    def choice(self, key: str, known: Collection[str], default: Any = MISSING) -> str:
        """One of these texts."""
        value = self.take(key, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(key, value, f"one of {', '.join(known)}")
        return value

    def integer(self, key: str, within: Within = UNBOUNDED, default: Any = MISSING) -> int:
        """An integer; true and false are none."""
        value = self.take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value not in within:
            raise self.wrong(key, value, within.words("an integer"))
        return value

    def number(self, key: str, within: Within = UNBOUNDED, default: Any = MISSING) -> float:
        """A finite number, as a float."""
        value = self.take(key, default)
        number = isinstance(value, self.numbers) and not isinstance(value, bool)
        if not number or not -_LARGEST <= value <= _LARGEST or value not in within:
            raise self.wrong(key, value, within.words("a number"))
        return float(value)

    def boolean(self, key: str, default: Any = MISSING) -> bool:
        """True or false."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def array(self, key: str, most: int | None = None, default: Any = MISSING) -> list[Any]:
        """An array of at most ``most`` items, which are not looked into."""
        value = self.take(key, default)
        if not isinstance(value, list) or (most is not None and len(value) > most):
            bound = "" if most is None else f" of at most {most} items"
            raise self.wrong(key, value, f"an array{bound}")
        return value

    def mapping(self, key: str, default: Any = MISSING) -> dict[str, Any]:
        """A map, which is not looked into."""
        value = self.take(key, default)
        if not isinstance(value, dict):
            raise self.wrong(key, value, "a map")
        return value

    def declared(self, key: str, hint: Any, default: Any = MISSING) -> Any:
        """A value of the type that a settings class declares, within the bounds beside it."""
        return self.typed(key, *taken_apart(hint), default)

    def typed(
        self, key: str, hint: Any, within: Within, known: tuple[str, ...], default: Any = MISSING
    ) -> Any:
        """As :meth:`declared`, of a declaration that was :func:`taken_apart`."""
        if known:
            return self.choice(key, known, default)
        if hint is bool:
            return self.boolean(key, default)
        if hint is int:
            return self.integer(key, within, default)
        if hint is float:
            return self.number(key, within, default)
        if hint is str:
            return self.text(key, default=default)
        value = self.take(key, default)
        if hint == str | None:
            if value is not None and not (isinstance(value, str) and value):
                raise self.wrong(key, value, "a text that is not empty")
            return value
        if hint == tuple[str, ...]:
            if (
                isinstance(value, str)
                or not isinstance(value, (list, tuple))
                or not all(isinstance(each, str) and each for each in value)
            ):
                raise self.wrong(key, value, "a list of texts")
            return tuple(value)
        raise TypeError(f"{key} is declared as {hint}, which no reader knows")

    def end(self) -> None:
        """Refuse keys that were never asked for: a misspelt key must not be ignored."""
        for key in self._values:
            if key not in self._known:
                known = ", ".join(sorted(self._known)) or "no keys"
                raise self.error(key, f"is unknown here; known are: {known}")


@cache
def taken_apart(hint: Any) -> tuple[Any, Within, tuple[str, ...]]:
    """A declaration's bare type, its bounds, and the texts that it may be (none: any)."""
    bare, *beside = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    known = get_args(bare) if get_origin(bare) is Literal else ()
    within = next((each for each in beside if isinstance(each, Within)), UNBOUNDED)
    return bare, within, next((each.known for each in beside if isinstance(each, OneOf)), known)


def hints_of(kind: type[Settings]) -> dict[str, Any]:
    """What a settings class declares, bounds included, by its fields' names."""
    return _hints_of(kind)


@cache
def _hints_of(kind: Any) -> dict[str, Any]:
    found = get_type_hints(kind, include_extras=True)
    return {name: found[name] for name in kind.__dataclass_fields__}


def require_declared(settings: Settings) -> None:
    """Raises ValueError, naming the field, for a value that a frozen dataclass does not declare.

    Of a class inside nothing is asked: it has looked at itself.
    """
    declared = _declared_by(type(settings))
    values = Fields({name: getattr(settings, name) for name in declared})
    for name, parts in declared.items():
        values.typed(name, *parts)


@cache
def _declared_by(kind: Any) -> dict[str, tuple[Any, Within, tuple[str, ...]]]:
    # Kept by class: to look a type hint up takes longer than to look at the value.
    return {n: taken_apart(hint) for n, hint in _hints_of(kind).items() if not is_settings(hint)}


@cache
def is_settings(hint: Any) -> bool:
    """Whether a field holds settings of its own: a table below its table."""
    return isinstance(hint, type) and is_dataclass(hint)


def default_of(field: Field[Any]) -> Any:
    """A dataclass field's default; MISSING where it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()
