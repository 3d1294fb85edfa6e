"""How a request becomes an answer: who asks, whether he may, and the page around what he gets."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import jinja2
from anyio import CapacityLimiter
from markupsafe import Markup
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from aggregator.console.pages import PAGES
from aggregator.console.reader import FleetReader
from aggregator.console.sessions import LoginLimits, Sessions, Visitor
from aggregator.console.users import ConsoleUser, ConsoleUsers, PasswordCheck
from aggregator.errors import AggregatorError
from aggregator.store import STORE_FAILURES
from aggregator.task.file import ConsoleSettings
from device_sdk.system.printable import printable, span
from device_sdk.wire.seal.keys import RandomBytes

_MOST_FIELDS = 40
_MOST_DRAWN = 128
_AGAIN_SECONDS = 10
FORM_TOKEN = "form_token"
_FOR_SCRIPTS = ("/events", "/alive")


@dataclass
class Console:
    """What all pages share, made once.

    ``clock``: monotonic seconds; ``unix_clock``: Unix seconds.
    """

    home: Path
    settings: ConsoleSettings
    clock: Callable[[], float]
    unix_clock: Callable[[], float]
    random_bytes: RandomBytes
    users: ConsoleUsers
    reader: FleetReader
    passwords: PasswordCheck = field(default_factory=PasswordCheck)
    streams: int = 0
    """Open ones."""
    checked: int = 0
    """Passwords that are being checked, or wait for it."""

    def __post_init__(self) -> None:
        self.sessions = Sessions(self.users, self.clock, self.random_bytes)
        self.limits = LoginLimits(self.clock)
        self.hashing = CapacityLimiter(2)
        """A password's check takes much memory and time, by design."""
        self.modelling = CapacityLimiter(1)
        """So does making a file of a model."""
        self._key = self.random_bytes(32)
        self._drawn: dict[object, tuple[int, Markup]] = {}

    @cached_property
    def templates(self) -> jinja2.Environment:
        """They escape whatever is put into them."""
        found = jinja2.Environment(
            loader=jinja2.FileSystemLoader(str(resources.files(__package__) / "templates")),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        found.filters["span"] = span
        return found

    def draw(self, name: str, /, **values: object) -> Markup:
        """A template, filled in."""
        return Markup(self.templates.get_template(f"{name}.html").render(values))

    # -- who asks ----------------------------------------------------------------------------------

    def visitor(self, request: Request, *, used: bool = True) -> Visitor | None:
        """Who it is; None for somebody who has not logged in. Raises AggregatorError, and
        HTTPException for who says that he is somebody, and may not."""
        if (told := self._told(request)) is not None:
            return told
        token = request.cookies.get(self.cookie(request))
        return None if token is None else self.sessions.find(token, used=used)

    def _told(self, request: Request) -> Visitor | None:
        """Whom the reverse proxy lets in."""
        header = self.settings.proxy_user_header
        names = [] if header is None else request.headers.getlist(header)
        if not names:
            return None
        if not self.is_proxy(request):
            raise HTTPException(
                403, f"Only the reverse proxy may say by {header} who asks: leave it out."
            )
        user = self.users.find(names[0]) if len(names) == 1 else None
        if user is None:
            raise HTTPException(
                403,
                f"{printable(', '.join(names), 100)} is no user of this console. On the "
                "aggregator's machine: tessera-aggregator console user add NAME --no-password",
            )
        token = hmac.new(self._key, f"proxy {user.name}".encode(), hashlib.sha256).hexdigest()
        return Visitor(user, token)

    def is_proxy(self, request: Request) -> bool:
        """Whether the trusted proxy asks, for somebody."""
        proxy, peer = self.settings.trusted_proxy, request.client
        if proxy is None or peer is None:
            return False
        try:
            return ip_address(peer.host) in ip_network(proxy, strict=False)
        except ValueError:
            return False

    def address(self, request: Request) -> str:
        """Whence it comes, as far as that can be believed."""
        if self.is_proxy(request):
            told = request.headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
            if told:
                return told
        return "" if request.client is None else request.client.host

    def is_encrypted(self, request: Request) -> bool:
        """Whether the browser asks by https."""
        if self.is_proxy(request):
            return request.headers.get("x-forwarded-proto", "") == "https"
        return request.url.scheme == "https"

    def cookie(self, request: Request) -> str:
        """The name of the cookie with the session's token. Browsers take one that begins so only
        where it is Secure, and of no other host."""
        return "__Host-tessera" if self.is_encrypted(request) else "tessera"

    def set_session(self, request: Request, answer: Response, token: str) -> None:
        """Have the browser keep it, or drop what it has, where it is empty."""
        answer.set_cookie(
            self.cookie(request),
            token,
            max_age=None if token else 0,
            httponly=True,
            samesite="strict",
            secure=self.is_encrypted(request),
        )

    def drawn(self, key: object, number: int, name: str, /, **values: object) -> Markup:
        """A template, filled in once for all who ask by the same ``key`` and ``number``."""
        found = self._drawn.get(key)
        if found is None or found[0] != number:
            found = number, self.draw(name, **values)
            self._drawn[key] = found
            while len(self._drawn) > _MOST_DRAWN:
                del self._drawn[next(iter(self._drawn))]
        return found[1]

    # -- answers -----------------------------------------------------------------------------------

    def page(
        self, name: str, visitor: Visitor | None, *, status: int = 200, **values: object
    ) -> HTMLResponse:
        """A whole page around ``templates/NAME.html``."""
        user = None if visitor is None else visitor.user
        drawn = self.draw(
            name,
            **{
                "pages": PAGES,
                "here": "",
                "user": user,
                "form_token": "" if visitor is None else visitor.form_token,
                **values,
            },
        )
        return HTMLResponse(drawn, status)

    def refuse(self, visitor: Visitor | None, status: int, said: str) -> HTMLResponse:
        """Say in words why not."""
        return self.page("refused", visitor, status=status, title="Not possible", said=said)


def is_own_page(console: Console, request: Request) -> bool:
    """Whether a form was sent from a page of ours: browsers say from where, always."""
    try:
        origin = urlsplit(request.headers.get("origin", ""))
    except ValueError:
        return False
    return (
        origin.netloc.lower() == request.headers.get("host", "").lower()
        and (origin.scheme == "https" or not console.is_encrypted(request))
        and request.headers.get("sec-fetch-site", "same-origin") == "same-origin"
    )


@dataclass(frozen=True, slots=True)
class Call:
    """A request that may be answered. ``form``: what was sent with it; empty for none."""

    console: Console
    request: Request
    visitor: Visitor | None
    form: Mapping[str, Any]

    @property
    def known(self) -> Visitor:
        """Whoever asks, where only somebody who is logged in can."""
        assert self.visitor is not None
        return self.visitor

    def said(self, name: str) -> str:
        """A field of the form; empty where it is missing, or no text."""
        found = self.form.get(name, "")
        return found if isinstance(found, str) else ""


Answer = Callable[[Call], Awaitable[Response]]
May = Callable[[ConsoleUser], bool]


def anybody(user: ConsoleUser) -> bool:
    """Whoever is logged in."""
    return True


def operators(user: ConsoleUser) -> bool:
    """Those who may change something."""
    return user.can_operate


def guarded(
    console: Console, answer: Answer, may: May | None = anybody
) -> Callable[[Request], Awaitable[Response]]:
    """``answer``, for those who may: None for everybody, logged in or not. A form is read, and
    looked at whether it came from a page of ours, before anything else is done."""

    async def endpoint(request: Request) -> Response:
        visitor: Visitor | None = None
        try:
            visitor = console.visitor(request)
            if may is not None and visitor is None:
                return _to_login(request)
            if may is not None and visitor is not None and not may(visitor.user):
                return console.refuse(
                    visitor,
                    403,
                    f"{visitor.user.name} may look, and not change anything: that takes the role "
                    "operator (tessera-aggregator console user role NAME --role operator).",
                )
            form: Mapping[str, Any] = {}
            if request.method == "POST":
                if not is_own_page(console, request):
                    return console.refuse(
                        visitor, 403, "This did not come from a page of this console."
                    )
                form = await _form(request)
                if may is not None and not _owns(visitor, form):
                    return console.refuse(
                        visitor, 403, "This page was of another session: load it again."
                    )
            return await answer(Call(console, request, visitor, form))
        except AggregatorError as error:
            return console.refuse(visitor, 400, printable(str(error)))
        except HTTPException as error:
            return console.refuse(visitor, error.status_code, error.detail)
        except STORE_FAILURES as error:
            refused = console.refuse(visitor, 503, store_away(error))
            if request.method == "GET":  # nothing is done by asking again
                refused.headers["Refresh"] = f"{_AGAIN_SECONDS}"
            return refused

    return endpoint


def store_away(error: Exception) -> str:
    """What there is to say of one of ``STORE_FAILURES``."""
    said = printable(str(error)).rstrip(".?! ")
    return (
        f"The aggregator's disk or database did not do what it was asked: {said}. "
        "The page Now and tessera-aggregator status say what else is wrong. Once it can be used "
        "again so can this page, without a restart. If something was to be done, see first whether "
        "it was."
    )


def _owns(visitor: Visitor | None, form: Mapping[str, Any]) -> bool:
    token = form.get(FORM_TOKEN)
    return visitor is not None and isinstance(token, str) and visitor.owns(token)


async def _form(request: Request) -> FormData:
    _, options = parse_options_header(request.headers.get("content-type"))
    # Python knows others that take time by the square of what comes, or make no text.
    if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):
        raise HTTPException(400, "A form is sent in utf-8 here, and in nothing else.")
    return await request.form(max_files=1, max_fields=_MOST_FIELDS, max_part_size=512 << 10)


def _to_login(request: Request) -> Response:
    if request.method != "GET" or request.url.path in _FOR_SCRIPTS:
        return PlainTextResponse("Log in first.\n", 401)
    wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"/login?{urlencode({'to': wanted})}", 303)
