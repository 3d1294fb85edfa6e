"""What an operator does by the console: what each takes, what it says that will happen, and how a
fleet does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aggregator.clock import moment_of
from aggregator.errors import AggregatorError
from aggregator.operate.devices import FleetDevice
from aggregator.operate.fleet import Fleet
from aggregator.operate.tasks import PauseChange, TaskChange
from device_sdk.system.printable import printable

Values = Mapping[str, str]
_MOST_CODES = 50
_HOUR_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class DeedField:
    """What is entered. ``choices``: where it is one of the fleet's: what is sent, what is shown."""

    name: str
    label: str
    kind: Literal["text", "number", "check", "file"] = "text"
    hint: str = ""
    usual: str = ""
    optional: bool = False
    choices: Callable[[Fleet], Sequence[tuple[str, str]]] | None = None


@dataclass(frozen=True, slots=True)
class DeedOutcome:
    """What came of it, in sentences. ``codes``: shown once."""

    lines: tuple[str, ...]
    codes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Deed:
    """Something that is done, after it was asked once. ``/do/NAME`` begins it.

    Attributes:
        explain: what will happen, in sentences. Raises AggregatorError where it cannot.
        do: does it. Raises AggregatorError.
        takes_long: whether it tries an artifact, which may take minutes.
    """

    name: str
    title: str
    button: str
    fields: tuple[DeedField, ...]
    explain: Callable[[Fleet, Values], Sequence[str]]
    do: Callable[[Fleet, Values], DeedOutcome]
    takes_long: bool = False

    def lacks(self, values: Values) -> bool:
        """Whether something is to be entered before it can be asked for."""
        return any(not field.optional and not values.get(field.name) for field in self.fields)


def _tasks(fleet: Fleet) -> list[tuple[str, str]]:
    return [(each.name, each.name) for each in fleet.tasks() if each.name is not None]


def _codes(fleet: Fleet) -> list[tuple[str, str]]:
    found = []
    for each in fleet.unused_codes():
        labels = [f"{name}={value}" for name, value in each.labels.items()]
        expires = f"until {moment_of(each.expires_unix_seconds)}"
        said = ", ".join(filter(None, (each.name, " ".join(labels), expires)))
        found.append((each.code_id, printable(f"{each.code_id}: {said}")))
    return found


_TASK = DeedField("task", "Task", choices=_tasks)
_VERSION = DeedField("version", "Version", "number")


def _number(values: Values, name: str, least: int, most: int) -> int:
    text = values.get(name, "").strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and least <= int(text) <= most):
        raise AggregatorError(f"{text[:40]!r} is no {name}: a whole number of {least} to {most}")
    return int(text)


def _version(values: Values) -> int:
    return _number(values, "version", 0, 10**9)


def _change(fleet: Fleet, change: TaskChange) -> DeedOutcome:
    """What a task was asked for, and whether it is so."""
    if change.later is not None:
        return DeedOutcome((change.later, *change.notes))
    waited = fleet.wait(change)
    said = change.said if waited.is_done else f"{change.said} as soon as serve runs"
    problem = () if waited.problem is None else (printable(waited.problem),)
    return DeedOutcome((said, *change.notes, *problem))


# Codes and devices.


def _called(device: FleetDevice) -> str:
    return f"{printable(device.name)} ({device.short_id})" if device.name else device.short_id


def _labels(values: Values) -> dict[str, str]:
    found = {}
    for each in values.get("labels", "").replace(",", " ").split():
        name, equals, value = each.partition("=")
        if not (name and equals and value):
            raise AggregatorError(f"{each[:70]!r} is no label such as site=north")
        found[name] = value
    return found


def _explain_invite(fleet: Fleet, values: Values) -> list[str]:
    count = _number(values, "count", 1, _MOST_CODES)
    hours = _number(values, "hours", 1, 24 * 365)
    for field, what in (("name", "A name"), ("replaces", "In exchange for a device")):
        if count > 1 and values.get(field):
            raise AggregatorError(f"{what} goes with one code: make each by itself, or use labels")
    labels = ", ".join(f"{name} = {value}" for name, value in _labels(values).items())
    each = "The code lets one device" if count == 1 else f"Each of {count} codes lets one device"
    said = [f"{each} join the fleet, once, within {_span(hours)}. It is shown once, here."]
    if values.get("name") or labels:
        named = f"is called {printable(values['name'])}" if values.get("name") else ""
        labelled = f"has the labels {printable(labels)}" if labels else ""
        said.append(f"Whoever joins {' and '.join(filter(None, (named, labelled)))}.")
    if values.get("replaces"):
        device = fleet.device(values["replaces"])
        sent = "is sent away now" if device.revoked_unix_seconds is None else "was sent away before"
        said.append(f"{_called(device)} {sent}, and whoever joins with the code takes its place.")
    return said


def _span(hours: int) -> str:
    return f"{hours} hours" if hours % 24 or hours == 24 else f"{hours // 24} days"


