"""What a page of the console is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from aggregator.errors import AggregatorError
from aggregator.operate.fleet import Fleet

View = TypeVar("View")
_MOST_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class PageQuery:
    """What of a page is asked for, by its address: ``/devices?task=air&search=hall``."""

    values: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, given: Iterable[tuple[str, str]], names: Iterable[str]) -> PageQuery:
        """Those values that a page takes, each once, none longer than it may be."""
        found = {name: value[:_MOST_CHARACTERS] for name, value in given if name in names and value}
        return cls(tuple(sorted(found.items())))

    def get(self, name: str) -> str | None:
        """None where it was not given."""
        return dict(self.values).get(name)


@dataclass(frozen=True)
class PageFile:
    """What of a page can be taken away: ``/PAGE/NAME``, asked for as the page is. ``make``: as
    ``read`` of the page, in a thread of its own."""

    name: str
    media_type: str
    make: Callable[[Fleet, PageQuery], str] = field(repr=False)


@dataclass(frozen=True, eq=False)
class ConsolePage(Generic[View]):
    """A page. ``/NAME`` shows it, ``templates/NAME.html`` draws ``view``.

    Attributes:
        title: in the navigation, and above the page.
        read: its view model, a frozen dataclass, made of the fleet. Runs on the reader's thread.
            Raises AggregatorError, whose words are shown in the page's place.
        takes: names of what its address may ask for.
        listed: whether the navigation has it.
        path: where it is, if not at its name; what stands in braces is asked for too.
        under: the page that the navigation marks in its place.
        follow: the view with what has changed since the last one, which comes first. Of what open
            pages watch that was a moment ago.
    """

    name: str
    title: str
    read: Callable[[Fleet, PageQuery], View] = field(repr=False)
    takes: frozenset[str] = frozenset()
    listed: bool = True
    path: str = ""
    under: str = ""
    follow: Callable[[View, View], View] | None = field(default=None, repr=False)
    files: tuple[PageFile, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.path or f"/{self.name}")
        object.__setattr__(self, "under", self.under or self.name)


def task_asked(fleet: Fleet, query: PageQuery) -> tuple[str, tuple[str, ...]]:
    """The task that a page is about, the first one where none is named, and all that there are.
    Raises AggregatorError where none was served yet."""
    names = tuple(each.name for each in fleet.tasks() if each.name is not None)
    if not names:
        raise AggregatorError("no task was served yet: start serve, which makes its first version")
    return query.get("task") or names[0], names


def number_asked(query: PageQuery, name: str) -> int | None:
    """A whole number that was asked for; None for what is none."""
    return number_in(query.get(name) or "")


def number_in(text: str) -> int | None:
    """The whole number that an address says; None for what is none, or has no place in a store."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
