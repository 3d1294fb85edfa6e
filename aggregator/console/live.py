"""Pages, and the streams by which those that are open stay as the fleet is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from aggregator.clock import moment_of
from aggregator.console.pages import PAGES
from aggregator.console.pages.page import ConsolePage, PageQuery
from aggregator.console.reader import PageReading, PageWanted
from aggregator.console.web import Answer, Call
from aggregator.errors import AggregatorError

MOST_STREAMS = 128
_QUIET_SECONDS = 15.0
"""After so long without news a stream says that it is there."""
_PAGES = {page.name: page for page in PAGES}


def _wanted(page: ConsolePage[Any], request: Request) -> PageWanted:
    given = [*request.query_params.multi_items(), *request.path_params.items()]
    return PageWanted(page, PageQuery.of(given, page.takes))


def shown(page: ConsolePage[Any]) -> Answer:
    """A page, with what it shows now."""

    async def answer(call: Call) -> Response:
        wanted = _wanted(page, call.request)
        reading = await asyncio.wrap_future(call.console.reader.ask(wanted))
        return call.console.page(
            "page",
            call.visitor,
            status=200 if reading.view is not None else 400,
            title=page.title,
            here=page.under,
            events=f"/events?{urlencode([('page', page.name), *wanted.query.values])}",
            live=fragment(call, wanted, reading),
            moment=moment_of(reading.read_unix_seconds),
        )

    return answer


def fragment(call: Call, wanted: PageWanted, reading: PageReading) -> Markup:
    """What a page shows of a reading: made once for all who may do the same."""
    user = call.known.user
    if reading.problem:
        return call.console.draw("problem", problem=reading.problem)
    return call.console.drawn(
        (wanted, user.role),
        reading.number,
        wanted.page.name,
        view=reading.view,
        query=wanted.query,
        can_operate=user.can_operate,
    )


async def stream(call: Call) -> Response:
    """What a page shows, anew whenever that has changed, until the session ends."""
    page = _PAGES.get(call.request.query_params.get("page", ""))
    if page is None:
        return PlainTextResponse("There is no such page.\n", 404)
    if call.console.streams >= MOST_STREAMS:
        return PlainTextResponse(
            "Too many pages are open.\n", 503, {"Retry-After": f"{_QUIET_SECONDS:.0f}"}
        )
    return StreamingResponse(
        _news(call, _wanted(page, call.request)),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no"},
    )


async def _news(call: Call, wanted: PageWanted) -> AsyncIterator[str]:
    console, loop, changed = call.console, asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(changed.set)

    sent: Markup | None = None
    console.streams += 1
    try:
        with console.reader.watching(wanted, tell):
            while _may_go_on(call):
                reading = console.reader.last(wanted)
                found = None if reading is None else fragment(call, wanted, reading)
                if found is not None and found != sent:
                    sent = found
                    lines = "".join(f"data: {line}\n" for line in found.splitlines())
                    yield f"event: fragment\n{lines}\n"
                else:
                    yield ": \n\n"  # a connection that is gone shows when it is written to
                changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_QUIET_SECONDS):
                        await changed.wait()
    finally:
        console.streams -= 1


def _may_go_on(call: Call) -> bool:
    try:
        now = call.console.visitor(call.request, used=False)
    except AggregatorError:
        return False
    return now is not None and now.user == call.known.user
