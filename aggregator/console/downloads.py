"""What browsers take away: files of pages, and models, of which they say the number alone."""

from __future__ import annotations

import io
import zipfile
from functools import partial
from typing import Any, get_args

from anyio import to_thread
from starlette.responses import Response

from aggregator.console.pages.page import ConsolePage, PageFile, PageQuery, number_in
from aggregator.console.web import Answer, Call
from aggregator.errors import AggregatorError
from aggregator.models import Format
from aggregator.operate.fleet import Fleet
from aggregator.operate.versions import ModelFiles
from device_sdk.system.printable import printable

FORMS: tuple[Format, ...] = get_args(Format)


async def send_model(call: Call) -> Response:
    """``/models/VERSION.FORM?task=NAME``: one file, or several in one."""
    form: Format = next(each for each in FORMS if call.request.url.path.endswith(f".{each}"))
    said = call.request.path_params["version"]
    if (number := number_in(said)) is None:
        raise AggregatorError(f"there is no version {printable(said, 40)}")
    work = partial(_made, call, str(number), call.request.query_params.get("task"), form)
    found = await to_thread.run_sync(work, limiter=call.console.modelling)
    name = f"{found.task}-{found.version}"  # of letters, digits, dots, lines: a task's name
    if len(found.files) == 1:
        (content,) = found.files.values()
        return _file(content, f"{name}.{form}")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for part, content in found.files.items():
            archive.writestr(f"{name}{part}.{form}", content)
    return _file(packed.getvalue(), f"{name}.{form}.zip")


def sent(page: ConsolePage[Any], file: PageFile) -> Answer:
    """A file of a page."""

    async def answer(call: Call) -> Response:
        query = PageQuery.of(call.request.query_params.multi_items(), page.takes)
        work = partial(_of_page, call, file, query)
        found = await to_thread.run_sync(work, limiter=call.console.modelling)
        return _file(found.encode(), file.name, file.media_type)

    return answer


def _of_page(call: Call, file: PageFile, query: PageQuery) -> str:
    with _opened(call) as fleet:
        return file.make(fleet, query)


def _opened(call: Call) -> Fleet:
    actor = f"{call.known.user.name} (console)"
    return Fleet.open(call.console.home, actor=actor, clock=call.console.unix_clock)


def _made(call: Call, version: str, task: str | None, form: Format) -> ModelFiles:
    with _opened(call) as fleet:
        return fleet.model(version, task, form)


def _file(content: bytes, name: str, media_type: str = "application/octet-stream") -> Response:
    return Response(
        content,
        media_type=media_type,
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )
