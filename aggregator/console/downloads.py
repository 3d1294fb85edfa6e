"""Models as files: which version is all that a browser says."""

from __future__ import annotations

import io
import zipfile
from functools import partial
from typing import get_args

from anyio import to_thread
from starlette.responses import Response

from aggregator.console.web import Call
from aggregator.errors import AggregatorError
from aggregator.models import Format
from aggregator.operate.fleet import Fleet
from aggregator.operate.versions import ModelFiles

FORMS: tuple[Format, ...] = get_args(Format)


async def send_model(call: Call) -> Response:
    """``/models/VERSION.FORM?task=NAME``: one file, or several in one."""
    form: Format = next(each for each in FORMS if call.request.url.path.endswith(f".{each}"))
    number = call.request.path_params["version"]
    if number > 10**9:
        raise AggregatorError(f"there is no version {number}")
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


def _made(call: Call, version: str, task: str | None, form: Format) -> ModelFiles:
    actor = f"{call.known.user.name} (console)"
    console = call.console
    with Fleet.open(console.home, actor=actor, clock=console.unix_clock) as fleet:
        return fleet.model(version, task, form)


def _file(content: bytes, name: str) -> Response:
    return Response(
        content,
        media_type="application/octet-stream",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )
