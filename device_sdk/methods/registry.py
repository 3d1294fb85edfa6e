"""Which methods are installed: learners and bindings that packages offer as entry points.

A method is a pair of entry points of one name: in the group ``tessera.learners`` the device's half,
in ``tessera.methods`` the aggregator's. Tessera's own come through the same door (see its
``pyproject.toml``), and what an entry point names is imported when a task needs it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from device_sdk.system.printable import in_words
from device_sdk.wire.codec.message import require_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

LEARNERS = "tessera.learners"
METHODS = "tessera.methods"


class MethodError(ValueError):
    """A method is not installed, or what is installed cannot be used; the message says which
    package offers it and what is wrong."""


def method_names(group: str) -> list[str]:
    """The names that installed packages offer in this group, sorted."""
    return sorted({each.name for each in _offered(group)})


@lru_cache
def load_method(group: str, name: str, *kinds: type, noun: str = "method") -> Any:
    """The class that the entry point ``name`` of this group names, imported. ``noun``: what the
    group's are called, for messages.

    Raises MethodError where no package offers it, two do, it cannot be imported, it is no subclass
    of any of ``kinds``, or its name could not travel in a message (see
    :func:`device_sdk.wire.codec.message.require_name`).
    """
    found = [each for each in _offered(group) if each.name == name]
    if not found:
        raise MethodError(f"no installed package offers the {noun} {name!r}; {_known(group)}")
    if len(found) > 1:
        packages = " and ".join(sorted(map(_package, found)))
        raise MethodError(f"{packages} all offer the {noun} {name!r}: keep one of them installed")
    (entry,) = found
    try:
        require_name(noun, name)
    except ValueError as error:
        raise MethodError(f"{_package(entry)} offers what cannot be used: {error}") from None
    try:
        loaded = entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Whatever somebody else's module does while it is imported.
        moved = isinstance(error, ModuleNotFoundError) and error.name == entry.module
        raise MethodError(
            f"{_package(entry)} offers the {noun} {name!r} as {entry.value!r}, which cannot be "
            f"imported: {in_words(error)}"
            + ("; if its code is newer than its installation, install it anew" if moved else "")
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, kinds)):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise MethodError(
            f"{_package(entry)} offers the {noun} {name!r} as {entry.value!r}; expected a subclass "
            f"of {expected}"
        )
    return loaded


def _offered(group: str) -> list[EntryPoint]:
    # Takes some 10 ms to import, and as much to read: only a device that trains needs it.
    from importlib.metadata import entry_points

    return list(entry_points(group=group))


def _package(entry: EntryPoint) -> str:
    return (
        "a package without a name"
        if entry.dist is None
        else f"{entry.dist.name} {entry.dist.version}"
    )


def _known(group: str) -> str:
    names = method_names(group)
    if names:
        return f"there are {', '.join(names)}"
    return "there is none at all, not even Tessera's own: install it anew (pip install -e .)"
