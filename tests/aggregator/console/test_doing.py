"""What an operator does by the console: asked once, done, told, and written down with his name."""

from __future__ import annotations

import io
import re
import zipfile

import pytest
from httpx import Response

from aggregator.console.deeds import DEEDS
from aggregator.operate.fleet import Fleet
from device_sdk.artifact import safetensors
from tests.fakes.consoles import ORIGIN, Browser, InProcess
from tests.fakes.homes import serving
from tests.fakes.tasks import task_text
from tests.fakes.waiting import wait_until

_HIDDEN = re.compile(r'<input type="hidden" name="(\w+)" value="([^"]*)">')
_CODE = re.compile(r'<p class="code">([^<]+)</p>')


def _asked(browser: Browser, deed: str, **values: str) -> Response:
    """The page that says what will happen."""
    return browser.post(f"/do/{deed}", **values)


def _confirm(browser: Browser, page: Response, deed: str, **more: str) -> Response:
    hidden = dict(_HIDDEN.findall(page.text))
    token = hidden.pop("form_token")
    return browser.post(f"/do/{deed}", token, **hidden, **more)


def _done(browser: Browser, deed: str, **values: str) -> str:
    """What is told when it was asked for, confirmed and done."""
    page = _asked(browser, deed, **values)
    assert "This will happen" in page.text, page.text
    more = {"text": values["text"]} if "text" in values else {}
    answer = _confirm(browser, page, deed, **more)
    assert answer.status_code == 303, answer.text
    told: list[str] = []

    def is_done() -> bool:
        told.append(browser.get(answer.headers["location"]).text)
        return "It is being done" not in told[-1]

    wait_until(is_done)
    return told[-1]


def _audit(console: InProcess) -> list[tuple[str, str, str]]:
    with Fleet.open(console.home.folder) as fleet:
        return [(each.actor, each.action, each.outcome) for each in fleet.audit()]


def test_codes_are_made_shown_once_and_withdrawn(console: InProcess) -> None:
    anna = console.logged_in("anna")
    page = _asked(anna, "invite", count="2", hours="48", labels="site=north, line=b")
    assert "Each of 2 codes lets one device join the fleet, once, within 2 days" in page.text
    assert "site = north, line = b" in page.text
    assert _audit(console) == []
    answer = _confirm(anna, page, "invite")
    told = anna.get(answer.headers["location"]).text
    codes = _CODE.findall(told)
    assert len(set(codes)) == 2 and told.count("<svg") == 2
    assert "Hand each over as you would a password" in told and "shown once" not in told
    again = anna.get(answer.headers["location"]).text
    assert not _CODE.findall(again) and "shown once" in again and "<svg" not in again
    with Fleet.open(console.home.folder) as fleet:
        first, second = fleet.unused_codes()
        assert dict(first.labels) == {"site": "north", "line": "b"}
    offered = anna.get("/do/withdraw").text
    assert f'<option value="{first.code_id}">{first.code_id}: ' in offered
    assert "is withdrawn" in _done(anna, "withdraw", code=first.code_id)
    assert first.code_id not in anna.get("/do/withdraw").text
    with Fleet.open(console.home.folder) as fleet:
        assert [each.code_id for each in fleet.unused_codes()] == [second.code_id]
    assert _audit(console) == [
        ("anna (console)", "invite", "done"),
        ("anna (console)", "withdraw", "done"),
    ]
    for code in codes:
        assert code not in console.home.audit_file.read_text()


def test_another_operator_sees_nobodys_codes(console: InProcess) -> None:
    anna = console.logged_in("anna")
    answer = _confirm(anna, _asked(anna, "invite", count="1", hours="1"), "invite")
    console.console.users.change(
        "vic", lambda user: type(user)(user.name, type(user.role)("operator"), user.password)
    )
    assert console.logged_in("vic").get(answer.headers["location"]).status_code == 404
    assert _CODE.findall(anna.get(answer.headers["location"]).text)


