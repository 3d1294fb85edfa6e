"""Logging in and out."""

from __future__ import annotations

import re
from functools import partial

from anyio import to_thread
from starlette.responses import RedirectResponse, Response

from aggregator.console.sessions import TriedTooOften
from aggregator.console.users import MOST_CHARACTERS
from aggregator.console.web import Call

_OWN_PATH = re.compile(r"/(?![/\\])[\x21-\x5b\x5d-\x7e]*")
_MOST_WAITING = 8


async def show_login(call: Call) -> Response:
    """The form."""
    if call.visitor is not None:
        return RedirectResponse("/", 303)
    return _form(call, call.request.query_params.get("to", "/"))


def _form(call: Call, to: str, said: str = "", status: int = 200) -> Response:
    users = call.console.users.all()
    return call.console.page(
        "login", None, status=status, title="Log in", to=to, said=said, has_users=bool(users)
    )


async def log_in(call: Call) -> Response:
    """A session for whoever knows a user's password; words, and perhaps a pause, for others."""
    console, name, password = call.console, call.said("name").strip(), call.said("password")
    to, address = call.said("to"), console.address(call.request)
    if console.hashing.statistics().tasks_waiting >= _MOST_WAITING:
        return _form(call, to, "Many people log in just now: try again in a moment.", 503)
    try:
        console.limits.attempt(name, address)
    except TriedTooOften as error:
        answer = _form(call, to, f"Too many attempts. Try again in {error.seconds:.0f} s.", 429)
        answer.headers["Retry-After"] = f"{error.seconds:.0f}"
        return answer
    check = partial(console.passwords, console.users.find(name), password[: MOST_CHARACTERS + 1])
    if not await to_thread.run_sync(check, limiter=console.hashing):
        return _form(call, to, "No user has this name and this password.", 403)
    console.limits.succeeded(name, address)
    user = console.users.find(name)
    if user is None:  # removed meanwhile
        return _form(call, to, "No user has this name and this password.", 403)
    _forget(call)
    answer = RedirectResponse(to if _OWN_PATH.fullmatch(to) else "/", 303)
    console.set_session(call.request, answer, console.sessions.begin(user))
    return answer


async def log_out(call: Call) -> Response:
    """End the session."""
    _forget(call)
    answer = RedirectResponse("/login", 303)
    call.console.set_session(call.request, answer, "")
    return answer


def _forget(call: Call) -> None:
    token = call.request.cookies.get(call.console.cookie(call.request))
    if token is not None:
        call.console.sessions.end(token)