def _invite(fleet: Fleet, values: Values) -> DeedOutcome:
    codes = fleet.invite(
        _number(values, "count", 1, _MOST_CODES),
        _number(values, "hours", 1, 24 * 365) * _HOUR_SECONDS,
        name=values.get("name") or None,
        labels=_labels(values),
        replaces=values.get("replaces") or None,
    )
    said = "Hand each over as you would a password. Nobody can show it again."
    return DeedOutcome((said,), tuple(codes))


def _explain_withdraw(fleet: Fleet, values: Values) -> list[str]:
    code = values["code"].strip().lower()
    if not any(each.code_id.startswith(code) for each in fleet.unused_codes()):
        raise AggregatorError(f"no code that can still be used has an id that begins with {code!r}")
    return [f"Nobody joins with the code {code} any more, whoever has it."]


def _withdraw(fleet: Fleet, values: Values) -> DeedOutcome:
    code = fleet.withdraw(values["code"])
    return DeedOutcome((f"The code {code.code_id} is withdrawn: nobody joins with it.",))


def _explain_revoke(fleet: Fleet, values: Values) -> list[str]:
    device = fleet.device(values["device"])
    if device.revoked_unix_seconds is not None:
        return [f"{_called(device)} was sent away before: nothing changes."]
    return [
        f"{_called(device)} is sent away for good: its sessions end at once, and it is refused "
        "from now on.",
        "The group key, which it knows, is replaced before the next round is published. Updates "
        "that were counted stay counted.",
        "It takes part again only as a new device, with a new code.",
    ]


def _revoke(fleet: Fleet, values: Values) -> DeedOutcome:
    found = fleet.revoke(values["device"])
    said = "was sent away before" if found.before else "is sent away"
    return DeedOutcome((f"{found.device_id[:12]} {said}.",))


# Rounds and tasks.


def _known(fleet: Fleet, values: Values) -> str:
    names = [each.name for each in fleet.tasks() if each.name is not None]
    if values["task"] not in names:
        there = ", ".join(names) or "none that was served"
        raise AggregatorError(f"there is no task {values['task'][:70]!r}; there is {there}")
    return values["task"]


def _explain_release(fleet: Fleet, values: Values) -> list[str]:
    task = _known(fleet, values)
    return [
        f"The held round of task {task} goes on. What is in quarantine is dropped: it is part of "
        "no version.",
        "Where the method or the publication failed, mend what the problem names first: else it "
        "is held again.",
    ]


def _release(fleet: Fleet, values: Values) -> DeedOutcome:
    return DeedOutcome(
        tuple(
            f"Round {each.round} of task {each.task} is published once more."
            if each.dropped is None
            else f"Round {each.round} of task {each.task} goes on; {each.dropped} updates were "
            "dropped."
            for each in fleet.release(values["task"])
        )
    )


def _is(state: str, fleet: Fleet, task: str) -> bool:
    return any(each.state == state for each in fleet.tasks() if each.name == task)


def _explain_pause(fleet: Fleet, values: Values) -> list[str]:
    task = _known(fleet, values)
    if _is("paused", fleet, task):
        return [f"Task {task} is paused already: nothing changes."]
    return [
        f"Task {task} opens no further round; the open one ends as usual. Devices keep what they "
        "have learnt, and recommend and predict as before."
    ]


def _pause(fleet: Fleet, values: Values) -> DeedOutcome:
    return _paused(fleet.pause(values["task"]))


def _explain_resume(fleet: Fleet, values: Values) -> list[str]:
    task = _known(fleet, values)
    if _is("active", fleet, task):
        return [f"Task {task} is not paused: nothing changes."]
    return [f"Task {task} opens rounds again."]


def _resume(fleet: Fleet, values: Values) -> DeedOutcome:
    return _paused(fleet.resume(values["task"]))


def _paused(change: PauseChange) -> DeedOutcome:
    return DeedOutcome((f"{change.said[0].upper()}{change.said[1:]}.",))


def _explain_add(fleet: Fleet, values: Values) -> list[str]:
    return [
        f"Task {printable(values['name'])} is added, by this file. Its artifacts are tried first, "
        "in a process of their own, which may take minutes; then devices that it is for take part "
        "in its rounds, beside those of the other tasks.",
        "Paths in the file are of the aggregator's machine, relative to tasks/ in its home.",
    ]


def _add(fleet: Fleet, values: Values) -> DeedOutcome:
    return _change(fleet, fleet.add_task(values["name"], text=values["text"]))


def _explain_replace(fleet: Fleet, values: Values) -> list[str]:
    task = _known(fleet, values)
    when = (
        "at once; what was counted in the open round is part of no version"
        if values.get("now")
        else "when its open round has ended"
    )
    warm = values.get("warm_start")
    return [
        f"Task {task} is replaced by this file {when}. Its artifacts are tried first, in a process "
        "of their own, which may take minutes.",
        "No device enrols again; the task's name and cohort, its devices and their labels stay.",
        f"Its model begins with what fits of {printable(warm)}."
        if warm
        else "Its model begins anew.",
    ]