def test_a_question_is_good_for_one_answer(console: InProcess) -> None:
    anna = console.logged_in("anna")
    page = _asked(anna, "pause", task="default")
    assert _confirm(anna, page, "pause").status_code == 303
    assert _confirm(anna, page, "pause").status_code == 409
    assert anna.post("/do/pause", task="default", confirmed="0" * 32).status_code == 409
    assert len(_audit(console)) == 1


def test_another_users_confirmation_is_none(console: InProcess) -> None:
    anna = console.logged_in("anna")
    page = _asked(anna, "pause", task="default")
    confirmed = dict(_HIDDEN.findall(page.text))["confirmed"]
    console.console.users.change(
        "vic", lambda user: type(user)(user.name, type(user.role)("operator"), user.password)
    )
    vic = console.logged_in("vic")
    assert vic.post("/do/pause", task="default", confirmed=confirmed).status_code == 409


def test_tasks_and_versions(console: InProcess) -> None:
    anna, text = console.logged_in("anna"), task_text(console.home, "air")
    assert "Task default opens no further round." in _done(anna, "pause", task="default")
    assert "paused already: nothing changes" in _asked(anna, "pause", task="default").text
    assert "Task default is paused already" in _done(anna, "pause", task="default")
    assert "Task default opens rounds." in _done(anna, "resume", task="default")
    assert "not paused: nothing changes" in _asked(anna, "resume", task="default").text
    assert "Task default is not paused" in _done(anna, "resume", task="default")
    assert "kept for good" in _done(anna, "pin", task="default", version="0")
    assert "as long as the others" in _done(anna, "unpin", task="default", version="0")
    told = _done(anna, "rollback", task="default", version="0")
    assert "becomes the next version of task default" in told
    assert "goes on with the model" in _done(anna, "stay", task="default")
    assert "as soon as serve runs" in _done(anna, "add", name="air", text=text)
    with serving(console.home):
        wait_until(lambda: "air" in _served(console))
        text = task_text(console.home, "air", width=4)
        told = _done(anna, "replace", task="air", text=text, now="yes")
        assert "<h2>Done</h2>" in told, told
    assert [each[1] for each in _audit(console)] == [
        *("pause", "pause", "resume", "resume", "pin", "unpin", "rollback", "cancel rollback"),
        *("add task", "replace task"),
    ]


def _served(console: InProcess) -> list[str | None]:
    with Fleet.open(console.home.folder) as fleet:
        return [each.name for each in fleet.tasks() if each.state == "active"]


def test_a_task_file_may_be_uploaded(console: InProcess) -> None:
    anna = console.logged_in("anna")
    token = anna.token()
    answer = anna.send(
        "POST",
        "/do/add",
        headers={"Origin": ORIGIN},
        data={"form_token": token, "name": "air", "text": ""},
        files={"text_file": ("../../evil.toml", b"[task]\nnonsense = 1 # </textarea>", "x/y")},
    )
    assert "This will happen" in answer.text and "nonsense = 1 # &lt;/textarea&gt;" in answer.text
    answer = anna.send(
        "POST",
        "/do/add",
        headers={"Origin": ORIGIN},
        data={"form_token": token, "name": "air"},
        files={"text_file": ("a.toml", b"\xff\xfe\x00", "x/y")},
    )
    assert answer.status_code == 400 and "is no text" in answer.text


@pytest.mark.parametrize(
    ("deed", "values", "said"),
    [
        ("invite", {"count": "0", "hours": "1"}, "a whole number of 1 to 50"),
        ("invite", {"count": "٣", "hours": "1"}, "a whole number of 1 to 50"),
        ("invite", {"count": "9" * 99, "hours": "1"}, "a whole number of 1 to 50"),
        ("invite", {"count": "2", "hours": "1", "name": "hall"}, "goes with one code"),
        ("invite", {"count": "1", "hours": "1", "labels": "north"}, "is no label"),
        ("invite", {"count": "1", "hours": "1", "replaces": "hall-9"}, "no device named"),
        ("withdraw", {"code": "00"}, "no code that can still be used"),
        ("revoke", {"device": "hall-9"}, "no device named"),
        ("pause", {"task": "air"}, "there is no task"),
        ("rollback", {"task": "default", "version": "7"}, "keeps no version 7"),
        ("pin", {"task": "default", "version": "-1"}, "a whole number"),
    ],
)
def test_what_cannot_be_done_is_said_before_it_is_asked(
    console: InProcess, deed: str, values: dict[str, str], said: str
) -> None:
    answer = _asked(console.logged_in("anna"), deed, **values)
    assert answer.status_code == 400 and said in answer.text
    assert "This will happen" not in answer.text and _audit(console) == []
    for value in values.values():
        assert value in answer.text, "what was entered is lost"


