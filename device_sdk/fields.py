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
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, cached_property
from numbers import Integral, Real
from operator import attrgetter, lt
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

    def holds(self, source: _Plan, name: str) -> str:
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

    def rises(self, items: tuple[Any, ...]) -> bool:
        """Whether it does."""
        marks = tuple(map(attrgetter(self.by), items)) if self.by else items
        return all(map(lt, marks, marks[1:]))


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
Parts: TypeAlias = Iterator[tuple[str, "Kind | DeclaredField", Any]]


class _Plan:
    """A function of one argument, ``value``, in Python's own words, and the objects it names.

    What is declared is written out and compiled at its first use, as ``dataclass`` does it with
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
        """Whether the variable is this default: see ``DeclaredField.is_default``."""
        if default is None or isinstance(default, bool):
            return f"{name} is {default}"
        same = f"type({name}) is {self.named(type(default))} and "
        return f"({same}{name} == {self.named(default)})"

    def compiled(self, *lines: str) -> Look:
        """The function of these lines."""
        found: dict[str, Any] = {}
        exec("\n    ".join(("def function(value):", *lines)), self._objects, found)
        return cast(Look, found["function"])


def _compiled(expression: Callable[[_Plan, str], str]) -> Look:
    source = _Plan()
    return source.compiled(f"return {expression(source, 'value')}")


class Kind:
    """One declaration. ``words``: what is expected, for errors and documentation.

    Each kind says its conditions once, as expressions over a variable's name: :meth:`fits` of what
    is kept, :meth:`as_read` of what is read, :meth:`as_plain`. Whoever asks has the function that
    is compiled of them; what is wrong, and where, is looked for only once it has refused.

    ``kept``: the types of its values in Python; ``written``: of its plain values. ``copies``:
    whether a copy of what is given is kept, which may change no more.
    """

    words = "anything"
    kept: Types = (object,)
    written: Types = (object,)
    copies = False

    def fits(self, source: _Plan, name: str) -> str:
        """Whether a value is one that is kept, as it is."""
        return "True"

    def as_read(self, source: _Plan, name: str) -> str:
        """What a plain value is, in the types that :meth:`normal` takes; raises Misfit where it
        has another form."""
        return name

    def as_plain(self, source: _Plan, name: str) -> str:
        """A value that is kept as maps, arrays and scalars."""
        return name

    def normal(self, value: Any) -> Any:
        """What a value is kept as, where it is right but of another type: numpy's integers, a list
        in the place of a tuple. Raises Misfit for what is inside."""
        return value

    def parts(self, value: Any) -> Parts:
        """Of a plain value: where each part stands, its kind, and the part."""
        return iter(())

    def misfit(self, value: Any, kept: Any) -> Misfit:
        """What is said of a value that is not right as a whole; ``kept``: as :meth:`normal`."""
        return Misfit(value, self.words)

    def checked(self, value: Any) -> Any:
        """The value as it is kept. Raises Misfit."""
        kept = self.normal(value)
        if self._fits(kept):
            return kept
        raise self.misfit(value, kept)

    def refuse(self, value: Any) -> NoReturn:
        """Raises Misfit."""
        raise Misfit(value, self.words)

    def located(self, value: Any, misfit: Misfit) -> Misfit:
        """Why a plain value is not read, with the place of the part that is to blame."""
        for place, kind, part in self.parts(value):
            try:
                kind.checked(kind.read(part))
            except Misfit as inner:
                found = kind.located(part, inner)
                return found.below(place) if place else found
        return misfit

    @cached_property
    def _fits(self) -> Look:
        return _compiled(self.fits)

    @cached_property
    def read(self) -> Look:
        """:meth:`as_read`, compiled."""
        return _compiled(self.as_read)

    @cached_property
    def plain(self) -> Look:
        """:meth:`as_plain`, compiled."""
        return _compiled(self.as_plain)

    def _read_if(self, source: _Plan, condition: str, name: str, found: str) -> str:
        return f"({found} if {condition} else {source.named(self.refuse)}({name}))"


class _Nothing(Kind):
    words = "null"
    kept = written = (NoneType,)

    def fits(self, source: _Plan, name: str) -> str:
        return f"{name} is None"


class _Boolean(Kind):
    words = "true or false"
    kept = written = (bool,)

    def fits(self, source: _Plan, name: str) -> str:
        return f"({name} is True or {name} is False)"


class _Integer(Kind):
    kept, written = (int, Integral), (int,)

    def __init__(self, within: Within) -> None:
        self._within, self.words = within, within.words("an integer")

    def fits(self, source: _Plan, name: str) -> str:
        return f"type({name}) is int and {self._within.holds(source, name)}"

    def normal(self, value: Any) -> Any:
        is_integer = isinstance(value, self.kept) and not isinstance(value, bool)
        return int(value) if is_integer else value  # such as numpy's


class _Number(Kind):
    kept, written = (float, int, Real), (float,)

    def __init__(self, within: Within) -> None:
        self._within, self.words = within, within.words("a number")

    def fits(self, source: _Plan, name: str) -> str:
        inside = self._within.holds(source, name)
        return f"type({name}) is float and {-_LARGEST} <= {name} <= {_LARGEST} and {inside}"

    def normal(self, value: Any) -> Any:
        is_number = isinstance(value, self.kept) and not isinstance(value, bool)
        return float(value) if is_number and -_LARGEST <= value <= _LARGEST else value

    def as_read(self, source: _Plan, name: str) -> str:
        # An integer's encoding is another.
        return self._read_if(source, f"type({name}) is float", name, name)


class _Sized(Kind):
    """A text or a byte string."""

    def __init__(self, kind: type, length: Length, such: tuple[Such, ...]) -> None:
        self.kept = self.written = (kind,)
        self._least, self._most = length.bounds
        self._kind: Any = kind
        self._such = such
        noun = ", ".join(each.words for each in such) + "," if such else _NOUNS[kind]
        self.words = (noun + length.words("bytes")).removesuffix(",")

    def fits(self, source: _Plan, name: str) -> str:
        parts = [f"type({name}) is {self._kind.__name__}"]
        if (self._least, self._most) != (0, sys.maxsize):
            size = f"len({name})"
            if self._kind is str:
                size = f"({size} if {name}.isascii() else {source.named(_size)}({name}))"
            parts.append(_between(self._least, size, self._most))
        return " and ".join(parts + [f"{source.named(each.test)}({name})" for each in self._such])

    def normal(self, value: Any) -> Any:
        return value[:] if isinstance(value, self._kind) else value  # plain, where it was not

    def misfit(self, value: Any, kept: Any) -> Misfit:
        fails = []
        if isinstance(value, self._kind) and self._least <= _size(kept) <= self._most:
            fails = [each.reason for each in self._such if not each.test(kept)]
        return Misfit(value, self.words, *fails[:1])


def _between(least: int, name: str, most: int) -> str:
    return f"{name} == {least}" if least == most else f"{least} <= {name} <= {most}"


_NOUNS: dict[type, str] = {str: "a text", bytes: "a byte string"}


def _size(value: str | bytes) -> int:
    return len(value if isinstance(value, bytes) else value.encode("utf-8", "replace"))


class _OneOf(Kind):
    kept = written = (str,)

    def __init__(self, known: tuple[str, ...]) -> None:
        self.known, self.words = known, f"one of {', '.join(known)}"

    def fits(self, source: _Plan, name: str) -> str:
        return f"type({name}) is str and {name} in {source.named(self.known)}"

    def normal(self, value: Any) -> Any:
        return value[:] if isinstance(value, str) else value


class _Member(Kind):
    """An enumeration's member, written as its value."""

    written = (str, int)

    def __init__(self, kind: type[Enum]) -> None:
        self.kept = (kind,)
        self._by_value = {each.value: each for each in kind}
        self.words = f"one of {', '.join(str(each.value) for each in kind)}"

    def fits(self, source: _Plan, name: str) -> str:
        return f"type({name}) is {source.named(*self.kept)}"

    def as_read(self, source: _Plan, name: str) -> str:
        known = source.named(self._by_value)
        is_known = f"type({name}) in {source.named(self.written)} and {name} in {known}"
        return self._read_if(source, is_known, name, f"{known}[{name}]")

    def as_plain(self, source: _Plan, name: str) -> str:
        return f"{name}._value_"  # as ``value``, without a descriptor's call


