"""What each virtual device learns from: a function's answer, made sure of before a round opens.

The function is called with the number of devices and a ``numpy.random.Generator``. It returns one
entry a device, in a sequence or any other iterable; entries of a sequence may be made when they are
asked for. An entry is, for a method on arrays, what ``Device.open(data=...)`` takes; for a
method with a catalogue, the items that the device's user touched, oldest first, as ids or rows of
the catalogue, or a mapping from several users' names to such items.

A table of interactions gives the same without a function: each of its users has a device.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.errors import AggregatorError
from device_sdk.evaluation.report import EvaluationTerms
from device_sdk.interactions import Interactions, InteractionsError, read_interactions
from device_sdk.local_data import LocalData
from device_sdk.system.printable import printable
from device_sdk.tables.text import Reading
from device_sdk.train.evaluate import HeldOutItem
from device_sdk.train.scatter import without_latest
from device_sdk.wire.publish.report import ItemCount

Rows = NDArray[np.int64]
Entries = Sequence[Any]
DataFunction = Callable[[int, np.random.Generator], Iterable[Any]]

_LOOKED_AT = 10
_NOTHING: Rows = np.empty(0, dtype=np.int64)


class DataError(AggregatorError):
    """The function that gives the data, or what it gave, cannot be used."""


class TableEntries(list[list[str]]):
    """Of each of a table's first users the items, oldest first.

    ``understood``: what the table was taken for, in lines for people. ``users``: their names.
    """

    def __init__(self, found: Interactions, devices: int) -> None:
        ids = found.item_ids
        super().__init__(
            [ids[item] for item in found.items_of(user).tolist()] for user in range(devices)
        )
        self.understood, self.users = found.understood, found.user_ids[:devices]


def _table_entries(path: Path, devices: int, reading: Reading) -> TableEntries:
    try:
        found = read_interactions(path, reading)
    except InteractionsError as error:
        raise DataError(f"--data: {error}") from None
    except OSError as error:
        raise DataError(f"--data: {path} cannot be read: {error.strerror}") from None
    users = len(found.user_ids)
    if users < devices:
        raise DataError(
            f"{path} has {users} users, each of whom has a device; {devices} were asked for: "
            f"--devices {users}"
        )
    return TableEntries(found, devices)


def find_function(said: str) -> DataFunction:
    """The function that ``module:function``, or ``path/file.py:function``, names. Raises DataError.

    Modules are looked for in the present folder first.
    """
    source, colon, name = said.rpartition(":")
    if said.endswith(".py"):
        known = ", ".join(_functions(_from_file(Path(said)))) or "none"
        raise DataError(
            f"--data {said} names no function of the file: {said}:FUNCTION; its functions are "
            f"{known}"
        )
    if not colon or not source or not name.isidentifier():
        raise DataError(
            f"--data is {said!r}, and no file; expected module:function, file.py:function, or a "
            "table's file"
        )
    try:
        module = _from_file(Path(source)) if source.endswith(".py") else _by_name(source)
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"{source} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if found is None:
        known = ", ".join(_functions(module)) or "none"
        raise DataError(f"{source} has no {name}; its functions are {known}")
    if not callable(found):
        raise DataError(
            f"{said} is of type {type(found).__name__}; expected a function(devices, rng)"
        )
    return found  # type: ignore[no-any-return]


def _functions(module: Any) -> list[str]:
    return [
        each
        for each, value in vars(module).items()
        if inspect.isfunction(value) and not each.startswith("_")
    ]


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise DataError(f"--data names {path}, which is no file")
    # As if Python ran it: what lies beside it can be imported.
    if (beside := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, beside)
    # Found again by that name: a process of a cluster imports it too.
    name = f"_tessera_data_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _by_name(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def entries_of(
    said: str, devices: int, rng: np.random.Generator, reading: Reading | None = None
) -> Entries:
    """The entries of so many devices: of the function that ``said`` names, or of the table, read as
    ``reading`` says. Raises DataError, naming the function, where it fails or returns anything
    else."""
    path = Path(said)
    if path.suffix != ".py" and path.is_file():
        return _table_entries(path, devices, reading or Reading())
    if reading is not None and reading != Reading():
        raise DataError(f"--columns and its like are for a table; --data is {said!r}")
    function = find_function(said)
    try:
        inspect.signature(function).bind(devices, rng)
    except TypeError:
        raise DataError(
            f"{said} must take two arguments: the number of devices and an rng"
        ) from None
    except ValueError:
        pass  # what is built in does not tell
    try:
        found: Any = function(devices, rng)
    except Exception as error:
        raise _failed(said, error) from error
    if not (isinstance(found, Sized) and hasattr(found, "__getitem__")):
        try:
            each = iter(found)
        except TypeError:
            raise _wrong(said, found) from None
        try:
            found = list(islice(each, devices))
        except Exception as error:
            raise _failed(said, error) from error
    if isinstance(found, (str, bytes, Mapping, LocalData)):
        raise _wrong(said, found)
    if len(found) < devices:
        raise DataError(
            f"{said} returned data of {len(found)} devices; {devices} were asked for (--devices)"
        )
    entries: Entries = found
    return entries


def _wrong(said: str, found: object) -> DataError:
    return DataError(
        f"what {said} returned is of type {type(found).__name__}; expected a sequence or an "
        "iterator with the data of one device an entry"
    )


def _failed(said: str, error: Exception) -> DataError:
    return DataError(f"{said} failed: {type(error).__name__}: {error}")


def entry_of(entries: Entries, device: int) -> Any:
    """One device's entry. Raises DataError."""
    try:
        return entries[device]
    except Exception as error:
        raise DataError(
            f"the data of device {device} failed: {type(error).__name__}: {error}"
        ) from error


