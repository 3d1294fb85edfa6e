"""What stands before all pages: which names the console answers to, how large and how slow a body
may be, and the headers of every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aggregator.events import LogEvent
from aggregator.task.file import ConsoleSettings
from device_sdk.system.printable import printable

MOST_BODY_BYTES = 512 << 10
_BODY_SECONDS = 20.0
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    # Not "no-referrer", with which browsers send forms with "Origin: null", even to ourselves.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def own_hosts(settings: ConsoleSettings) -> frozenset[str]:
    """What browsers may call the console: names that another site's DNS could lead here are none of
    them. Raises ValueError."""
    host, _ = settings.place
    return frozenset(
        each.lower() for each in (*settings.hosts, host, "localhost", "127.0.0.1", "::1")
    )


def host_of(header: str) -> str:
    """What stands before the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def network_of(address: str) -> str:
    """Whom an address counts as: who has one of IPv6 has all that begin like it."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or IPv6Address(int(found) >> 64 << 64))


def _is_ours(host: str, ours: Collection[str]) -> bool:
    if host in ours:
        return True
    if not {"0.0.0.0", "::"} & set(ours):  # else each address of the machine is one
        return False
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class FrontGate:
    """In front of ``app``. An answer is whole, whatever went wrong behind it."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, bounded = False, _Bounded(scope, receive)

        async def sending(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    if name not in headers:
                        headers[name] = value
                if not bounded.is_whole:  # what is still to come is for nobody
                    headers["Connection"] = "close"
            await send(message)

        host = host_of(Headers(scope=scope).get("host", ""))
        if not _is_ours(host, self._hosts):
            said = (
                f"This console is not called {printable(host, 100)!r}. If it is, name it: "
                f'[console] hosts = ["{printable(host, 100)}"] in the task file.\n'
            )
            await PlainTextResponse(said, 400)(scope, receive, sending)
            return
        try:
            await self._app(scope, bounded, sending)
        except ClientDisconnect:
            return  # in the midst of what he sent
        except Exception as error:
            LogEvent.CONSOLE_FAILS.log(error, what=f"a request for {printable(scope['path'], 200)}")
            if not began:
                said = "This cannot be answered; the console's log says why.\n"
                await PlainTextResponse(said, 500)(scope, receive, sending)


class _Bounded:
    """What is received of a request: no more than may come, in the time that it may take. Raises
    HTTPException for one that is too large, or too slow."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self._bytes = 0
        self._until: float | None = None
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        self._said = int(length) if length.isdecimal() and len(length) < 20 else 0
        self.is_whole = not self._said and "transfer-encoding" not in headers
        """Whether nothing more of it is to come."""

    async def __call__(self) -> Message:
        if self.is_whole:  # from here on it tells of a connection that is gone
            return await self._receive()
        if self._said > MOST_BODY_BYTES:
            raise _too_large()
        now = asyncio.get_running_loop().time()
        self._until = self._until or now + _BODY_SECONDS
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, "The request came too slowly.") from None
        self._bytes += len(message.get("body", b""))
        if self._bytes > MOST_BODY_BYTES:
            raise _too_large()
        self.is_whole = not message.get("more_body", False)
        return message


def _too_large() -> HTTPException:
    return HTTPException(413, f"A request has {MOST_BODY_BYTES >> 10} KiB at most.")