class _Several(Kind):
    """What holds others: so many of them, and in an order or with tests of the whole."""

    unit = "items"

    def __init__(self, length: Length, tests: tuple[Such, ...]) -> None:
        self._least, self._most = length.bounds
        self._tests = tests

    def _whole(self, source: _Plan, name: str, each_fits: str) -> str:
        size = _between(self._least, f"len({name})", self._most)
        also = "".join(f" and {source.named(each.test)}({name})" for each in self._tests)
        return f"type({name}) is {self.kept[0].__name__} and {size} and ({each_fits}{also})"

    def misfit(self, value: Any, kept: Any) -> Misfit:
        if not isinstance(value, self.kept):
            return super().misfit(value, kept)
        if not self._least <= len(kept) <= self._most:
            return Misfit(f"{len(kept)} {self.unit}", self.words)
        fails = (each.reason for each in self._tests if not each.test(kept))
        return Misfit(value, self.words, next(fails, "bad-field"))


class _Array(_Several):
    kept, written = (tuple, list), (list,)

    def __init__(
        self, item: Kind, length: Length, order: Rising | None, such: tuple[Such, ...]
    ) -> None:
        words, tests = "", such
        if order is not None:
            words = f", by rising {order.by or 'value'}, each once"
            tests = (Such(order.rises, words), *such)
        super().__init__(length, tests)
        self._item, self.copies = item, item.copies
        also = "".join(f", {each.words}" for each in such)
        self.words = f"a list{length.words('items')}{words}, each {item.words}{also}"

    def fits(self, source: _Plan, name: str) -> str:
        each = source.local()
        items = f"all([{self._item.fits(source, each)} for {each} in {name}])"
        return self._whole(source, name, f"not {name} or {items}")

    def normal(self, value: Any) -> Any:
        if not isinstance(value, self.kept):
            return value
        found: list[Any] = []
        try:
            found.extend(map(self._item.checked, value))
        except Misfit as misfit:
            raise misfit.below(f"[{len(found)}]") from None
        return tuple(found)

    def parts(self, value: Any) -> Parts:
        if isinstance(value, self.written):
            for place, part in enumerate(value):
                yield f"[{place}]", self._item, part

    def as_read(self, source: _Plan, name: str) -> str:
        each = source.local()
        items = f"tuple([{self._item.as_read(source, each)} for {each} in {name}])"
        return self._read_if(source, f"type({name}) is list", name, items)

    def as_plain(self, source: _Plan, name: str) -> str:
        each = source.local()
        return f"[{self._item.as_plain(source, each)} for {each} in {name}]"


