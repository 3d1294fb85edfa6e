"""Whoever may not, cannot: forged forms, planted markup, traversal, nonsense, other sites."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from aggregator.console import gate
from aggregator.console.app import routes_of
from aggregator.console.downloads import FORMS
from aggregator.console.gate import HEADERS, own_hosts
from aggregator.console.pages import PAGES
from aggregator.operate.fleet import Fleet
from aggregator.task.file import ConsoleSettings
from tests.fakes.consoles import ORIGIN, Browser, InProcess

PUBLIC = {("GET", "/login"), ("POST", "/login"), ("GET", "/elsewhere")}
"""What anybody may ask, but for files of style and script."""
EXAMPLES = {
    "/{elsewhere:path}": "/elsewhere",
    "/do/{deed}": "/do/pause?task=default",
    "/do/jobs/{job}": "/do/jobs/0",
    "/devices/{device}": "/devices/0",
    "/models/{version}.safetensors": "/models/0.safetensors",
    "/models/{version}.onnx": "/models/0.onnx",
}


def _routes(console: InProcess) -> list[tuple[str, str]]:
    """Method and an address of each route there is, but static files."""
    return [
        (method, EXAMPLES.get(route.path, route.path))
        for route in routes_of(console.console)
        if not route.path.startswith("/static/")
        for method in sorted(_methods(route))
    ]


def _methods(route: Route) -> set[str]:
    return (route.methods or set()) - {"HEAD"}


def test_the_routes_are_those_that_are_attacked_here(console: InProcess) -> None:
    """A new one with a parameter needs an example; each is asked for below."""
    assert all("{" not in path for _, path in _routes(console))
    assert [method for method, path in _routes(console) if method not in ("GET", "POST")] == []
    assert len(_routes(console)) == 13 + len(PAGES) + sum(len(each.files) for each in PAGES)


def test_nobody_gets_anything_without_logging_in(console: InProcess) -> None:
    nobody = console.browser()
    for method, path in _routes(console):
        answer = nobody.send(method, path, headers={"Origin": ORIGIN})
        if (method, path) in PUBLIC:
            assert answer.status_code in (200, 403, 404)
            assert "default" not in answer.text
        else:
            assert answer.status_code in (303, 401), (method, path)
            assert answer.headers.get("location", "/login").startswith("/login")
            assert "default" not in answer.text


def test_a_viewer_is_refused_each_doing_in_words_and_offered_none(console: InProcess) -> None:
    vic = console.logged_in("vic")
    token = vic.token()
    tried = 0
    for method, path in _routes(console):
        if not path.startswith("/do"):
            continue
        tried += 1
        data = {"form_token": token, "task": "default", "confirmed": "0" * 32}
        more = {"data": data} if method == "POST" else {}
        answer = vic.send(method, path, headers={"Origin": ORIGIN}, **more)
        assert answer.status_code == 403 and "vic may look" in answer.text, (method, path)
    assert tried == 4
    for page in PAGES:
        assert "/do" not in vic.get(f"/{page.name}").text, page.name
    with Fleet.open(console.home.folder) as fleet:
        assert fleet.audit() == []


def _no_token(browser: Browser, theirs: str) -> dict[str, Any]:
    return {"data": {}, "headers": {"Origin": ORIGIN}}


def _anothers_token(browser: Browser, theirs: str) -> dict[str, Any]:
    return {"data": {"form_token": theirs}, "headers": {"Origin": ORIGIN}}


def _token_as_a_file(browser: Browser, theirs: str) -> dict[str, Any]:
    return {"files": {"form_token": ("a", browser.token())}, "headers": {"Origin": ORIGIN}}


def _strange_token(browser: Browser, theirs: str) -> dict[str, Any]:
    return {"data": {"form_token": "\udcff\0é"}, "headers": {"Origin": ORIGIN}}


def _from(**headers: str) -> Callable[[Browser, str], dict[str, Any]]:
    def forged(browser: Browser, theirs: str) -> dict[str, Any]:
        return {"data": {"form_token": browser.token(), "task": "default"}, "headers": headers}

    return forged


FORGERIES = {
    "no token": _no_token,
    "another session's token": _anothers_token,
    "a token that is a file": _token_as_a_file,
    "a token of nonsense": _strange_token,
    "no origin": _from(),
    "another site": _from(Origin="https://evil.example"),
    "another port": _from(Origin="http://127.0.0.1:9000"),
    "a name that begins alike": _from(Origin=ORIGIN + ".evil.example"),
    "a hidden origin": _from(Origin="null"),
    "no address": _from(Origin="http://["),
    "a sister site": _from(Origin=ORIGIN, **{"Sec-Fetch-Site": "same-site"}),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_form_does_nothing(console: InProcess, forgery: str) -> None:
    anna, other = console.logged_in("anna"), console.logged_in("anna")
    paths = [path for method, path in _routes(console) if method == "POST"]
    for path in paths:
        if path == "/login" and "token" in forgery:
            continue  # nobody has one there: only where it comes from is looked at
        try:
            sent = FORGERIES[forgery](anna, other.token())
            answer = anna.send("POST", path, **sent)
        except UnicodeEncodeError:
            return  # no client sends it
        assert answer.status_code == 403, (path, answer.text)
    assert len(paths) == 3
    assert anna.get("/now").status_code == 200, "logged out by another site"
    with Fleet.open(console.home.folder) as fleet:
        assert fleet.audit() == []


def test_links_do_nothing(console: InProcess) -> None:
    """A GET changes nothing, so that no picture on another site does."""
    anna = console.logged_in("anna")
    for method, path in _routes(console):
        if method == "GET" and path != "/events":
            anna.get(path)
    assert anna.get("/now").status_code == 200
    with Fleet.open(console.home.folder) as fleet:
        assert [each.action for each in fleet.audit()] == ["export model"] * 2


MARKUP = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 12345*54321 }}"


def test_markup_from_the_fleet_is_text(console: InProcess) -> None:
    """Names and labels of devices, refusals, problems and reasons, as the store has them."""
    name = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
    with Fleet.open(console.home.folder, actor=MARKUP) as fleet:
        store = fleet._store
        with store.database.transaction():
            store.refusals.add({MARKUP: 3})
            store.tasks.change(1, problem=MARKUP)
        fleet.invite(name=name, labels={"site": "<b>"} if _takes_labels(fleet) else {})
        with pytest.raises(Exception, match="no task"):
            fleet.pause(MARKUP)
    anna = console.logged_in("anna")
    for path in [f"/{page.name}" for page in PAGES]:
        text = anna.get(path).text
        assert "<script>alert" not in text and "<img" not in text and "670592745" not in text, path
    assert "&lt;script&gt;alert(1)" in anna.get("/now").text
    assert "&lt;script&gt;alert(1)" in anna.get("/audit").text


def _takes_labels(fleet: Fleet) -> bool:
    try:
        fleet.invite(labels={"site": "<b>"})
    except Exception:
        return False
    return True


@pytest.mark.parametrize(
    ("path", "name"),
    [("/do/revoke", "device"), ("/do/invite", "name"), ("/login", "to"), ("/now", "task")],
)
def test_markup_in_an_address_is_text(console: InProcess, path: str, name: str) -> None:
    for browser in (console.logged_in("anna"), console.browser()):
        text = browser.send("GET", path, params={name: MARKUP}).text
        assert "<script>alert" not in text and "<img" not in text and "670592745" not in text


def test_markup_that_was_entered_comes_back_as_text(console: InProcess) -> None:
    anna = console.logged_in("anna")
    for sent in (
        {"path": "/do/add", "name": MARKUP, "text": MARKUP},
        {"path": "/do/revoke", "device": MARKUP},
        {"path": "/do/invite", "count": MARKUP, "hours": MARKUP},
    ):
        answer = anna.post(sent.pop("path"), **sent)
        assert "&lt;script&gt;" in answer.text
        assert "<script>alert" not in answer.text and "<img" not in answer.text


def test_each_answer_says_what_a_page_may_do_and_no_page_needs_more(console: InProcess) -> None:
    anna, nobody = console.logged_in("anna"), console.browser()
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    for browser in (anna, nobody):
        for method, path in _routes(console):
            if path == "/events":
                continue
            answer = browser.send(method, path)
            for name, value in HEADERS.items():
                assert answer.headers[name] == value, (path, name)
            assert "server" not in answer.headers
            for inline in (r"\sstyle=", r"\son\w+=", r"<style", r"<script(?! src=)", "javascript:"):
                assert not re.search(inline, answer.text), (path, inline)
    for path in ("/nowhere", "/static/none", "/now/"):
        for name in set(HEADERS) - {"Cache-Control"}:
            assert anna.get(path).headers[name] == HEADERS[name]


def test_templates_escape_and_load_nothing_from_elsewhere() -> None:
    folder = Path(str(resources.files("aggregator.console")))
    for path in [*folder.glob("templates/*"), *folder.glob("static/*")]:
        text = path.read_text()
        assert not re.search(r"autoescape|Markup|https?://(?!www\.w3\.org)", text), path
        for said in re.findall(r"\{\{(.*?)\}\}", text):
            assert "safe" not in said or re.search(r"'[^']*' \| safe", said), path


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/%2e%2e/home/console.json",
        "/static//etc/passwd",
        "/static/",
        "/static",
        "/static/console.css/../../app.py",
        "/static/console.css%00.py",
        "/static/..\\app.py",
        "/models/../console.json",
        "/models/..%2f..%2fconsole.json.safetensors",
        "/models/-1.safetensors",
        "/models/0.safetensors/../../console.json",
        "/models/0x0.safetensors",
        "/models/0.toml",
        "/models/best.safetensors",
        "/templates/base.html",
        "/do/../now",
        "//evil.example/now",
        "/now%00",
        "/%6eow%2f..",
    ],
)
def test_no_address_leads_to_another_file(console: InProcess, path: str) -> None:
    for browser in (console.logged_in("anna"), console.browser()):
        answer = browser.portal.call(_raw, console, path, dict(browser.client.cookies))
        assert answer in (303, 400, 404), path


async def _raw(console: InProcess, path: str, cookies: dict[str, str]) -> int:
    """The status of an address as it is, which no client has tidied."""
    from urllib.parse import unquote

    said = [{"type": "http.request", "body": b"", "more_body": False}]
    heard: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return said.pop(0)

    async def send(message: Any) -> None:
        heard.append(message)

    cookie = "; ".join(f"{name}={value}" for name, value in cookies.items())
    headers = [(b"host", b"127.0.0.1:8443"), (b"cookie", cookie.encode())]
    scope = {
        "type": "http",
        "method": "GET",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "scheme": "http",
        "server": ("127.0.0.1", 8443),
        "client": ("127.0.0.1", 1),
        "root_path": "",
        "http_version": "1.1",
    }
    await console.app(scope, receive, send)
    assert b"argon2" not in b"".join(each.get("body", b"") for each in heard)
    return int(heard[0]["status"])


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8443", 303),
        ("localhost:8443", 303),
        ("LOCALHOST", 303),
        ("[::1]:8443", 303),
        ("evil.example:8443", 400),
        ("evil.example", 400),
        ("127.0.0.1.evil.example", 400),
        ("", 400),
        ("10.0.0.1", 400),
        ("localhost@evil.example", 400),
    ],
)
def test_another_name_for_this_address_is_refused(
    console: InProcess, host: str, status: int
) -> None:
    """DNS rebinding: a site whose name leads here."""
    answer = console.browser().send("GET", "/now", headers={"Host": host})
    assert answer.status_code == status
    if status == 400:
        assert "[console] hosts" in answer.text


def test_names_are_taken_as_the_file_says() -> None:
    settings = ConsoleSettings("0.0.0.0:1", "a", "b", hosts=("Console.example",))
    ours = own_hosts(settings)
    assert gate._is_ours("console.example", ours) and gate._is_ours("10.9.8.7", ours)
    assert not gate._is_ours("evil.example", ours)


@pytest.mark.parametrize("path", ["/login", "/logout", "/do/add"])
def test_more_than_a_form_may_hold_is_refused(console: InProcess, path: str) -> None:
    anna = console.logged_in("anna")
    token, head = anna.token(), {"Origin": ORIGIN}
    large = {"form_token": token, "name": "x", "text": "y" * (2 << 20)}
    assert anna.send("POST", path, data=large, headers=head).status_code == 413

    async def endless() -> Any:
        yield b"form_token=" + token.encode() + b"&text="
        for _ in range(4096):
            yield b"y" * 4096

    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = anna.send("POST", path, content=endless(), headers=head | kind)
    assert answer.status_code == 413
    many = {"form_token": token} | {f"f{number}": "x" for number in range(500)}
    files = {"text_file": ("a", b"x")}
    assert anna.send("POST", path, data=many, files=files, headers=head).status_code == 400
    several = [("text_file", ("a", b"x")), ("text_file", ("b", b"x"))]
    sent = {"data": {"form_token": token}, "files": several}
    assert anna.send("POST", path, headers=head, **sent).status_code == 400
    assert anna.get("/now").status_code == 200


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"{"),
        ("multipart/form-data", b"--x"),
        ("multipart/form-data; boundary=x", b"\xff" * 999),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="a'),
        ("application/x-www-form-urlencoded", b"%%%&&&===\xff\xfe&form_token[]=1"),
        ("", b"\0" * 100),
        ("\xff/\xff", b"x=1"),
    ],
)
def test_a_body_of_nonsense_is_refused_in_words(console: InProcess, kind: str, body: bytes) -> None:
    anna = console.logged_in("anna")
    head = {"Origin": ORIGIN, "Content-Type": kind.encode("latin-1")}
    for path in ("/login", "/logout", "/do/pause"):
        answer = anna.send("POST", path, content=body, headers=head)
        assert answer.status_code in (400, 403), (path, answer.status_code)
    assert anna.get("/now").status_code == 200


@pytest.mark.parametrize(
    ("charset", "status"),
    [
        ("punycode", 400),  # takes time by the square of a field's length
        ('"PunyCode"', 400),
        ("utf-8; charset=punycode", 400),
        ("unicode_escape", 400),  # makes characters of which there are no bytes
        ("utf-16", 400),
        ("\xff", 400),
        ('"', 400),
        ("utf-8", 403),
        ("UTF8", 403),
    ],
)
def test_a_form_is_of_one_charset(console: InProcess, charset: str, status: int) -> None:
    kind = f"multipart/form-data; boundary=x; charset={charset}".encode("latin-1")
    part = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    body = part % (b"name", b"a\\ud800") + part % (b"password", b"a-b") + b"--x--\r\n"
    head = {"Origin": ORIGIN, "Content-Type": kind}
    answer = console.browser().send("POST", "/login", content=body, headers=head)
    assert answer.status_code == status
    assert status != 400 or "utf-8" in answer.text


def test_cookies_of_nonsense_are_nobodys(console: InProcess) -> None:
    for cookie in ("tessera=", "tessera=\xff", "tessera=" + "a" * 9999, "=;=;", "tessera"):
        answer = console.browser().send("GET", "/now", headers={"Cookie": cookie.encode("latin-1")})
        assert answer.status_code == 303


@pytest.mark.parametrize("number", ["9" * 10, "9" * 5000, "\u0661"])
def test_a_number_that_is_no_version_is_refused_in_words(
    console: InProcess, number: str, caplog: pytest.LogCaptureFixture
) -> None:
    for form in FORMS:
        path = f"/models/{number}.{form}"
        assert console.browser().get(path).status_code in (303, 404)
        answer = console.logged_in("anna").get(path)
        assert answer.status_code in (400, 404) and "Traceback" not in answer.text
    assert not any("failed" in each for each in caplog.messages)


def test_a_page_that_fails_harms_no_other_and_tells_no_traceback(
    console: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    anna = console.logged_in("anna")
    monkeypatch.setitem(vars(PAGES[0]), "read", lambda fleet, query: 1 / 0)
    answer = anna.get("/now")
    assert "Traceback" not in answer.text and answer.status_code in (400, 500)
    monkeypatch.undo()
    assert anna.get("/audit").status_code == 200
