"""What people do at the console, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed (pip install playwright)")
pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

from aggregator.cli import main
from aggregator.console.deeds import DEEDS
from aggregator.console.pages import PAGES
from tests.brokers.mosquitto import EXECUTABLE
from tests.fakes.browsers import PATIENCE_MS, running_chromium, why_no_chromium
from tests.fakes.consoles import PASSWORD, running_console
from tests.fakes.full_fleets import device_id
from tests.fakes.homes import make_home
from tests.fakes.scenes import PHONE, WIDE, Scene, enter, log_in, new_page, running_scene
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if why_no_chromium():
        pytest.skip(why_no_chromium())
    expect.set_options(timeout=PATIENCE_MS)
    with running_chromium() as found:
        yield found


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Scene]:
    if EXECUTABLE is None:
        pytest.skip("mosquitto is not installed (apt-get install mosquitto)")
    with running_scene(tmp_path_factory.mktemp("journeys"), browser) as found:
        yield found


def _addresses() -> list[str]:
    """Of every page, of what is compared and looked for, of forms, questions and refusals."""
    forms = {deed.fields: name for name, deed in DEEDS.items()}
    return [
        *(page.path.format(device=device_id(5).hex()) for page in PAGES),
        "/learning?task=default&compare=12,30#compare",
        "/devices?q=nobody",
        "/do",
        *(f"/do/{name}" for name in forms.values()),
        "/do/rollback?task=default&version=30",
        "/do/rollback?task=default&version=777",
        "/devices/ffff",
    ]


def _section(page: Page, task: str) -> Locator:
    return page.locator("section").filter(has=page.get_by_role("heading", name=f"{task}:"))


def _version(page: Page) -> int:
    """The one that the page Now says that the task ``live`` has."""
    said = _section(page, "live").inner_text()
    found = re.search(r"Version (\d+)", said)
    assert found is not None, said
    return int(found[1])


def _await(page: Page, true: Callable[[], bool]) -> None:
    """As :func:`wait_until`, while the browser goes on."""
    wait_until(lambda: (page.wait_for_timeout(20), true())[1], lambda: page.inner_text("body"))


def _confirm(page: Page, button: str) -> None:
    """Of a question: do it, and see that it was done."""
    expect(page.get_by_role("heading", name="This will happen")).to_be_visible()
    page.get_by_role("button", name=button).click()
    expect(page.get_by_role("heading", name="Done", exact=True)).to_be_visible()


@pytest.mark.exhaustive
def test_a_first_login(tmp_path: Path, browser: Browser) -> None:
    """From a console that nobody may enter to the page that was asked for, and out again."""
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    with (
        running_console(home) as console,
        new_page(browser, f"http://127.0.0.1:{console.port}") as page,
    ):
        page.goto("/models?all=1")
        expect(page.get_by_text("Nobody can log in yet")).to_be_visible()
        (tmp_path / "password").write_text(PASSWORD + "\n")
        add = ["console", "user", "add", "anna", "--role", "operator", "--home", str(home.folder)]
        assert main([*add, "--password-file", str(tmp_path / "password")]) == 0
        page.reload()
        expect(page.get_by_text("Nobody can log in yet")).to_have_count(0)
        expect(page.get_by_label("Name")).to_be_focused()
        enter(page, "anna", "correct horse")
        expect(page.get_by_role("alert")).to_contain_text("No user has this name")
        enter(page, "anna")
        page.wait_for_url("**/models?all=1")
        page.get_by_role("link", name="Now").click()
        expect(page.get_by_text("anna, operator")).to_be_visible()
        expect(page.locator("#live")).to_contain_text("stopped")
        page.get_by_role("button", name="Log out").click()
        page.wait_for_url("**/login*")
        page.goto("/now")
        page.wait_for_url("**/login*")


def test_a_live_round_is_seen_without_a_reload(scene: Scene) -> None:
    """And what is open, or has the focus, stays so."""
    with scene.page("vic") as page:
        loads: list[str] = []
        page.on("domcontentloaded", lambda page: loads.append(page.url))
        expect(page.get_by_role("status")).to_have_text("Live")
        _section(page, "default").get_by_text("Devices that it waits for").click()
        link = _section(page, "live").get_by_role("link", name="Its versions")
        link.focus()
        first = _version(page)
        _await(page, lambda: _version(page) >= first + 2)
        for opens in (True, False, True):  # what stands above the link comes and goes
            _await(
                page,
                lambda opens=opens: (
                    ("No round is open" in _section(page, "live").inner_text()) != opens
                ),
            )
        expect(link).to_be_focused()
        assert _section(page, "default").locator("details").get_attribute("open") is not None
        expect(_section(page, "live")).to_contain_text("updates a second")
        assert loads == []


@pytest.mark.exhaustive
def test_an_invitation_lets_a_device_in(scene: Scene) -> None:
    with scene.page() as page:
        page.get_by_role("link", name="Doing").click()
        page.get_by_role("link", name="Invite devices").click()
        page.get_by_label("Name of the device that joins (optional)").fill("Hall-new")
        page.get_by_label("Its labels (optional)").fill("site=north line=b")
        page.get_by_role("button", name="Go on").click()
        expect(page.get_by_text("Whoever joins is called Hall-new")).to_be_visible()
        _confirm(page, "Make the codes")
        code = page.locator(".code").inner_text()
        picture = page.get_by_role("img", name="QR code of code 1")
        expect(picture.locator("svg")).to_be_visible()
        page.reload()
        expect(page.get_by_text("The codes were shown once")).to_be_visible()
        expect(page.locator(".code")).to_have_count(0)
        page.goto("/devices?q=Hall-new")
        expect(page.get_by_role("heading", name="No device")).to_be_visible()
        with scene.joined(code):
            # By itself: the page is open.
            expect(page.get_by_role("heading", name="1 to 1 of 1 devices")).to_be_visible()
            row = page.get_by_role("row").filter(has_text="Hall-new")
            expect(row).to_contain_text("site=north")


@pytest.mark.exhaustive
def test_a_device_is_revoked_and_hears_of_it(scene: Scene) -> None:
    with scene.live_device("Hall-stolen") as device, scene.page() as page:
        wait_until(lambda: "live" in {each.name for each in device.tasks()})
        wait_until(lambda: device.status(task="live").verdict == "counted")
        page.get_by_role("link", name="Devices", exact=True).click()
        page.get_by_label("Name, first digits of the id, or label").fill("stolen")
        page.get_by_role("button", name="Look").click()
        page.get_by_role("row").filter(has_text="Hall-stolen").get_by_role("link").click()
        page.get_by_role("link", name="Revoke it").click()
        expect(page.get_by_text("is sent away for good")).to_contain_text("Hall-stolen")
        _confirm(page, "Send it away for good")
        wait_until(lambda: "revoked" in device.status(task="live").problem)
        page.goto("/devices?q=stolen")
        row = page.get_by_role("row").filter(has_text="Hall-stolen")
        expect(row).to_contain_text("revoked")
        row.get_by_role("link").click()
        expect(page.get_by_role("heading", name="Hall-stolen")).to_be_visible()
        expect(page.get_by_role("link", name="Revoke it")).to_have_count(0)
        page.get_by_role("link", name="Audit").click()
        line = page.get_by_role("row").filter(has_text="revoke").first
        expect(line).to_contain_text("anna (console)")


@pytest.mark.exhaustive
def test_a_model_goes_back_to_a_version(scene: Scene) -> None:
    with scene.page() as page:
        _await(page, lambda: _version(page) >= 2)
        _section(page, "live").get_by_role("link", name="Pause it").click()
        _confirm(page, "Pause it")
        page.goto("/models?task=live")
        row = page.get_by_role("row").filter(
            has=page.get_by_role("rowheader", name="1", exact=True)
        )
        row.get_by_role("link", name="Go back to it").click()
        expect(page.get_by_text("becomes the next version of task live")).to_be_visible()
        _confirm(page, "Go back to it")
        page.goto("/models?task=live")
        origin = page.get_by_role("cell", name="version 1", exact=True)
        from_it = page.get_by_role("row").filter(has=origin)
        expect(from_it.first).to_be_visible()
        made = int(from_it.first.get_by_role("rowheader").inner_text().split()[0])
        page.goto("/now")
        _section(page, "live").get_by_role("link", name="Resume it").click()
        _confirm(page, "Resume it")
        page.goto("/now")
        _await(page, lambda: _version(page) > made)  # and devices go on from there


@pytest.mark.exhaustive
def test_a_row_that_moves_under_the_hand_is_the_same_row(scene: Scene) -> None:
    """By mouse the press counts for nothing, by keyboard for the row that had it."""
    with scene.page() as page:
        _await(page, lambda: _version(page) >= 2)
        page.goto("/models?task=live")
        rows = page.get_by_role("rowheader")

        def come(count: int) -> None:
            _await(page, lambda: rows.count() > count)

        link = page.get_by_role("link", name="Go back to it").first
        wanted = link.get_attribute("href")
        link.hover()
        page.mouse.down()
        come(rows.count())
        page.mouse.up()
        page.wait_for_timeout(500)
        assert page.url.endswith("/models?task=live") or page.url.endswith(str(wanted))
        page.goto("/models?task=live")
        link = page.get_by_role("link", name="Go back to it").first
        wanted = link.get_attribute("href")
        link.focus()
        come(rows.count())
        page.keyboard.press("Enter")
        page.wait_for_url(f"**{wanted}")
        version = re.search(r"version=(\d+)", str(wanted))
        assert version is not None
        expect(page.get_by_text(f"The model of version {version[1]} becomes")).to_be_visible()


@pytest.mark.exhaustive
def test_the_page_says_that_the_aggregator_was_killed_and_goes_on_when_it_is_back(
    scene: Scene,
) -> None:
    with scene.page("vic") as page:
        tile = page.locator(".tile").first
        expect(tile).to_contain_text("runs")
        scene.serve.kill()
        try:
            expect(tile).to_contain_text("stopped")
            expect(page.get_by_text("Problem:").first).to_be_visible()
            last = _version(page)
        finally:
            scene.serve.start()
        expect(tile).to_contain_text("runs")
        expect(page.get_by_text("Problem:")).to_have_count(0)
        _await(page, lambda: _version(page) > last)
        expect(page.get_by_role("status")).to_have_text("Live")


@pytest.mark.exhaustive
def test_the_page_says_that_the_console_is_gone_and_asks_who_is_there_when_it_is_back(
    scene: Scene,
) -> None:
    with ExitStack() as stack:
        console = stack.enter_context(running_console(scene.home))
        url = f"http://127.0.0.1:{console.port}"
        page = stack.enter_context(new_page(scene.browser, url))
        log_in(page, "vic")
        page.goto("/models?task=default")
        expect(page.get_by_role("status")).to_have_text("Live")
        console.process.kill()
        expect(page.get_by_role("status")).to_have_text("Connection lost, trying again")
        expect(page.get_by_role("heading", name="Versions of default")).to_be_visible()
        console.process.wait(PATIENCE_SECONDS)
        stack.enter_context(running_console(scene.home, console.port))
        page.wait_for_url("**/login?to=*")
        enter(page, "vic")
        page.wait_for_url("**/models?task=default")
        expect(page.get_by_role("status")).to_have_text("Live")


def _tab_to(page: Page, name: str, role: Any = "link") -> None:
    """Press Tab until it has the focus; whatever has it on the way shows that."""
    wanted = page.get_by_role(role, name=name, exact=True)
    shows = (
        "document.activeElement === document.body || "
        "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
    )
    for _ in range(200):
        page.keyboard.press("Tab")
        assert page.evaluate(shows), page.evaluate("document.activeElement.outerHTML")
        if wanted.evaluate("e => e === document.activeElement"):
            return
    raise AssertionError(f"Tab does not come to {name}")


@pytest.mark.exhaustive
def test_by_keyboard_alone(scene: Scene) -> None:
    with new_page(scene.browser, scene.url) as page:
        page.goto("/")
        expect(page.get_by_label("Name")).to_be_focused()
        page.keyboard.type("anna")
        page.keyboard.press("Tab")
        page.keyboard.type(PASSWORD)
        page.keyboard.press("Enter")
        page.wait_for_url("**/now")
        page.keyboard.press("Tab")
        skip = page.get_by_role("link", name="To the content")
        expect(skip).to_be_focused()
        assert (skip.bounding_box() or {"x": -1})["x"] >= 0, "it is not to be seen"
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_be_focused()
        page.reload()
        _tab_to(page, "Devices")
        page.keyboard.press("Enter")
        page.wait_for_url("**/devices")
        for name, button, said in (
            ("Pause a task", "Pause it", "opens no further round"),
            ("Resume a task", "Resume it", "opens rounds"),
        ):
            _tab_to(page, "Doing")
            page.keyboard.press("Enter")
            page.wait_for_url("**/do")
            _tab_to(page, name)
            page.keyboard.press("Enter")
            expect(page.get_by_role("heading", name=name)).to_be_visible()
            _tab_to(page, "Task", "combobox")
            page.keyboard.type("default")
            _tab_to(page, "Go on", "button")
            page.keyboard.press("Enter")
            expect(page.get_by_role("heading", name="This will happen")).to_be_visible()
            _tab_to(page, button, "button")
            page.keyboard.press("Enter")
            expect(page.get_by_text(f"Task default {said}")).to_be_visible()
            expect(page.get_by_role("heading", name="Done", exact=True)).to_be_visible()
        _tab_to(page, "Log out", "button")
        page.keyboard.press("Enter")
        page.wait_for_url("**/login*")


@pytest.mark.exhaustive
def test_nothing_scrolls_sideways_on_a_phone(scene: Scene) -> None:
    beyond = "document.scrollingElement.scrollWidth - document.documentElement.clientWidth"
    with scene.page(width=PHONE, is_mobile=True, has_touch=True) as page:
        for address in ("/login", *_addresses()):
            page.goto(address)
            assert page.evaluate(beyond) <= 0, address


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_no_letter_of_a_picture_is_cut_off(scene: Scene, width: int) -> None:
    outside = """[...document.querySelectorAll('main svg text')].filter(each => {
        const { x, width } = each.getBBox(), whole = each.ownerSVGElement.viewBox.baseVal.width;
        return x < 0 || x + width > whole; }).map(each => each.textContent)"""
    with scene.page(width=width) as page:
        for task in ("default", "live"):
            page.goto(f"/learning?task={task}")
            expect(page.locator("main svg").first).to_be_visible()
            assert page.evaluate(outside) == [], task
        page.goto("/devices")
        assert page.evaluate(outside) == []
        narrow = page.locator("main svg text").first
        narrow.evaluate("each => { each.textContent = '0.'.padEnd(60, '0') }")
        assert page.evaluate(outside) != [], "it sees what is cut off"


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dark_is_dark(scene: Scene, scheme: str) -> None:
    """What is written, in pictures too, is lighter than what is behind it: there alone."""
    lightness = """selector => { const of = colour => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map(Number); return (r + g + b) / 765; };
      return [...document.querySelectorAll(selector)].map(e => getComputedStyle(e)).map(
        s => [s.backgroundColor, s.color].map(of)); }"""
    drawn = "[...document.querySelectorAll('svg text')].map(e => getComputedStyle(e).fill)"
    with scene.page(scheme=scheme) as page:
        for address in ("/now", "/learning?task=default", "/do/replace", "/do/invite"):
            page.goto(address)
            found = page.evaluate(
                lightness, "body, section, input:not([type])[id], textarea, select"
            )
            assert found
            for behind, ink in found:
                assert (behind < ink) == (scheme == "dark"), address
            for fill in page.evaluate(drawn):
                assert (int(re.findall(r"\d+", fill)[0]) > 128) == (scheme == "dark"), address


@pytest.mark.parametrize(("scheme", "width"), [("light", WIDE), ("dark", PHONE)])
@pytest.mark.sampled(1)
def test_axe_finds_nothing_on_any_page(scene: Scene, scheme: str, width: int) -> None:
    """Rules of accessibility that a program can check, contrast among them."""
    axe, found = Axe(), dict[str, list[str]]()
    with scene.page(width=width, scheme=scheme) as page:
        for address in _addresses():
            page.goto(address)
            for each in axe.run(page).response["violations"]:
                places = [node["html"][:200] for node in each["nodes"]]
                found.setdefault(f"{each['id']}: {each['help']}", []).append(f"{address} {places}")
        page.get_by_role("button", name="Log out").click()
        page.wait_for_url("**/login*")
        assert axe.run(page).response["violations"] == []
        page.set_content("<p>neither a title nor a heading</p>")
        assert axe.run(page).response["violations"] != [], "it finds nothing anywhere"
    assert found == {}
