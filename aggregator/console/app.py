"""All that the console answers to, each with who may ask: here, and nowhere else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from importlib import resources
from mimetypes import guess_type

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from aggregator.console.doing import Doings
from aggregator.console.downloads import FORMS, send_model, sent
from aggregator.console.entry import log_in, log_out, show_login
from aggregator.console.gate import FrontGate
from aggregator.console.live import shown, stream
from aggregator.console.pages import PAGES
from aggregator.console.web import Answer, Call, Console, May, anybody, guarded, operators


def console_app(console: Console, hosts: Collection[str]) -> FrontGate:
    """``hosts``: what browsers may call it."""
    return FrontGate(Starlette(routes=routes_of(console)), hosts)


def routes_of(console: Console) -> list[Route]:
    """What there is to ask."""

    def route(
        path: str, answer: Answer, method: str = "GET", may: May | None = anybody, name: str = ""
    ) -> Route:
        return Route(path, guarded(console, answer, may), methods=[method], name=name or path)

    doings = Doings(console)
    return [
        route("/", _first_page),
        route("/login", show_login, may=None, name="login"),
        route("/login", log_in, "POST", may=None),
        route("/logout", log_out, "POST"),
        route("/events", stream, name="events"),
        route("/alive", _alive),
        route("/do", doings.list_deeds, may=operators),
        route("/do/jobs/{job}", doings.show_job, may=operators),
        route("/do/{deed}", doings.begin, may=operators),
        route("/do/{deed}", doings.go_on, "POST", may=operators),
        *(route(f"/models/{{version}}.{form}", send_model) for form in FORMS),
        *(Route(f"/static/{name}", _static(*each)) for name, each in _files().items()),
        *(
            route(f"/{page.name}/{file.name}", sent(page, file))
            for page in PAGES
            for file in page.files
        ),
        *(route(page.path, shown(page)) for page in PAGES),
        route("/{elsewhere:path}", _nowhere, may=None),
    ]


async def _first_page(call: Call) -> Response:
    return RedirectResponse(f"/{PAGES[0].name}", 303)


async def _nowhere(call: Call) -> Response:
    return call.console.refuse(call.visitor, 404, "There is no such page.")


async def _alive(call: Call) -> Response:
    return PlainTextResponse("yes\n")


def _files() -> dict[str, tuple[bytes, str]]:
    """What pages load, by its name, read once: nothing else of the disk can be asked for."""
    look = resources.files("aggregator.look") / "look.css"
    own = (resources.files(__package__) / "static").iterdir()
    return {
        each.name: (each.read_bytes(), guess_type(each.name)[0] or "application/octet-stream")
        for each in (look, *own)
    }


def _static(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "max-age=60"})

    return answer