class _Map(_Several):
    kept, written = (dict, Mapping), (dict,)
    copies = True
    unit = "entries"

    def __init__(self, key: Kind, item: Kind, length: Length, such: tuple[Such, ...]) -> None:
        super().__init__(length, such)
        self._key, self._item = key, item
        self.is_flat = not item.copies
        also = "".join(f", {each.words}" for each in such)
        self.words = f"a map{length.words('entries')} from {key.words} to {item.words}{also}"

    def fits(self, source: _Plan, name: str) -> str:
        key, item = source.local(), source.local()
        both = f"{self._key.fits(source, key)} and ({self._item.fits(source, item)})"
        return self._whole(source, name, f"all([{both} for {key}, {item} in {name}.items()])")

    def normal(self, value: Any) -> Any:
        if not isinstance(value, self.kept):
            return value
        found: dict[Any, Any] = {}
        for key, each in value.items():
            try:
                found[self._key.checked(key)] = self._item.checked(each)
            except Misfit as misfit:
                raise misfit.below(f"[{key!r:.70}]") from None
        return found

    def parts(self, value: Any) -> Parts:
        if isinstance(value, self.written):
            for key, part in value.items():
                yield f"[{key!r:.70}]", self._key, key
                yield f"[{key!r:.70}]", self._item, part

    def as_read(self, source: _Plan, name: str) -> str:
        key, item = source.local(), source.local()
        both = f"{self._key.as_read(source, key)}: {self._item.as_read(source, item)}"
        entries = f"{{{both} for {key}, {item} in {name}.items()}}"
        return self._read_if(source, f"type({name}) is dict", name, entries)

    def as_plain(self, source: _Plan, name: str) -> str:
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
        self.copies = any(each.copies for each in kinds)

    def _first(self, source: _Plan, name: str, of: Callable[[Kind], tuple[Types, str]]) -> str:
        """By its type, what stands there; else the last: of the kinds in their order."""
        turns = ((source.named(types), look) for types, look in map(of, self._kinds))
        return "".join(f"{look} if isinstance({name}, {types}) else " for types, look in turns)

    def fits(self, source: _Plan, name: str) -> str:
        looks = self._first(source, name, lambda kind: (kind.kept, f"({kind.fits(source, name)})"))
        return f"({looks}False)"

    def normal(self, value: Any) -> Any:
        for kind in self._kinds:
            if isinstance(value, kind.kept):
                return kind.checked(value)
        return value

    def parts(self, value: Any) -> Parts:
        for kind in self._kinds:
            if isinstance(value, kind.written):
                yield "", kind, value
                return

    def as_read(self, source: _Plan, name: str) -> str:
        looks = self._first(source, name, lambda kind: (kind.written, kind.as_read(source, name)))
        return f"({looks}{source.named(self.refuse)}({name}))"

    def as_plain(self, source: _Plan, name: str) -> str:
        looks = self._first(source, name, lambda kind: (kind.kept, kind.as_plain(source, name)))
        return f"({looks}{name})"


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

    def is_default(self, value: Any) -> bool:
        """Whether a record is written without it."""
        return type(value) is type(self.default) and bool(value == self.default)

    def checked(self, value: Any) -> Any:
        """The value as it is kept. The default is right in any case: it says that there is none."""
        return value if self.is_default(value) else self.kind.checked(value)

    def read(self, value: Any) -> Any:
        """What a plain value is. Raises Misfit, for the default too."""
        found = self.kind.read(value)
        if self.is_default(found):
            self.refuse_default(found)
        return found

    def refuse_default(self, value: Any) -> NoReturn:
        """Raises Misfit: the default is spelt by leaving it out."""
        raise Misfit(value, f"left out where it is {value!r}")

    def located(self, value: Any, misfit: Misfit) -> Misfit:
        """See :meth:`Kind.located`."""
        return self.kind.located(value, misfit)


