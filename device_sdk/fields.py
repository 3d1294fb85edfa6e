"""What a value may be, said once: in the types of a frozen dataclass.

    @dataclass(frozen=True, slots=True)
    class Placement(Declared):
        shard: Annotated[int, Within(0, 65_535)]
        cell: Annotated[str, Such(is_cell, "host or host:port")] = ""

From these types come the look that a :class:`Declared` takes at itself when it is made
(:class:`Misfit`, a ValueError), the plain values that it is written as (:func:`plain`: maps, arrays
and scalars, for CBOR and JSON), the strict reading of such values (:func:`read`), and the tables
of the documentation.

A field's key is its name, or what ``Key`` says. A field with a default is left out where it has
this default, and refused where it is spelt out all the same: a record has one form. A key that is
no field is refused: what one end ignores and the other obeys is how two of them come to disagree.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, cached_property
from numbers import Integral, Real
from operator import attrgetter, is_, lt
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

_LARGEST = sys.float_info.max
T = TypeVar("T")

# What stands beside a type in ``Annotated``.


@dataclass(frozen=True, slots=True)
class Within:
    """The numbers that a value may be: ``Annotated[float, Within(0, 1, above=True)]``.

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

    def holds(self, source: _PlanSource, name: str) -> str:
        """The expression for whether a number, of that name, is among these."""
        below, most = "<" if self.below else "<=", source.number(self.most)
        above, least = "<" if self.above else "<=", source.number(self.least)
        inside = f"{least} {above} {name} {below} {most}"
        return f"({name} == 0 or {inside})" if self.or_zero else inside

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
        power = bound.bit_length()
        return f"2^{power} - 1" if power > 31 and bound == 2**power - 1 else f"{bound:,}"
    return f"{bound:g}" if math.isfinite(bound) else ""


UNBOUNDED = Within()


@dataclass(frozen=True, slots=True)
class OneOf:
    """The texts that a value may be, where they are not known to the type checker."""

    known: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Length:
    """How long: bytes of a byte string, or of a text in UTF-8; items of an array or a map.

    ``Length(16)`` is exactly so long, ``Length(1, 64)`` within these.
    """

    least: int
    most: int | None = None

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the most."""
        return self.least, self.least if self.most is None else self.most

    def words(self, unit: str) -> str:
        """Such as " of 16 bytes", " of 1 to 64 bytes", " of at most 32 items"."""
        if self.most is None:
            return f" of {self.least:,} {unit}"
        if self.most == sys.maxsize:
            return f" of {self.least:,} {unit} or more" if self.least else ""
        return f" of {f'{self.least:,} to' if self.least else 'at most'} {self.most:,} {unit}"


@dataclass(frozen=True, slots=True)
class Such:
    """What else a value must be: ``test`` gives something true for it, ``words`` say what it asks.

    ``reason`` is the name under which a refusal is counted.
    """

    test: Callable[[Any], object]
    words: str
    reason: str = "bad-field"


@dataclass(frozen=True, slots=True)
class Rising:
    """An array in strictly rising order: of its items, or of this attribute of theirs."""

    by: str = ""


@dataclass(frozen=True, slots=True)
class Key:
    """A field's key where it is written, if that is not its name."""

    name: str


@dataclass(frozen=True, slots=True)
class As:
    """What a value is written and checked as: a tuple as a NamedTuple, whose fields have names."""

    kind: Any


class Misfit(ValueError):
    """A value that its declaration does not allow.

    Attributes:
        value: what was found.
        expected: what should stand there; nothing of the value itself.
        reason: a slug to count it under: ``bad-field``, ``wrong-fields``, or a ``Such``'s.
        name: where it stands, such as ``tasks[3].cohort``; empty for the whole.
    """

    def __init__(
        self, value: object, expected: str, reason: str = "bad-field", name: str = ""
    ) -> None:
        super().__init__(value, expected, reason, name)
        self.value, self.expected, self.reason, self.name = value, expected, reason, name

    def __str__(self) -> str:
        return f"{self.name or 'this'} is {self.value!r:.80}; expected {self.expected}"

    @property
    def place(self) -> str:
        """The name, without keys of maps, which came with the value."""
        return re.sub(r"\[['\"].*", "[...]", self.name, flags=re.DOTALL)

    def below(self, name: str) -> Misfit:
        """The same, where the value is that of ``name`` in another."""
        joint = "." if self.name and not self.name.startswith("[") else ""
        return type(self)(self.value, self.expected, self.reason, name + joint + self.name)


