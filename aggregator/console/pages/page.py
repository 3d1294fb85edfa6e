"""What a page of the console is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

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


@dataclass(frozen=True, eq=False)
class ConsolePage(Generic[View]):
    """A page. ``/NAME`` shows it, ``templates/NAME.html`` draws ``view``.

    Attributes:
        title: in the navigation, and above the page.
        read: its view model, a frozen dataclass, made of the fleet. Runs on the reader's thread.
            Raises AggregatorError, whose words are shown in the page's place.
        takes: names of what its address may ask for.
        listed: whether the navigation has it.
    """

    name: str
    title: str
    read: Callable[[Fleet, PageQuery], View] = field(repr=False)
    takes: frozenset[str] = frozenset()
    listed: bool = True