def _replace(fleet: Fleet, values: Values) -> DeedOutcome:
    change = fleet.replace_task(
        values["task"],
        text=values["text"],
        warm_start=values.get("warm_start") or None,
        now=bool(values.get("now")),
    )
    return _change(fleet, change)


# Versions of the model.


def _explain_version(say: str) -> Callable[[Fleet, Values], list[str]]:
    """``say``: with places for version and task. Refused for a version that is not kept."""

    def explain(fleet: Fleet, values: Values) -> list[str]:
        version, found = _version(values), fleet.versions(values["task"])
        if not any(each.version == version for each in found.versions):
            kept = ", ".join(str(each.version) for each in found.versions)
            raise AggregatorError(
                f"task {found.task} keeps no version {version}; it keeps {kept or 'none'}"
            )
        return [say.format(version=version, task=found.task)]

    return explain


def _pin(fleet: Fleet, values: Values) -> DeedOutcome:
    fleet.pin(_version(values), values["task"])
    return DeedOutcome((f"Version {_version(values)} is kept for good.",))


def _unpin(fleet: Fleet, values: Values) -> DeedOutcome:
    fleet.unpin(_version(values), values["task"])
    return DeedOutcome((f"Version {_version(values)} is kept for as long as the others.",))


def _roll_back(fleet: Fleet, values: Values) -> DeedOutcome:
    return _change(fleet, fleet.rollback(_version(values), values["task"]))


def _explain_stay(fleet: Fleet, values: Values) -> list[str]:
    return [f"The version that task {_known(fleet, values)} was to go back to is left out."]


def _stay(fleet: Fleet, values: Values) -> DeedOutcome:
    fleet.cancel_rollback(values["task"])
    return DeedOutcome((f"Task {values['task']} goes on with the model that it has.",))


_TEXT = DeedField("text", "Task file (TOML), pasted or uploaded", "file")
DEEDS = {
    each.name: each
    for each in (
        Deed(
            "invite",
            "Invite devices",
            "Make the codes",
            (
                DeedField("count", "How many", "number", usual="1"),
                DeedField("hours", "To be used within how many hours", "number", usual="24"),
                DeedField("name", "Name of the device that joins", optional=True),
                DeedField("labels", "Its labels", hint="such as site=north line=b", optional=True),
                DeedField(
                    "replaces",
                    "In exchange for this device",
                    hint="its name, or the first digits of its id; of one code alone",
                    optional=True,
                ),
            ),
            _explain_invite,
            _invite,
        ),
        Deed(
            "withdraw",
            "Withdraw a code",
            "Withdraw it",
            (DeedField("code", "Code that nobody has used", choices=_codes),),
            _explain_withdraw,
            _withdraw,
        ),
        Deed(
            "revoke",
            "Revoke a device",
            "Send it away for good",
            (DeedField("device", "Device", hint="its name, or the first digits of its id"),),
            _explain_revoke,
            _revoke,
        ),
        Deed(
            "release", "Release a held round", "Let it go on", (_TASK,), _explain_release, _release
        ),
        Deed("pause", "Pause a task", "Pause it", (_TASK,), _explain_pause, _pause),
        Deed("resume", "Resume a task", "Resume it", (_TASK,), _explain_resume, _resume),
        Deed(
            "add",
            "Add a task",
            "Add it",
            (DeedField("name", "Name of the task", hint="a-z 0-9 . _ -"), _TEXT),
            _explain_add,
            _add,
            takes_long=True,
        ),
        Deed(
            "replace",
            "Replace a task",
            "Replace it",
            (
                _TASK,
                _TEXT,
                DeedField(
                    "warm_start",
                    "Begin with the model of",
                    hint="latest, best, a version's number, or another task's, as air@best; empty "
                    "to begin anew",
                    optional=True,
                ),
                DeedField("now", "Give the open round up", "check", optional=True),
            ),
            _explain_replace,
            _replace,
            takes_long=True,
        ),
        Deed(
            "pin",
            "Keep a version for good",
            "Keep it",
            (_TASK, _VERSION),
            _explain_version("Version {version} of task {task} is kept for good."),
            _pin,
        ),
        Deed(
            "unpin",
            "Keep a version no longer",
            "Let it go",
            (_TASK, _VERSION),
            _explain_version(
                "Version {version} of task {task} is kept for as long as models.keep_last and "
                "models.keep_best of its file say, and then dropped."
            ),
            _unpin,
        ),
        Deed(
            "rollback",
            "Go back to a version",
            "Go back to it",
            (_TASK, _VERSION),
            _explain_version(
                "The model of version {version} becomes the next version of task {task}: at once "
                "where no round is open, else when the open one has ended. Devices notice nothing "
                "but one more version; an optimizer's momenta begin anew."
            ),
            _roll_back,
            takes_long=True,
        ),
        Deed(
            "stay",
            "Do not go back",
            "Leave it out",
            (_TASK,),
            _explain_stay,
            _stay,
        ),
    )
}