# Kinds: what a type with all that stands beside it asks for.

Look: TypeAlias = Callable[[Any], Any]
Types: TypeAlias = Any  # a tuple of types: for isinstance, after which the value stays what it is


class _PlanSource:
    """A function of one argument, ``value``, in Python's own words, and the objects it names.

    A class's plan is written out and compiled at its first use, as ``dataclass`` does it with
    ``__init__``: a look at a message then is a row of comparisons, without a call for each field.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._locals = 0

    def named(self, value: Any) -> str:
        """A name for an object."""
        name = f"_{len(self._objects)}"
        self._objects[name] = value
        return name

    def number(self, value: float) -> str:
        """A number in Python's own words; a name for infinity, which has none."""
        return repr(value) if math.isfinite(value) else self.named(value)

    def local(self) -> str:
        """A name for a variable."""
        self._locals += 1
        return f"v{self._locals}"

    def is_default(self, name: str, default: Any) -> str:
        """Whether the variable is this default: see ``DeclaredField.is_left_out``."""
        if default is None or isinstance(default, bool):
            return f"{name} is {default}"
        same = f"type({name}) is {self.named(type(default))} and "
        return f"({same}{name} == {self.named(default)})"

    def compiled(self, *lines: str) -> Look:
        """The function of these lines."""
        found: dict[str, Any] = {}
        exec("\n    ".join(("def function(value):", *lines)), self._objects, found)
        return cast(Look, found["function"])


class Kind:
    """One declaration. ``words``: what is expected, for errors and documentation.

    ``kept``: the types of its values in Python; ``written``: of its plain values. Of each kind
    there are the whole looks :meth:`checked` and :meth:`read`, which say what is wrong, and the
    expressions from which quick ones are made for what is right: they are over a variable's name.
    """

    words = "anything"
    kept: Types = (object,)
    written: Types = (object,)

    def checked(self, value: Any) -> Any:
        """The value as it is kept. Raises Misfit."""
        return value

    def read(self, value: Any) -> Any:
        """A plain value in the types that :meth:`checked` looks into. Raises Misfit."""
        return value

    def plain(self, value: Any) -> Any:
        """A checked value as maps, arrays and scalars."""
        return self._plain(value)

    @cached_property
    def _plain(self) -> Look:
        source = _PlanSource()
        return source.compiled(f"return {self.as_plain(source, 'value')}")

    def fits(self, source: _PlanSource, name: str) -> str:
        """True only where :meth:`checked` would give the very same value."""
        return "True"

    def as_read(self, source: _PlanSource, name: str) -> str:
        """What :meth:`read` gives; raises LookupError, TypeError or ValueError where it may not."""
        return name

    def as_plain(self, source: _PlanSource, name: str) -> str:
        """What :meth:`plain` gives."""
        return name


class _Nothing(Kind):
    words = "null"
    kept = written = (NoneType,)

    def fits(self, source: _PlanSource, name: str) -> str:
        return f"{name} is None"


class _Boolean(Kind):
    words = "true or false"
    kept = written = (bool,)

    def checked(self, value: Any) -> Any:
        if value is True or value is False:
            return value
        raise Misfit(value, self.words)

    def fits(self, source: _PlanSource, name: str) -> str:
        return f"({name} is True or {name} is False)"


class _Integer(Kind):
    kept, written = (int, Integral), (int,)

    def __init__(self, within: Within) -> None:
        self._within, self.words = within, within.words("an integer")

    def checked(self, value: Any) -> Any:
        integer = isinstance(value, self.kept) and not isinstance(value, bool)
        if integer and value in self._within:
            return value if isinstance(value, int) else int(value)  # such as numpy's
        raise Misfit(value, self.words)

    def fits(self, source: _PlanSource, name: str) -> str:
        return f"type({name}) is int and {self._within.holds(source, name)}"


