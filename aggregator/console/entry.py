"""Logging in and out."""

from __future__ import annotations

import math
import re
from functools import partial

from anyio import to_thread
from starlette.responses import RedirectResponse, Response

from aggregator.console.gate import network_of
from aggregator.console.sessions import TriedTooOften
from aggregator.console.users import MOST_CHARACTERS
from aggregator.console.web import Call

_OWN_PATH = re.compile(r"/(?![/\\])[\x21-\x5b\x5d-\x7e]*")
_MOST_CHECKED = 10


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
    to, address = call.said("to"), network_of(console.address(call.request))
    if console.checked >= _MOST_CHECKED:
        return _form(call, to, "Many people log in just now: try again in a moment.", 503)
    try:
        console.limits.attempt(name, address)
    except TriedTooOften as error:
        wait = f"{math.ceil(error.seconds)}"
        answer = _form(call, to, f"Too many attempts. Try again in {wait} s.", 429)
        answer.headers["Retry-After"] = wait
        return answer
    user = console.users.find(name)
    check = partial(console.passwords, user, password[: MOST_CHARACTERS + 1])
    console.checked += 1
    try:
        is_right = await to_thread.run_sync(check, limiter=console.hashing)
    finally:
        console.checked -= 1
    # He may have been removed meanwhile, or have another password.
    if user is None or not is_right or console.users.find(name) != user:
        return _form(call, to, "No user has this name and this password.", 403)
    console.limits.succeeded(name, address)
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
