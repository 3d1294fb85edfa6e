"""What a method remembers, declared once for both ends: arrays packed, checked and taken back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

State = Mapping[str, NDArray[Any]]


class RestoreError(ValueError):
    """A state that was given to ``restore`` does not fit the method, which is unchanged."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One array of a state. Floating-point numbers are finite.

    Attributes:
        shape: lengths; a name stands for any length, the same wherever the name occurs.
        least: no number is below it.
        below: every number is below it, or below the length that it names.
        optional: the array may be missing.
        names: of a vector of integers, the attributes that hold them one by one.
    """

    dtype: type[np.generic]
    shape: tuple[int | str, ...] = ()
    least: float | None = None
    below: int | str | None = None
    optional: bool = False
    names: tuple[str, ...] = ()


Schema = Mapping[str, Entry]

COUNT = Entry(np.int64, least=0)


def counters(*names: str) -> Entry:
    """Counts that are stored as one vector, int64 [names]."""
    return Entry(np.int64, (len(names),), least=0, names=names)


def part(prefix: str, state: State) -> dict[str, NDArray[Any]]:
    """The arrays whose names begin with ``prefix``, by what follows it."""
    return {n.removeprefix(prefix): array for n, array in state.items() if n.startswith(prefix)}


def prefixed(prefix: str, state: State) -> dict[str, NDArray[Any]]:
    """The inverse of :func:`part`."""
    return {prefix + name: array for name, array in state.items()}


def unpack(
    schema: Schema,
    state: State,
    *,
    error: Callable[[str], Exception] = RestoreError,
    lengths: Mapping[str, int] | None = None,
) -> dict[str, NDArray[Any]]:
    """Copies of the arrays of ``schema`` that ``state`` holds.

    ``lengths``: what some of the named lengths have to be. Raises ``error``, which names the array
    and what was expected of it, where the names, a dtype, a shape or a number does not fit.
    """
    missing = {name for name, entry in schema.items() if not entry.optional} - set(state)
    odd = sorted(missing or set(state) - set(schema))
    if odd:
        what = "lacks" if missing else "has the unknown"
        raise error(f"the state {what} {odd[0]!r}; expected {', '.join(sorted(schema))}")
    found = {name: state[name] for name in schema if name in state}
    known: dict[str, int] = dict(lengths or {})
    for name, array in found.items():
        entry = schema[name]
        fits = array.dtype == entry.dtype and array.ndim == len(entry.shape)
        for length, wanted in zip(array.shape, entry.shape, strict=False) if fits else ():
            named = isinstance(wanted, str)
            fits &= length == (known.setdefault(wanted, length) if named else wanted)  # type: ignore[arg-type]
        if not fits:
            shape = ", ".join(_length(wanted, known) for wanted in entry.shape)
            raise error(
                f"the state's {name!r} is {array.dtype} {array.shape}; expected "
                f"{np.dtype(entry.dtype)} [{shape}]"
            )
    for name, array in found.items():
        if not array.size or array.dtype.kind == "b":
            continue
        least, below = schema[name].least, schema[name].below
        below = known[below] if isinstance(below, str) else below
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise error(f"the state's {name!r} holds numbers that are not finite")
        if least is not None and array.min() < least:
            raise error(f"the state's {name!r} is expected to hold nothing below {least}")
        if below is not None and array.max() >= below:
            raise error(f"the state's {name!r} is expected to stay below {below}")
    return {name: array.copy() for name, array in found.items()}


def _length(wanted: int | str, known: Mapping[str, int]) -> str:
    return f"{wanted} = {known[wanted]}" if wanted in known else str(wanted)  # type: ignore[index]


class Stateful:
    """Something whose state is some of its attributes.

    ``_schema`` declares them: the array ``name`` is the attribute ``_name``, a Python number where
    it has no axis. ``PARTS`` are Stateful too, the arrays ``a.b.*`` the attribute ``_a_b``, or None
    where they are not in use: what a state holds of such a part is dropped, for settings may change
    between rounds. A subclass's ``PARTS`` are beside its parents'.
    """

    PARTS: ClassVar[tuple[str, ...]] = ()
    FRESH: ClassVar[bool] = False
    """Whether a part starts afresh where a state holds nothing of it."""

    def _schema(self) -> Schema:
        return {}

    @classmethod
    def _declared(cls, what: str) -> tuple[str, ...]:
        """Of ``PARTS``, say, those of all classes, the parents' first."""
        return tuple(
            dict.fromkeys(n for kind in reversed(cls.__mro__) for n in vars(kind).get(what, ()))
        )

    def _parts_follow(self) -> None:
        """The own attributes were taken back: make ``PARTS`` anew where they depend on them."""

    def _require_sound(self) -> None:
        """Everything was taken back: raise RestoreError where it does not go together."""

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything, as named arrays (copies)."""
        found: dict[str, NDArray[Any]] = {}
        for name, entry in self._schema().items():
            values = [getattr(self, f"_{each}") for each in entry.names] or getattr(
                self, f"_{name}"
            )
            found[name] = np.array(values, dtype=entry.dtype)
        for name in self._declared("PARTS"):
            held: Stateful | None = getattr(self, _attribute(name))
            if held is not None:
                found.update(prefixed(f"{name}.", held.state()))
        return found

    def restored(self, state: State) -> Self:
        """One with these settings that continues from ``state()``; this object is unchanged.

        Raises RestoreError for arrays that do not fit.
        """
        found = copy.copy(self)
        if not state and self.FRESH:
            return found
        parts = self._declared("PARTS")
        prefixes = tuple(f"{name}." for name in parts)
        own = {name: array for name, array in state.items() if not name.startswith(prefixes)}
        schema = self._schema()
        for name, array in unpack(schema, own).items():
            for place, each in enumerate(schema[name].names):
                setattr(found, f"_{each}", int(array[place]))
            if not schema[name].names:
                setattr(found, f"_{name}", array if array.ndim else array.item())
        found._parts_follow()
        for name, prefix in zip(parts, prefixes, strict=True):
            held: Stateful | None = getattr(found, _attribute(name))
            if held is not None:
                try:
                    setattr(found, _attribute(name), held.restored(part(prefix, state)))
                except RestoreError as error:
                    raise RestoreError(f"{name}: {error}") from None
        found._require_sound()
        return found

    def restore(self, state: State) -> None:
        """Continue, bit for bit, where ``state()`` was taken.

        Raises RestoreError, and changes nothing, for arrays that do not fit.
        """
        self.__dict__.update(self.restored(state).__dict__)


def _attribute(name: str) -> str:
    return "_" + name.replace(".", "_")