class _Number(Kind):
    kept, written = (float, int, Real), (float,)

    def __init__(self, within: Within) -> None:
        self._within, self.words = within, within.words("a number")

    def checked(self, value: Any) -> Any:
        number = isinstance(value, self.kept) and not isinstance(value, bool)
        if not number or not -_LARGEST <= value <= _LARGEST or value not in self._within:
            raise Misfit(value, self.words)
        return value if isinstance(value, float) else float(value)

    def read(self, value: Any) -> Any:
        if isinstance(value, float):
            return value
        raise Misfit(value, self.words)  # an integer's encoding is another

    def fits(self, source: _PlanSource, name: str) -> str:
        inside = self._within.holds(source, name)
        return f"type({name}) is float and {-_LARGEST} <= {name} <= {_LARGEST} and {inside}"

    def as_read(self, source: _PlanSource, name: str) -> str:
        return f"({name} if type({name}) is float else {source.named(self.read)}({name}))"


class _Sized(Kind):
    """A text or a byte string."""

    def __init__(self, kind: type, length: Length, such: tuple[Such, ...]) -> None:
        self.kept = self.written = (kind,)
        self._least, self._most = length.bounds
        self._kind: Any = kind
        self._such = such
        noun = ", ".join(each.words for each in such) + "," if such else _NOUNS[kind]
        self.words = (noun + length.words("bytes")).removesuffix(",")

    def checked(self, value: Any) -> Any:
        if not isinstance(value, self._kind):
            raise Misfit(value, self.words)
        if not self._least <= _bytes_of(value) <= self._most:
            raise Misfit(value, self.words)
        for each in self._such:
            if not each.test(value):
                raise Misfit(value, self.words, each.reason)
        return value

    def fits(self, source: _PlanSource, name: str) -> str:
        parts = [f"type({name}) is {self._kind.__name__}"]
        if (self._least, self._most) != (0, sys.maxsize):
            size = f"len({name})"
            if self._kind is str:
                size = f"({size} if {name}.isascii() else {source.named(_bytes_of)}({name}))"
            parts.append(_between(self._least, size, self._most))
        return " and ".join(parts + [f"{source.named(each.test)}({name})" for each in self._such])


def _between(least: int, name: str, most: int) -> str:
    return f"{name} == {least}" if least == most else f"{least} <= {name} <= {most}"


_NOUNS: dict[type, str] = {str: "a text", bytes: "a byte string"}


def _bytes_of(value: str | bytes) -> int:
    if isinstance(value, bytes) or value.isascii():
        return len(value)
    return len(value.encode("utf-8", "replace"))


class _OneOf(Kind):
    kept = written = (str,)

    def __init__(self, known: tuple[str, ...]) -> None:
        self.known, self.words = known, f"one of {', '.join(known)}"

    def checked(self, value: Any) -> Any:
        if isinstance(value, str) and value in self.known:
            return value
        raise Misfit(value, self.words)

    def fits(self, source: _PlanSource, name: str) -> str:
        return f"type({name}) is str and {name} in {source.named(self.known)}"


class _Member(Kind):
    """An enumeration's member, written as its value."""

    written = (str, int)

    def __init__(self, kind: type[Enum]) -> None:
        self.kept = (kind,)
        self._by_value = {each.value: each for each in kind}
        self.words = f"one of {', '.join(str(each.value) for each in kind)}"

    def checked(self, value: Any) -> Any:
        if isinstance(value, self.kept):
            return value
        raise Misfit(value, self.words)

    def read(self, value: Any) -> Any:
        found = self._by_value.get(value) if isinstance(value, self.written) else None
        if found is None:
            raise Misfit(value, self.words)
        return found

    def fits(self, source: _PlanSource, name: str) -> str:
        return f"type({name}) is {source.named(*self.kept)}"

    def as_read(self, source: _PlanSource, name: str) -> str:
        known, read = source.named(self._by_value), source.named(self.read)
        return f"({known}[{name}] if type({name}) is str else {read}({name}))"

    def as_plain(self, source: _PlanSource, name: str) -> str:
        return f"{name}._value_"  # as ``value``, without a descriptor's call


def _require_such(value: Any, such: tuple[Such, ...]) -> None:
    for each in such:
        if not each.test(value):
            raise Misfit(value, each.words, each.reason)