@pytest.mark.parametrize(
    ("deed", "values", "said"),
    [
        ("release", {"task": "default"}, "no round is held"),
        ("add", {"name": "No Name", "text": "x"}, "name"),
        ("add", {"name": "air", "text": "["}, "is not TOML"),
        ("replace", {"task": "default", "text": "[broker]\nurl = 1"}, "one key a line"),
        ("unpin", {"task": "default", "version": "0"}, "is not pinned"),
    ],
)
def test_what_was_not_done_is_told_and_written_down(
    console: InProcess, deed: str, values: dict[str, str], said: str
) -> None:
    told = _done(console.logged_in("anna"), deed, **values)
    assert "It was not done" in told and said in told
    ((actor, _, outcome),) = _audit(console)
    assert actor == "anna (console)" and said in outcome


def test_a_store_that_fails_is_told_and_used_again_once_it_can_be(console: InProcess) -> None:
    anna, store = console.logged_in("anna"), console.home.database
    asked, aside = _asked(anna, "pause", task="default"), store.with_name("aside")
    token = anna.token()
    store.rename(aside)
    store.mkdir()  # nobody can open it, not even root
    said = "disk or database did not do what it was asked: unable to open"
    for path in ("/do/pause?task=default", "/models/0.onnx?task=default"):
        answer = anna.get(path)
        assert answer.status_code == 503 and said in answer.text, path
        assert answer.headers["Refresh"] == "10", "the page comes back by itself"
    answer = anna.post("/do/pause", token, task="default")
    assert answer.status_code == 503 and said in answer.text and "Refresh" not in answer.headers
    hidden = dict(_HIDDEN.findall(asked.text))
    job = anna.post("/do/pause", hidden.pop("form_token"), **hidden).headers["location"]
    wait_until(lambda: said in anna.get(job).text)
    store.rmdir()
    aside.rename(store)
    assert "Done" in _done(anna, "pause", task="default")


def test_links_bring_what_is_known(console: InProcess) -> None:
    anna = console.logged_in("anna")
    assert "This will happen" in anna.get("/do/pause?task=default").text
    assert 'value="hall-1"' in anna.get("/do/invite?name=hall-1").text
    assert _audit(console) == [], "a link does nothing"
    assert anna.get("/do/nothing").status_code == 400
    listed = anna.get("/do").text
    for each in DEEDS:
        assert f'href="/do/{each}"' in listed


def test_models_leave_as_files(console: InProcess) -> None:
    vic = console.logged_in("vic")
    answer = vic.get("/models/0.safetensors?task=default")
    assert answer.headers["content-disposition"] == 'attachment; filename="default-0.safetensors"'
    assert safetensors.decode(answer.content).tensors
    answer = vic.get("/models/0.onnx")
    assert answer.status_code == 200
    if answer.headers["content-disposition"].endswith('.zip"'):
        names = zipfile.ZipFile(io.BytesIO(answer.content)).namelist()
        assert len(names) > 1 and all(name.startswith("default-0") for name in names)
    assert ("vic (console)", "export model", "done") in _audit(console)
    for path in ("7.safetensors", "0.safetensors?task=air", "9999999999999999999999.onnx"):
        answer = vic.get(f"/models/{path}")
        assert answer.status_code == 400 and "Not possible" in answer.text


def test_the_audit_page_has_the_newest_first(console: InProcess) -> None:
    anna = console.logged_in("anna")
    _done(anna, "pause", task="default")
    _done(anna, "resume", task="default")
    wait_until(lambda: "resume" in anna.get("/audit").text)
    page = console.logged_in("vic").get("/audit").text
    assert page.index("<td>resume</td>") < page.index("<td>pause</td>")
    assert "anna (console)" in page
