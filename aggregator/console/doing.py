"""Doing something to the fleet: entered, asked once, done in a thread, and told."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import segno
from anyio import CapacityLimiter, to_thread
from markupsafe import Markup
from starlette.datastructures import UploadFile
from starlette.responses import RedirectResponse, Response

from aggregator.console.deeds import DEEDS, Deed, DeedOutcome, Values
from aggregator.console.web import Call, Console, store_away
from aggregator.errors import AggregatorError
from aggregator.events import LogEvent
from aggregator.operate.fleet import Fleet
from aggregator.store import STORE_FAILURES
from device_sdk.system.printable import in_words, printable

_MOST_JOBS, _MOST_ASKED = 64, 1024
_MOST_TEXT_CHARACTERS = 256 << 10
_MOST_CHARACTERS = 200
_QUICK_SECONDS = 2.0
_KEPT_SECONDS = 900.0
Told = TypeVar("Told")


@dataclass
class Job:
    """Something that is being done, or was. ``outcome``: None while it is; ``problem``: why it was
    not done; ``done_seconds``: when it ended."""

    owner: str
    deed: Deed
    outcome: DeedOutcome | None = None
    problem: str = ""
    done_seconds: float | None = None

    @property
    def is_done(self) -> bool:
        return self.done_seconds is not None


@dataclass
class Doings:
    """What operators have asked for: each confirmation is good for one time, and what came of it is
    told to whoever asked alone."""

    console: Console
    asked: OrderedDict[str, str] = field(default_factory=OrderedDict)
    """By the token of a confirmation, for whom its page was made."""
    jobs: OrderedDict[str, Job] = field(default_factory=OrderedDict)
    quick: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(4))
    slow: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))
    """An artifact takes memory and time: one after another."""
    running: set[asyncio.Task[None]] = field(default_factory=set)

    # -- pages -------------------------------------------------------------------------------------

    async def list_deeds(self, call: Call) -> Response:
        """All that can be done."""
        return call.console.page(
            "deeds", call.visitor, title="Doing", here="do", deeds=list(DEEDS.values())
        )

    async def begin(self, call: Call) -> Response:
        """The form of a deed, or the question where nothing is left to enter."""
        deed = _deed_of(call)
        query = call.request.query_params
        values = _cleaned(deed, {each.name: query.get(each.name, "") for each in deed.fields})
        if deed.lacks(values):
            return await self._enter(call, deed, values)
        return await self._ask(call, deed, values)

    async def go_on(self, call: Call) -> Response:
        """What was entered is asked about, what was confirmed is done."""
        deed = _deed_of(call)
        values = _cleaned(deed, await _sent(deed, call))
        confirmed = call.said("confirmed")
        if deed.lacks(values):
            return await self._enter(call, deed, values, "Something is missing.")
        if not confirmed:
            return await self._ask(call, deed, values)
        if self.asked.pop(confirmed, None) != call.known.user.name:
            return call.console.refuse(
                call.visitor, 409, "This was confirmed once already, or long ago: begin again."
            )
        return await self._do(call, deed, values)

    async def show_job(self, call: Call) -> Response:
        """What came of it; codes once."""
        self._tidy()
        job = self.jobs.get(call.request.path_params["job"])
        if job is None or job.owner != call.known.user.name:
            return call.console.refuse(call.visitor, 404, "Nothing is known of this any more.")
        lines, codes = ((), ()) if job.outcome is None else (job.outcome.lines, job.outcome.codes)
        if job.outcome is not None and codes:
            said = "The codes were shown once. Whoever lost them makes others."
            job.outcome = DeedOutcome((said,))
        return call.console.page(
            "job",
            call.visitor,
            title=job.deed.title,
            here="do",
            job=job,
            lines=lines,
            codes=[(code, _qr(code)) for code in codes],
        )

    # -- steps -------------------------------------------------------------------------------------

    async def _enter(
        self, call: Call, deed: Deed, values: Values, said: str = "", status: int = 200
    ) -> Response:
        choices = await self._with_fleet(call, lambda fleet: _choices(deed, fleet))
        return call.console.page(
            "deed",
            call.visitor,
            status=status,
            title=deed.title,
            here="do",
            deed=deed,
            values=values,
            choices=choices,
            said=said,
        )

    async def _ask(self, call: Call, deed: Deed, values: Values) -> Response:
        try:
            lines = await self._with_fleet(call, lambda fleet: deed.explain(fleet, values))
        except AggregatorError as error:
            return await self._enter(call, deed, values, printable(str(error)), 400)
        token = call.console.random_bytes(16).hex()
        self.asked[token] = call.known.user.name
        while len(self.asked) > _MOST_ASKED:
            self.asked.popitem(last=False)
        return call.console.page(
            "confirm",
            call.visitor,
            title=deed.title,
            here="do",
            deed=deed,
            values=values,
            lines=lines,
            confirmed=token,
        )

    async def _do(self, call: Call, deed: Deed, values: Values) -> Response:
        self._tidy()
        if sum(not job.is_done for job in self.jobs.values()) >= _MOST_JOBS // 4:
            return call.console.refuse(
                call.visitor, 503, "Much is being done just now: try again in a moment."
            )
        key, job = call.console.random_bytes(16).hex(), Job(call.known.user.name, deed)
        self.jobs[key] = job
        task = asyncio.create_task(self._carry_out(call, job, values))
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        await asyncio.wait([task], timeout=_QUICK_SECONDS)
        return RedirectResponse(f"/do/jobs/{key}", 303)

    async def _carry_out(self, call: Call, job: Job, values: Values) -> None:
        limiter = self.slow if job.deed.takes_long else self.quick
        try:
            job.outcome = await self._with_fleet(
                call, lambda fleet: job.deed.do(fleet, values), limiter
            )
        except AggregatorError as error:
            job.problem = printable(str(error))
        except STORE_FAILURES as error:
            job.problem = store_away(error)
        except Exception as error:
            LogEvent.CONSOLE_FAILS.log(error, what=job.deed.name)
            job.problem = printable(in_words(error))
        finally:
            job.done_seconds = self.console.clock()

    async def _with_fleet(
        self, call: Call, use: Callable[[Fleet], Told], limiter: CapacityLimiter | None = None
    ) -> Told:
        """In a thread, as whoever asks."""
        work = partial(_used, call.console, f"{call.known.user.name} (console)", use)
        return await to_thread.run_sync(work, limiter=limiter or self.quick)

    def _tidy(self) -> None:
        """Forget what ended long ago: codes stay nowhere."""
        until = self.console.clock() - _KEPT_SECONDS
        for key, job in list(self.jobs.items()):
            old = job.done_seconds is not None and job.done_seconds < until
            if old or (job.is_done and len(self.jobs) > _MOST_JOBS):
                del self.jobs[key]


def _used(console: Console, actor: str, use: Callable[[Fleet], Told]) -> Told:
    with Fleet.open(console.home, actor=actor, clock=console.unix_clock) as fleet:
        return use(fleet)


def _choices(deed: Deed, fleet: Fleet) -> dict[str, Sequence[tuple[str, str]]]:
    """By the name of the field that is one of them."""
    return {each.name: each.choices(fleet) for each in deed.fields if each.choices is not None}


def _deed_of(call: Call) -> Deed:
    name = call.request.path_params["deed"]
    if name not in DEEDS:
        raise AggregatorError(f"nobody can do {printable(name, 40)!r} here")
    return DEEDS[name]


async def _sent(deed: Deed, call: Call) -> Mapping[str, str]:
    found = {each.name: call.said(each.name) for each in deed.fields}
    for each in deed.fields:
        upload: Any = call.form.get(f"{each.name}_file")
        if each.kind == "file" and isinstance(upload, UploadFile) and upload.size:
            try:
                found[each.name] = (await upload.read()).decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise AggregatorError(f"the uploaded file is no text: {error}") from None
    return found


def _cleaned(deed: Deed, given: Mapping[str, str]) -> dict[str, str]:
    """What was entered, without what cannot be meant. Raises AggregatorError."""
    found = {}
    for each in deed.fields:
        value = given[each.name]
        if each.kind == "file":
            value = value.replace("\r\n", "\n")
            most = _MOST_TEXT_CHARACTERS
        else:
            value, most = value.strip(), _MOST_CHARACTERS
        if len(value) > most:
            raise AggregatorError(f"{each.label}: {len(value)} characters, {most} at most")
        found[each.name] = value
    return found


def _qr(code: str) -> Markup:
    """A picture of it, for a device with a camera."""
    return Markup(segno.make(code, error="l", micro=False).svg_inline(scale=4, omitsize=True))