class _Array(Kind):
    kept, written = (tuple, list), (list, tuple)

    def __init__(
        self, item: Kind, length: Length, order: Rising | None, such: tuple[Such, ...]
    ) -> None:
        self._item, self._such = item, such
        self._least, self._most = length.bounds
        self._order = order
        rising = "" if order is None else f", by rising {order.by or 'value'}, each once"
        also = "".join(f", {each.words}" for each in such)
        self.words = f"a list{length.words('items')}{rising}, each {item.words}{also}"

    def checked(self, value: Any) -> Any:
        kept = self._each(value, self.kept, self._item.checked)
        if self._order and not self._rises(kept):
            raise Misfit(value, self.words)
        _require_such(kept, self._such)
        return value if isinstance(value, tuple) and all(map(is_, kept, value)) else kept

    def _rises(self, kept: tuple[Any, ...]) -> bool:
        by = self._order.by if self._order else ""
        marks = tuple(map(attrgetter(by), kept)) if by else kept
        return all(map(lt, marks, marks[1:]))

    def read(self, value: Any) -> Any:
        return self._each(value, self.written, self._item.read)

    def _each(self, value: Any, types: Types, look: Callable[[Any], Any]) -> Any:
        if not isinstance(value, types):
            raise Misfit(value, self.words)
        if not self._least <= len(value) <= self._most:
            raise Misfit(f"{len(value)} items", self.words)
        found: list[Any] = []
        try:
            found.extend(map(look, value))
        except Misfit as misfit:
            raise misfit.below(f"[{len(found)}]") from None
        return tuple(found)

    def _long(self, name: str, kind: str) -> str:
        size = _between(self._least, f"len({name})", self._most)
        return f"type({name}) is {kind} and {size}"

    def fits(self, source: _PlanSource, name: str) -> str:
        each = source.local()
        tests = [each.test for each in self._such] + [self._rises] * (self._order is not None)
        also = "".join(f" and {source.named(test)}({name})" for test in tests)
        items = f"all([{self._item.fits(source, each)} for {each} in {name}])"
        return f"{self._long(name, 'tuple')} and (not {name} or {items}{also})"

    def as_read(self, source: _PlanSource, name: str) -> str:
        each = source.local()
        items = f"tuple([{self._item.as_read(source, each)} for {each} in {name}])"
        return f"({items} if {self._long(name, 'list')} else {source.named(self.read)}({name}))"

    def as_plain(self, source: _PlanSource, name: str) -> str:
        each = source.local()
        return f"[{self._item.as_plain(source, each)} for {each} in {name}]"


class _Map(Kind):
    kept, written = (Mapping,), (dict,)

    def __init__(self, key: Kind, item: Kind, length: Length, such: tuple[Such, ...]) -> None:
        self._key, self._item, self._such = key, item, such
        self._least, self._most = length.bounds
        also = "".join(f", {each.words}" for each in such)
        self.words = f"a map{length.words('entries')} from {key.words} to {item.words}{also}"

    def checked(self, value: Any) -> Any:
        kept = self._each(value, self.kept, self._key.checked, self._item.checked)
        _require_such(kept, self._such)
        return kept

    def read(self, value: Any) -> Any:
        return self._each(value, self.written, self._key.read, self._item.read)

    def _each(
        self,
        value: Any,
        types: Types,
        of_key: Callable[[Any], Any],
        of_item: Callable[[Any], Any],
    ) -> dict[Any, Any]:
        if not isinstance(value, types):
            raise Misfit(value, self.words)
        if not self._least <= len(value) <= self._most:
            raise Misfit(f"{len(value)} entries", self.words)
        found: dict[Any, Any] = {}
        for key, each in value.items():
            try:
                found[of_key(key)] = of_item(each)
            except Misfit as misfit:
                raise misfit.below(f"[{key!r:.70}]") from None
        return found

    def fits(self, source: _PlanSource, name: str) -> str:
        return "False"  # a copy is kept: it may change no more

    def as_read(self, source: _PlanSource, name: str) -> str:
        return f"{source.named(self.read)}({name})"

    def as_plain(self, source: _PlanSource, name: str) -> str:
        key, item = source.local(), source.local()
        plain = self._item.as_plain(source, item)
        return f"{{{key}: {plain} for {key}, {item} in {name}.items()}}"


