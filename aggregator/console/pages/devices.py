"""Devices: who takes part, looked for and paged, each with a page of its own; and what the fleet
can do, as a picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from urllib.parse import urlencode

from aggregator.clock import moment_of
from aggregator.console.pages.page import ConsolePage, PageQuery, number_asked
from aggregator.errors import AggregatorError
from aggregator.look.charts import Dots, Picture, dot_chart
from aggregator.operate.devices import DeviceInTask, DeviceState, FleetDevice
from aggregator.operate.fleet import Fleet
from aggregator.store.rows import Habit, StoredReport
from device_sdk.system.printable import ago, printable, size, span

PAGE_DEVICES = 100
_MOST_DOTS = 400
_MOST_OPTIONS = 12
_COLUMNS = re.compile(r"k=([0-9]+)")


@dataclass(frozen=True, slots=True)
class ToldLine:
    """What a device told last of a task, in text."""

    task: str
    round: str
    said: str
    option: str
    trained: str
    received: str
    counted: str


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """A device, in text. ``device_id``: the whole; ``short_id``: by which commands know it."""

    device_id: str
    short_id: str
    name: str
    labels: str
    state: str
    seen: str
    sdk: str
    told: tuple[ToldLine, ...]


@dataclass(frozen=True, slots=True)
class StateLink:
    """So many devices are in a state; ``address`` shows them. The first is of all states."""

    state: str
    count: int
    address: str
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class OptionLine:
    """So many devices told that they trained an option, in that time."""

    option: str
    devices: int
    median: str
    longest: str


@dataclass(frozen=True, slots=True)
class Capability:
    """What devices of a task picked, and in what time they trained that."""

    task: str
    picture: Picture
    options: tuple[OptionLine, ...]


@dataclass(frozen=True, slots=True)
class DevicesView:
    """What was looked for, and what was found. ``fault``: why it cannot be looked for.

    Attributes:
        first, last: of ``total``, which of them ``devices`` are, counted from 1.
        before, after: addresses of the pages beside this one; empty for none.
    """

    text: str
    labels: str
    task: str
    tasks: tuple[str, ...]
    state: str
    states: tuple[StateLink, ...]
    devices: tuple[DeviceLine, ...]
    first: int
    last: int
    total: int
    before: str
    after: str
    capability: tuple[Capability, ...]
    fault: str = ""


def _read(fleet: Fleet, query: PageQuery) -> DevicesView:
    names = tuple(each.name for each in fleet.tasks() if each.name is not None)
    text, labels, state = (query.get(each) or "" for each in ("q", "label", "state"))
    task, page = query.get("task") or "", max(1, number_asked(query, "page") or 1)
    asked = {"q": text, "label": labels, "task": task, "state": state}
    fault = ""
    try:
        wanted = labels_of(labels)
        chosen = _state(state)
        found = fleet.find_devices(
            text,
            labels=wanted,
            state=chosen,
            task=task or None,
            first=(page - 1) * PAGE_DEVICES,
            most=PAGE_DEVICES,
        )
    except AggregatorError as error:
        fault, found = printable(str(error)), fleet.find_devices(most=0)
    now = fleet.now()
    shown = len(found.devices)
    return DevicesView(
        text,
        labels,
        task,
        names,
        state,
        tuple(_states(found.states, asked)),
        tuple(_line(each, now) for each in found.devices),
        found.first + 1 if shown else 0,
        found.first + shown,
        0 if fault else found.total,
        _address(asked, page - 1) if page > 1 else "",
        _address(asked, page + 1) if found.first + shown < found.total and shown else "",
        tuple(_capability(fleet, [task] if task and not fault else names)),
        fault,
    )


def labels_of(text: str) -> dict[str, str]:
    """Labels that were asked for: ``site=north line=b``. Raises AggregatorError."""
    found = {}
    for each in text.replace(",", " ").split():
        name, equals, value = each.partition("=")
        if not (name and equals and value):
            raise AggregatorError(f"{each[:70]!r} is no label such as site=north")
        found[name] = value
    return found


def _state(text: str) -> DeviceState | None:
    if not text:
        return None
    try:
        return DeviceState(text)
    except ValueError:
        known = ", ".join(DeviceState)
        raise AggregatorError(f"devices are never {text[:40]!r}, but {known}") from None


def _states(counts: Mapping[DeviceState, int], asked: Mapping[str, str]) -> Iterable[StateLink]:
    here = asked["state"]
    everyone = sum(counts.values())
    yield StateLink("all", everyone, _address({**asked, "state": ""}), not here)
    for each in DeviceState:
        address = _address({**asked, "state": str(each)})
        yield StateLink(str(each), counts.get(each, 0), address, here == each)


def _address(asked: Mapping[str, str], page: int = 1) -> str:
    said = {name: value for name, value in asked.items() if value}
    if page > 1:
        said["page"] = str(page)
    return f"/devices?{urlencode(said)}" if said else "/devices"


def _line(device: FleetDevice, now: float) -> DeviceLine:
    return DeviceLine(
        device.device_id,
        device.short_id,
        printable(device.name or "-"),
        printable(_labelled(device.labels) or "-"),
        str(device.state),
        ago(device.last_seen_unix_seconds, now),
        printable(device.sdk or "-"),
        tuple(_told(each, now) for each in device.tasks),
    )


def _labelled(labels: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def _told(part: DeviceInTask, now: float) -> ToldLine:
    return ToldLine(
        printable(part.task or "-"),
        "-" if part.round is None else str(part.round),
        printable(part.said or "-"),
        printable(part.option or "-"),
        _seconds(part.train_seconds),
        _bytes(part.received_bytes),
        ago(part.counted_unix_seconds, now),
    )


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3g} s"


def _bytes(count: int | None) -> str:
    return "-" if count is None else size(count)


# What the fleet can do.


def _capability(fleet: Fleet, tasks: Iterable[str]) -> Iterable[Capability]:
    for task in tasks:
        timed = fleet.timed(task, _MOST_DOTS)
        if timed:
            options = _options(timed)
            yield Capability(printable(task), _drawn(task, options), tuple(_lines(options)))


def _options(timed: Sequence[StoredReport]) -> dict[str, list[StoredReport]]:
    """By what they are of; the columns k rising, then names."""
    found: dict[str, list[StoredReport]] = {}
    for each in timed:
        found.setdefault(each.option or "", []).append(each)

    def place(option: str) -> tuple[int, float, str]:
        columns = _COLUMNS.fullmatch(option)
        if columns is not None:
            return 0, float(columns[1]), option
        return 1, median(each.seconds or 0.0 for each in found[option]), option

    return {option: found[option] for option in sorted(found, key=place)}


def _drawn(task: str, options: Mapping[str, Sequence[StoredReport]]) -> Picture:
    """Seconds of training by option: k where it stands on the axis, names beside each other."""
    columns = [_COLUMNS.fullmatch(each) for each in options]
    numbers = [int(each[1]) for each in columns if each is not None]
    is_k = len(numbers) == len(options)
    places = dict(zip(options, numbers if is_k else range(len(options)), strict=True))
    points = [
        (
            float(places[option]),
            float(each.seconds or 0.0),
            f"{each.device_id.hex()[:12]}, {printable(option)}: {_seconds(each.seconds)}",
        )
        for option, told in options.items()
        for each in told
    ]
    step = -(-len(places) // _MOST_OPTIONS)
    ticks = [
        (float(place), str(place) if is_k else printable(option))
        for option, place in list(places.items())[::step]
    ]
    return dot_chart(
        f"Seconds of training in {printable(task)}, by {'columns k' if is_k else 'option'}",
        [Dots("a device's newest round", "tablet", points)],
        x_label="columns k" if is_k else "option",
        x_ticks=ticks,
    )


def _lines(options: Mapping[str, Sequence[StoredReport]]) -> Iterable[OptionLine]:
    for option, told in options.items():
        seconds = [each.seconds for each in told if each.seconds is not None]
        yield OptionLine(
            printable(option), len(told), _seconds(median(seconds)), _seconds(max(seconds))
        )


# One device.


@dataclass(frozen=True, slots=True)
class HistoryLine:
    """A round on a device, in text."""

    round: int
    said: str
    option: str
    trained: str
    received: str
    items: str


@dataclass(frozen=True, slots=True)
class HistoryOfTask:
    """The last rounds of a task on a device; ``habit``: when its updates come, in words."""

    task: str
    rounds: tuple[HistoryLine, ...]
    habit: str


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device. ``facts``: what there is to know of it, each with a word in front; ``revoked``:
    whether it was sent away."""

    device: DeviceLine
    revoked: bool
    facts: tuple[tuple[str, str], ...]
    history: tuple[HistoryOfTask, ...]