class _Record(Kind):
    """A map with the fields of a dataclass or a NamedTuple."""

    written: Types = (dict,)

    def __init__(self, kind: Any) -> None:
        self._kind, self.entries = kind, entries_of(kind)
        self.kept = (kind, tuple)
        self._required = {each.key for each in self.entries if each.required}
        self._keys = {each.key for each in self.entries}
        self.words = f"a map of {', '.join(sorted(self._keys))}"

    def fits(self, source: _Plan, name: str) -> str:
        if is_dataclass(self._kind):
            return f"isinstance({name}, {source.named(self._kind)})"  # it has looked at itself
        parts = (f"({e.kind.fits(source, f'{name}.{e.name}')})" for e in self.entries)
        return f"type({name}) is {source.named(self._kind)} and {' and '.join(parts)}"

    def normal(self, value: Any) -> Any:
        is_tuple = isinstance(value, tuple) and len(value) == len(self.entries)
        if not is_tuple or (is_dataclass(value) and isinstance(value, self._kind)):
            return value
        found = {}
        for each, part in zip(self.entries, value, strict=True):
            try:
                found[each.name] = each.checked(part)
            except Misfit as misfit:
                raise misfit.below(each.key) from None
        return self._kind(**found)

    def parts(self, value: Any) -> Parts:
        if isinstance(value, dict):
            for each in self.entries:
                if each.key in value:
                    yield each.key, each, value[each.key]

    def refuse(self, value: Any) -> NoReturn:
        """Raises Misfit, which says what keys it lacks, or has beside."""
        if isinstance(value, dict):
            lacks = sorted(self._required - value.keys())
            unknown = sorted(map(str, value.keys() - self._keys))
            value = f"a map {'without' if lacks else 'with'} {', '.join(lacks or unknown)}"
        raise Misfit(value, self.words, "wrong-fields")

    def as_read(self, source: _Plan, name: str) -> str:
        return f"{source.named(self.read)}({name})"

    def as_plain(self, source: _Plan, name: str) -> str:
        return f"{source.named(self.plain)}({name})"

    @cached_property
    def plain(self) -> Look:
        source = _Plan()
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
    def read(self) -> Look:
        source = _Plan()
        missing, refuse = source.named(MISSING), source.named(self.refuse)
        there, lines, parts = ["pass"], [f"found = {len(self._required)}"], []
        for each in self.entries:
            part = source.local()
            parts.append(part)
            item = each.kind.as_read(source, part)
            if each.required:
                there.append(f"{part} = value[{each.key!r}]")
                lines.append(f"{part} = {item}")
                continue
            default = source.named(each.default)
            lines += [
                f"{part} = value.get({each.key!r}, {missing})",
                f"if {part} is {missing}:",
                f"    {part} = {default}{'.copy()' if isinstance(each.default, dict) else ''}",
                "else:",
                "    found += 1",
                f"    {part} = {item}",
                f"    if {source.is_default(part, each.default)}:",
                f"        {source.named(each.refuse_default)}({part})",
            ]
        return source.compiled(
            f"if type(value) is not dict: {refuse}(value)",
            f"try: {'; '.join(there)}",
            f"except KeyError: {refuse}(value)",
            *lines,
            f"if len(value) != found: {refuse}(value)",
            f"return {source.named(self._kind)}({', '.join(parts)})",
        )

    def look(self) -> Look:
        """What a :class:`Declared` does when it was made."""
        source = _Plan()
        lines, tests, copies = [], [], []
        for each in self.entries:
            part = source.local()
            lines.append(f"{part} = value.{each.name}")
            test = each.kind.fits(source, part)
            if isinstance(each.kind, _Map) and each.kind.is_flat:
                keep = source.named(object.__setattr__)
                copies.append(f"{keep}(value, {each.name!r}, {part}.copy())")
            elif each.kind.copies:
                test = "False"
            if isinstance(each.default, dict):
                test = f"{source.is_default(part, each.default)} or {test}"
            elif not each.required:
                test = f"{part} is {source.named(each.default)} or {test}"
            tests.append(f"({test})")
        lines.append(f"if not ({' and '.join(tests)}): {source.named(_require_declared)}(value)")
        if copies:
            lines.append(f"else: {'; '.join(copies)}")
        if self._kind.check is not Declared.check:
            lines.append("value.check()")
        return source.compiled(*lines)