class _Either(Kind):
    """One of several kinds, told apart by their types."""

    def __init__(self, kinds: tuple[Kind, ...]) -> None:
        self._kinds = kinds
        self.words = " or ".join(each.words for each in kinds)
        self.kept = tuple(each for kind in kinds for each in kind.kept)
        self.written = tuple(each for kind in kinds for each in kind.written)

    def checked(self, value: Any) -> Any:
        for kind in self._kinds:
            if isinstance(value, kind.kept):
                return kind.checked(value)
        raise Misfit(value, self.words)

    def read(self, value: Any) -> Any:
        for kind in self._kinds:
            if isinstance(value, kind.written):
                return kind.read(value)
        raise Misfit(value, self.words)

    def _first(self, name: str, types: list[str], looks: list[str], other: str) -> str:
        turns = (
            f"{look} if isinstance({name}, {each})" for each, look in zip(types, looks, strict=True)
        )
        return f"({' else '.join((*turns, other))})"

    def fits(self, source: _PlanSource, name: str) -> str:
        types = [source.named(each.kept) for each in self._kinds]
        looks = [f"({each.fits(source, name)})" for each in self._kinds]
        return self._first(name, types, looks, "False")

    def as_read(self, source: _PlanSource, name: str) -> str:
        types = [source.named(each.written) for each in self._kinds]
        looks = [each.as_read(source, name) for each in self._kinds]
        return self._first(name, types, looks, f"{source.named(self.read)}({name})")

    def as_plain(self, source: _PlanSource, name: str) -> str:
        types = [source.named(each.kept) for each in self._kinds]
        looks = [each.as_plain(source, name) for each in self._kinds]
        return self._first(name, types, looks, name)


@dataclass(frozen=True, slots=True)
class DeclaredField:
    """A field of a record: its name, its key, its kind, and its default (MISSING: none)."""

    name: str
    key: str
    kind: Kind
    default: Any

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is MISSING

    def is_left_out(self, value: Any) -> bool:
        """Whether a record is written without it: where it is its default."""
        return type(value) is type(self.default) and bool(value == self.default)

    def checked(self, value: Any) -> Any:
        """The value as it is kept. The default is right in any case: it says that there is none."""
        return value if self.is_left_out(value) else self.kind.checked(value)

    def read(self, value: Any) -> Any:
        """What a plain value is. The default is spelt by leaving it out."""
        found = self.kind.read(value)
        if self.is_left_out(found):
            raise Misfit(found, f"left out where it is {found!r}")
        return found


