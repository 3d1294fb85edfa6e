"""Which device or task an operator means."""

from __future__ import annotations

from aggregator.errors import AggregatorError
from aggregator.store import Store
from aggregator.store.rows import DeviceRow, TaskRow
from device_sdk.wire.seal.enrolment_message import without_codes

SECONDS_LIMIT = 2**40
"""Times are below, and how long something lasts."""


def require_number(what: str, value: int, least: int, limit: int) -> None:
    """``value`` is from ``least`` on and below ``limit``. Raises AggregatorError."""
    if not least <= value < limit:
        raise AggregatorError(f"{what} is {value}: expected {least} to {limit - 1}")


def device_of(store: Store, text: str) -> DeviceRow:
    """The device of this name, or whose id begins with ``text``.

    Raises AggregatorError unless it is just one.
    """
    wanted = text.strip()
    found = store.devices.called(wanted)
    if len(found) != 1:
        what = "no device" if not found else f"{len(found)} devices"
        raise AggregatorError(
            f"{what} named {without_codes(text)!r}, or with an id that begins so; see "
            "tessera-aggregator devices"
        )
    return found[0]


def tasks_of(store: Store, name: str | None) -> list[TaskRow]:
    """The task that was named, or all of them. Raises AggregatorError where there is no such."""
    rows = store.tasks.all()
    found = [row for row in rows if name in (None, row.name)]
    if not found:
        names = ", ".join(row.name for row in rows if row.name is not None)
        raise AggregatorError(
            f"this home has no task {name!r}; it has {names or 'none that was served'}"
        )
    return found


def task_of(store: Store, name: str | None) -> TaskRow:
    """The task that was named, which is served or was. Raises AggregatorError where there is no
    such, or where none was named and there are several."""
    rows = {row.name: row for row in store.tasks.all() if row.name is not None}
    if not rows:
        raise AggregatorError("no task has been served yet: its first version is made by serve")
    names = ", ".join(rows)
    if name is None and len(rows) > 1:
        raise AggregatorError(f"this home has several tasks: name one by --task, of {names}")
    named = next(iter(rows)) if name is None else name
    if named not in rows:
        raise AggregatorError(f"this home has no task {named!r}; it has {names}")
    return rows[named]


def task_to_change(store: Store, name: str) -> TaskRow:
    """The task of this name. Raises AggregatorError where there is none, or where it is on its way
    out."""
    rows = {row.name: row for row in store.tasks.all()}
    if name not in rows:
        known = ", ".join(sorted(each for each in rows if each is not None))
        raise AggregatorError(f"there is no task {name!r}; there is {known or 'none served yet'}")
    if rows[name].state == "retiring":
        raise AggregatorError(f"task {name} is being retired: serve does so as soon as it runs")
    return rows[name]