# Methods on arrays.


def arrays_of(entries: Entries, device: int) -> LocalData:
    """A device's samples. Raises DataError."""
    entry = entry_of(entries, device)
    if not isinstance(entry, LocalData) and callable(entry):
        try:
            entry = entry()
        except Exception as error:
            raise DataError(
                f"the data of device {device} failed: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(entry, LocalData):
        raise DataError(
            f"the data of device {device} is of type {type(entry).__name__}; expected a "
            "device_sdk.LocalData, or a function without arguments that returns one"
        )
    return entry


def require_samples(entries: Entries, devices: int) -> None:
    """Raises DataError where no device has a sample to train on."""
    if not any(arrays_of(entries, device).samples for device in range(devices)):
        raise DataError(f"none of the {devices} devices has a sample to train on")


# Methods with a catalogue: a device's interactions.


def interactions_of(
    entries: Entries,
    device: int,
    catalogue: Mapping[str, int],
    evaluation: EvaluationTerms | None,
) -> tuple[tuple[Rows, ...], list[HeldOutItem], ItemCount]:
    """Per user of a device the rows to train on, rising, and what is held out of them where the
    task evaluates. Items that the catalogue does not have are left out, as on a device, and
    counted.

    Raises DataError.
    """
    entry = entry_of(entries, device)
    rows, latest = [], []
    recorded: set[Any] = set()
    for items in (_listed(each, device) for each in _by_user(entry)):
        if len(items) == 0:
            continue  # a device knows of a user by what the user touched
        own = _rows(items, device, catalogue)
        recorded.update(items.tolist() if isinstance(items, np.ndarray) else items)
        rows.append(np.unique(own))
        # An item that is recorded again stays where it was.
        first = np.unique(own, return_index=True)[1]
        latest.append(own[first.max()] if len(own) else -1)
    positives = tuple(rows)
    unknown = sum(isinstance(each, str) and each not in catalogue for each in recorded)
    count = ItemCount(len(recorded), unknown)
    if evaluation is None:
        return positives, [], count
    numbers = np.array([len(each) for each in positives], dtype=np.int64)
    kept, held, _ = without_latest(positives, np.array(latest, dtype=np.int64), numbers, _NOTHING)
    return kept, held, count


def require_known(entries: Entries, devices: int, catalogue: Mapping[str, int]) -> None:
    """Raises DataError where no device has an item, and where the catalogue knows nothing of what
    the first ones have: it is of other ids."""
    listed: list[Any] = []
    looked_at = 0
    while looked_at < devices and (looked_at < _LOOKED_AT or not listed):
        for own in _by_user(entry_of(entries, looked_at)):
            listed.extend(_listed(own, looked_at))
        looked_at += 1
    if not listed:
        raise DataError(f"none of the {devices} devices has an item to train on")
    if not any(not isinstance(each, str) or each in catalogue for each in listed):
        known = next(iter(catalogue))
        raise DataError(
            f"the catalogue has none of the items of the first {looked_at} devices, such as "
            f"{printable(repr(listed[0]))}; it has items such as {printable(repr(known))}"
            f"{_swapped(entries, catalogue)}"
        )


def _swapped(entries: Entries, catalogue: Mapping[str, int]) -> str:
    names = entries.users if isinstance(entries, TableEntries) else ()
    if not any(each in catalogue for each in names):
        return ""
    return ", as which it knows the table's users: --columns user=COLUMN,item=COLUMN swaps them"


def _by_user(entry: Any) -> list[Any]:
    return list(entry.values()) if isinstance(entry, Mapping) else [entry]


def _listed(items: Any, device: int) -> Sequence[Any] | NDArray[Any]:
    if isinstance(items, np.ndarray) and items.ndim == 1:
        return items
    if not isinstance(items, (str, bytes, Mapping, np.ndarray)) and isinstance(items, Iterable):
        return list(items)
    raise _no_items(items, device)


def _rows(items: Sequence[Any] | NDArray[Any], device: int, catalogue: Mapping[str, int]) -> Rows:
    if all(isinstance(each, str) for each in items):
        known = [catalogue[each] for each in items if each in catalogue]
        return np.array(known, dtype=np.int64)
    if not all(isinstance(each, (int, np.integer)) for each in items):
        raise _no_items(next(e for e in items if not isinstance(e, (int, np.integer))), device)
    rows = np.asarray(items, dtype=np.int64)
    unknown = rows[(rows < 0) | (rows >= len(catalogue))]
    if len(unknown):
        raise DataError(
            f"the data of device {device} names row {int(unknown[0])}; the catalogue has "
            f"{len(catalogue)} items"
        )
    return rows


def _no_items(found: object, device: int) -> DataError:
    return DataError(
        f"the data of device {device} holds something of type {type(found).__name__}; expected its "
        "user's items, oldest first, as ids or rows of the catalogue, or a mapping from users to "
        "their items"
    )