class _Record(Kind):
    """A map with the fields of a dataclass or a NamedTuple."""

    written: Types = (dict,)

    def __init__(self, kind: Any) -> None:
        self._kind, self.entries = kind, entries_of(kind)
        self.kept = (kind, tuple)
        self._required = {each.key for each in self.entries if each.required}
        self._optional = {each.key for each in self.entries} - self._required
        self._reads = tuple(
            (e.key, e.name, e.kind.read if e.required else e.read) for e in self.entries
        )
        self.words = f"a map of {', '.join(sorted(each.key for each in self.entries))}"

    def checked(self, value: Any) -> Any:
        if is_dataclass(value) and isinstance(value, self._kind):
            return value  # it has looked at itself
        if not isinstance(value, tuple) or len(value) != len(self.entries):
            raise Misfit(value, self.words)
        return self._made(zip(_checks_of(self._kind), value, strict=True))

    def read(self, value: Any) -> Any:
        if not isinstance(value, dict) or value.keys() - self._optional != self._required:
            raise Misfit(self._differing(value), self.words, "wrong-fields")
        return self._made((each, value[each[0]]) for each in self._reads if each[0] in value)

    def _differing(self, value: Any) -> object:
        """Which keys it lacks, or has beside."""
        if not isinstance(value, dict):
            return value
        lacks = sorted(self._required - value.keys())
        unknown = sorted(value.keys() - self._required - self._optional)
        return f"a map without {', '.join(lacks)}" if lacks else f"a map with {', '.join(unknown)}"

    def _made(self, parts: Iterable[tuple[tuple[str, str, Look], Any]]) -> Any:
        found = {}
        for (key, name, look), part in parts:
            try:
                found[name] = look(part)
            except Misfit as misfit:
                raise misfit.below(key) from None
        return self._kind(**found)

    def fits(self, source: _PlanSource, name: str) -> str:
        if is_dataclass(self._kind):
            return f"isinstance({name}, {source.named(self._kind)})"
        parts = (f"({e.kind.fits(source, f'{name}.{e.name}')})" for e in self.entries)
        return f"type({name}) is {source.named(self._kind)} and {' and '.join(parts)}"

    def as_read(self, source: _PlanSource, name: str) -> str:
        return f"{source.named(self.quick_read)}({name})"

    def as_plain(self, source: _PlanSource, name: str) -> str:
        return f"{source.named(self._plain)}({name})"

    @cached_property
    def _plain(self) -> Look:
        source = _PlanSource()
        always, lines = [], []
        for each in self.entries:
            part = source.local()
            lines.append(f"{part} = value.{each.name}")
            item = each.kind.as_plain(source, part)
            if each.required:
                always.append(f"{each.key!r}: {item}")
            else:
                lines.append(f"if not {source.is_default(part, each.default)}:")
                lines.append(f"    more[{each.key!r}] = {item}")
        return source.compiled("more = {}", *lines, f"return {{{', '.join((*always, '**more'))}}}")

    @cached_property
    def quick_read(self) -> Look:
        """As :meth:`read`; raises LookupError, TypeError or ValueError in its Misfit's place."""
        source = _PlanSource()
        missing, refuse = source.named(MISSING), source.named(_refuse)
        lines, parts = [f"found = {len(self._required)}"], []
        for each in self.entries:
            part = source.local()
            parts.append(part)
            item = each.kind.as_read(source, part)
            if each.required:
                lines += [f"{part} = value[{each.key!r}]", f"{part} = {item}"]
                continue
            default = source.named(each.default)
            lines += [
                f"{part} = value.get({each.key!r}, {missing})",
                f"if {part} is {missing}:",
                f"    {part} = {default}{'.copy()' if isinstance(each.default, dict) else ''}",
                "else:",
                "    found += 1",
                f"    {part} = {item}",
                f"    if {source.is_default(part, each.default)}: {refuse}()",
            ]
        return source.compiled(
            f"if type(value) is not dict: {refuse}()",
            *lines,
            f"if len(value) != found: {refuse}()",
            f"return {source.named(self._kind)}({', '.join(parts)})",
        )

    def look(self) -> Look:
        """What a :class:`Declared` does when it was made."""
        source = _PlanSource()
        lines, tests = [], []
        for each in self.entries:
            part = source.local()
            lines.append(f"{part} = value.{each.name}")
            test = each.kind.fits(source, part)
            if isinstance(each.default, dict):
                test = f"{source.is_default(part, each.default)} or {test}"
            elif not each.required:
                test = f"{part} is {source.named(each.default)} or {test}"
            tests.append(f"({test})")
        lines.append(f"if not ({' and '.join(tests)}): {source.named(_require_declared)}(value)")
        if self._kind.check is not Declared.check:
            lines.append("value.check()")
        return source.compiled(*lines)


def _refuse() -> NoReturn:
    raise ValueError