def _read_device(fleet: Fleet, query: PageQuery) -> DeviceView:
    device, now = fleet.device(query.get("device") or ""), fleet.now()
    clash, revoked = device.on_two_machines_unix_seconds, device.revoked_unix_seconds
    facts = {
        "id": device.device_id,
        "state": str(device.state),
        "labels": printable(_labelled(device.labels)),
        "enrolled": moment_of(device.enrolled_unix_seconds),
        "last seen": ago(device.last_seen_unix_seconds, now),
        "takes part from": f"round {device.first_round} on, counted over all tasks",
        "on two machines": "" if clash is None else moment_of(clash),
        "revoked": "" if revoked is None else moment_of(revoked),
        "Tessera": printable(device.sdk or ""),
        "onnxruntime": printable(device.runtime or ""),
        "platform": printable(device.platform or ""),
    }
    return DeviceView(
        _line(device, now),
        device.state is DeviceState.REVOKED,
        tuple((name, value) for name, value in facts.items() if value),
        tuple(
            HistoryOfTask(
                printable(each.task or "-"),
                tuple(map(_history, each.reports)),
                _habit(each.habit),
            )
            for each in fleet.history(device.device_id)
        ),
    )


def _history(told: StoredReport) -> HistoryLine:
    items = "-"
    if told.items is not None:
        items = f"{told.unknown_items} of {told.items} unknown"
    return HistoryLine(
        told.round,
        printable(": ".join(filter(None, (told.outcome, told.reason)))),
        printable(told.option or "-"),
        _seconds(told.seconds),
        _bytes(told.received_bytes),
        items,
    )


def _habit(habit: Habit | None) -> str:
    if habit is None:
        return ""
    if habit.seconds is None:
        came = "No update of it was ever counted"
    else:
        came = f"Its updates came within {span(habit.seconds)} of a round's opening of late"
    if not habit.missed:
        return f"{came}."
    heard = "heard of since" if habit.lives else "not heard of since"
    return f"{came}; rounds waited for it in vain since, and it was {heard}."


DEVICES = ConsolePage(
    "devices", "Devices", _read, frozenset({"q", "label", "task", "state", "page"})
)
DEVICE = ConsolePage(
    "device",
    "Device",
    _read_device,
    frozenset({"device"}),
    listed=False,
    path="/devices/{device}",
    under="devices",
)