class _Row(_Record):
    """An array of all fields, in their order: where their names would take too much room."""

    written = (list,)

    def __init__(self, kind: Any) -> None:
        super().__init__(kind)
        self.words = f"a list of {', '.join(each.key for each in self.entries)}"

    def parts(self, value: Any) -> Parts:
        if isinstance(value, list):
            for each, part in zip(self.entries, value, strict=False):
                yield each.key, each.kind, part

    def refuse(self, value: Any) -> NoReturn:
        """Raises Misfit."""
        raise Misfit(value, self.words)

    @cached_property
    def plain(self) -> Look:
        source = _Plan()
        names = [(source.local(), each) for each in self.entries]
        lines = [f"{name} = value.{each.name}" for name, each in names]
        parts = ", ".join(each.kind.as_plain(source, name) for name, each in names)
        return source.compiled(*lines, f"return [{parts}]")

    @cached_property
    def read(self) -> Look:
        source = _Plan()
        names = [(source.local(), each) for each in self.entries]
        parts = ", ".join(each.kind.as_read(source, name) for name, each in names)
        count, refuse = len(names), source.named(self.refuse)
        return source.compiled(
            f"if type(value) is not list or len(value) != {count}: {refuse}(value)",
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
        kind.__post_init__ = cast(_Record, kind_of(kind)).look()
        kind.__post_init__(self)

    def check(self) -> None:
        """Raises ValueError for fields that do not go together."""


def _require_declared(record: Declared) -> None:
    """Raises Misfit, naming the field, for a value that a frozen dataclass does not declare."""
    for each in entries_of(cast(Any, type(record))):
        value = getattr(record, each.name)
        try:
            kept = each.checked(value)
        except Misfit as found:
            misfit = record.misfit(*found.args)
            raise misfit.below(each.name) from None
        if kept is not value:
            object.__setattr__(record, each.name, kept)


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
    return cast("dict[str, Any]", kind_of(cast(Any, type(record))).plain(record))


def read(kind: type[T], value: object) -> T:
    """The record that a plain value is. Raises Misfit, and ValueError as its class does."""
    record = kind_of(cast(Any, kind))
    try:
        return cast(T, record.read(value))
    except Misfit as misfit:
        raise record.located(value, misfit) from None


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