class _Row(_Record):
    """An array of all fields, in their order: where their names would take too much room."""

    written = (list,)

    def __init__(self, kind: Any) -> None:
        super().__init__(kind)
        self._reads = tuple((each.key, each.name, each.kind.read) for each in self.entries)
        self.words = f"a list of {', '.join(each.key for each in self.entries)}"

    def read(self, value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(self._reads):
            raise Misfit(value, self.words)
        return self._made(zip(self._reads, value, strict=True))

    @cached_property
    def _plain(self) -> Look:
        source = _PlanSource()
        names = [(source.local(), each) for each in self.entries]
        lines = [f"{name} = value.{each.name}" for name, each in names]
        parts = ", ".join(each.kind.as_plain(source, name) for name, each in names)
        return source.compiled(*lines, f"return [{parts}]")

    @cached_property
    def quick_read(self) -> Look:
        source = _PlanSource()
        names = [(source.local(), each) for each in self.entries]
        parts = ", ".join(each.kind.as_read(source, name) for name, each in names)
        return source.compiled(
            f"if type(value) is not list: {source.named(_refuse)}()",
            f"{', '.join(name for name, _ in names)}, = value",
            f"return {source.named(self._kind)}({parts})",
        )


class Declared:
    """Base of frozen dataclasses that are what their fields' types say.

    Raises ValueError, naming the field, for a value outside of them; :meth:`check` adds what a
    class asks of several at once. Lists are kept as tuples, integers of a float's field as floats.
    """

    __slots__ = ()
    misfit: ClassVar[type[Misfit]] = Misfit
    """What is raised for a value outside of its type."""
    IS_ROW: ClassVar[bool] = False
    """Whether it is written as an array of its fields, without their names."""
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls) -> None:
        cls.__post_init__ = Declared.__post_init__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        # The first of a class: from then on this is the look that is made for it.
        kind: Any = type(self)
        kind.__post_init__ = _record_of(kind).look()
        kind.__post_init__(self)

    def check(self) -> None:
        """Raises ValueError for fields that do not go together."""


def _require_declared(record: Declared) -> None:
    """Raises Misfit, naming the field, for a value that a frozen dataclass does not declare."""
    for _, name, check in _checks_of(cast(Any, type(record))):
        value = getattr(record, name)
        try:
            kept = check(value)
        except Misfit as found:
            misfit = record.misfit(*found.args)
            raise misfit.below(name) from None
        if kept is not value:
            object.__setattr__(record, name, kept)


@cache
def _checks_of(kind: Any) -> tuple[tuple[str, str, Look], ...]:
    return tuple(
        (e.key, e.name, e.kind.checked if e.required else e.checked) for e in entries_of(kind)
    )


@cache
def entries_of(kind: Any) -> tuple[DeclaredField, ...]:
    """What a dataclass or NamedTuple declares, in its order."""
    if is_dataclass(kind):
        defaults = {each.name: default_of(each) for each in fields(kind) if each.init}
    else:
        defaults = {each: kind._field_defaults.get(each, MISSING) for each in kind._fields}
    hints = hints_of(kind)
    return tuple(
        DeclaredField(
            name, _beside(hints[name], Key, Key(name)).name, kind_of(hints[name]), default
        )
        for name, default in defaults.items()
    )


def hints_of(kind: Any) -> dict[str, Any]:
    """What a dataclass or NamedTuple declares, bounds included, by its fields' names."""
    return _hints_of(kind)


@cache
def _hints_of(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    names = kind.__dataclass_fields__ if is_dataclass(kind) else kind._fields
    return {name: hints[name] for name in names}


def _beside(hint: Any, marker: type[T], default: T) -> T:
    """What stands beside a type of this class of markers."""
    beside = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((each for each in beside if isinstance(each, marker)), default)


@cache
def kind_of(hint: Any) -> Kind:
    """The kind that a type, with what stands beside it, declares. Raises TypeError for others."""
    bare, *beside = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    bare = _beside(hint, As, As(bare)).kind
    origin, inside = get_origin(bare), get_args(bare)
    known = _beside(hint, OneOf, OneOf(inside if origin is Literal else ())).known
    length = _beside(hint, Length, Length(0, sys.maxsize))
    such = tuple(each for each in beside if isinstance(each, Such))
    if known:
        return _OneOf(known)
    if bare in (str, bytes):
        return _Sized(bare, length, such)
    if bare in _SIMPLE:
        return _SIMPLE[bare](_beside(hint, Within, UNBOUNDED))
    if origin in (Union, UnionType):
        return _Either(tuple(map(kind_of, inside)))
    if origin is tuple:
        order = next((each for each in beside if isinstance(each, Rising)), None)
        return _Array(kind_of(inside[0]), length, order, such)
    if origin in (dict, Mapping):
        return _Map(kind_of(inside[0]), kind_of(inside[1]), length, such)
    if isinstance(bare, type) and issubclass(bare, Enum):
        return _Member(bare)
    if is_dataclass(bare) or hasattr(bare, "_fields"):
        return (_Row if getattr(bare, "IS_ROW", False) else _Record)(bare)
    raise TypeError(f"{hint} is no declaration that is known here")


_SIMPLE: dict[Any, Callable[[Within], Kind]] = {
    bool: lambda _: _Boolean(),
    int: _Integer,
    float: _Number,
    NoneType: lambda _: _Nothing(),
    Any: lambda _: Kind(),
}


def require(hint: Any, value: object, name: str) -> None:
    """Raises Misfit, naming it, for a value that is not what a type declares."""
    try:
        kind_of(hint).checked(value)
    except Misfit as misfit:
        raise misfit.below(name) from None


def plain(record: object) -> dict[str, Any]:
    """A record as plain values, by its keys."""
    return cast("dict[str, Any]", _plains(cast(Any, type(record)))(record))


def read(kind: type[T], value: object) -> T:
    """The record that a plain value is. Raises Misfit, and ValueError as its class does."""
    try:
        return cast(T, _quick_reads(cast(Any, kind))(value))
    except (LookupError, TypeError, ValueError):
        return cast(T, _record_of(kind).read(value))  # says what is wrong


def _record_of(kind: Any) -> _Record:
    return cast(_Record, kind_of(kind))


@cache
def _plains(kind: Any) -> Look:
    return _record_of(kind)._plain


@cache
def _quick_reads(kind: Any) -> Look:
    return _record_of(kind).quick_read


def texts_of(hint: Any) -> tuple[str, ...]:
    """The texts that a declared value may be; none where it is not one of a few."""
    kind = kind_of(hint)
    return kind.known if isinstance(kind, _OneOf) else ()


@cache
def is_settings(hint: Any) -> bool:
    """Whether a field holds settings of its own: a table below its table."""
    return isinstance(hint, type) and is_dataclass(hint)


def default_of(field: Field[Any]) -> Any:
    """A dataclass field's default; MISSING where it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


class Fields:
    """The keys of one map, asked for one by one: where no class declares them all.

    ``where`` names the map in refusals, which are of the class ``fault``.
    """

    __slots__ = ("_known", "_values", "where")
    fault: ClassVar[type[Exception]] = ValueError

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

    def declared(self, key: str, hint: Any, default: Any = MISSING) -> Any:
        """A value that is what a type, with what stands beside it, declares."""
        value = self.take(key, default)
        try:
            return kind_of(hint).checked(value)
        except Misfit as misfit:
            raise self.wrong(key + misfit.name, misfit.value, misfit.expected) from None

    def text(self, key: str, most_bytes: int = sys.maxsize, default: Any = MISSING) -> str:
        """A text, of at most ``most_bytes`` in UTF-8."""
        return cast(str, self.declared(key, Annotated[str, Length(0, most_bytes)], default))

    def choice(self, key: str, known: Collection[str], default: Any = MISSING) -> str:
        """One of these texts."""
        return cast(str, self.declared(key, Annotated[str, OneOf(tuple(known))], default))

    def integer(self, key: str, within: Within = UNBOUNDED, default: Any = MISSING) -> int:
        """An integer; true and false are none."""
        return cast(int, self.declared(key, Annotated[int, within], default))

    def number(self, key: str, within: Within = UNBOUNDED, default: Any = MISSING) -> float:
        """A finite number, as a float."""
        return cast(float, self.declared(key, Annotated[float, within], default))

    def boolean(self, key: str, default: Any = MISSING) -> bool:
        """True or false."""
        return cast(bool, self.declared(key, bool, default))

    def array(self, key: str, default: Any = MISSING) -> list[Any]:
        """An array, whose items are not looked into."""
        return list(self.declared(key, tuple[Any, ...], default))

    def mapping(self, key: str, default: Any = MISSING) -> dict[str, Any]:
        """A map, which is not looked into."""
        return cast("dict[str, Any]", self.declared(key, Mapping[str, Any], default))

    def end(self) -> None:
        """Refuse keys that were never asked for: a misspelt key must not be ignored."""
        for key in self._values:
            if key not in self._known:
                known = ", ".join(sorted(self._known)) or "no keys"
                raise self.error(key, f"is unknown here; known are: {known}")
