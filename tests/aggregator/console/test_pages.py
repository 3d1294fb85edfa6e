"""What pages show is what is so: as they are loaded, and by their streams while they are open."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from aggregator.console.live import MOST_STREAMS
from aggregator.console.pages import PAGES
from aggregator.console.pages.page import ConsolePage, PageQuery
from aggregator.console.reader import SHARE, FleetReader, PageWanted
from aggregator.home import AggregatorHome
from aggregator.operate.fleet import Fleet
from aggregator.store.sqlite import SQLiteDatabase
from tests.fakes.consoles import PASSWORD, ConsoleProcess, InProcess, running_console
from tests.fakes.homes import command, serving
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until


@pytest.mark.parametrize(
    "page", [each for each in PAGES if "{" not in each.path], ids=lambda page: page.name
)
def test_each_page_shows_itself_and_its_stream(console: InProcess, page: ConsolePage) -> None:
    text = console.logged_in("vic").get(page.path).text
    assert f"<h1>{page.title}</h1>" in text and "This cannot be shown" not in text
    assert f'data-events="/events?page={page.name}"' in text
    if page.listed:
        assert f'<a href="/{page.name}" aria-current="page">{page.title}</a>' in text


def test_the_first_page_is_the_first_of_the_list(console: InProcess) -> None:
    assert console.logged_in("vic").get("/").headers["location"] == f"/{PAGES[0].name}"


def test_a_query_keeps_what_a_page_takes_and_no_more() -> None:
    given = [("task", "air"), ("search", "x" * 999), ("other", "1"), ("task", ""), ("task", "b")]
    query = PageQuery.of(given, {"task", "search"})
    assert query.get("task") == "b" and len(query.get("search") or "") == 200
    assert query.get("other") is None


def test_a_home_that_cannot_be_read_is_told_and_read_again(console: InProcess) -> None:
    vic = console.logged_in("vic")
    hidden = console.home.database.rename(console.home.database.with_suffix(".away"))
    answer = vic.get("/now")
    assert answer.status_code == 400 and "This cannot be shown" in answer.text
    hidden.rename(console.home.database)
    wait_until(lambda: vic.get("/now").status_code == 200)


# The reader.


@dataclass
class _Counted:
    """A page that counts how often it is read, each time for so long by a clock that is held."""

    takes_seconds: float
    now_seconds: float = 0.0
    reads: int = 0
    read: threading.Event = field(default_factory=threading.Event)

    def __call__(self, fleet: Fleet, query: PageQuery) -> int:
        self.reads += 1
        self.now_seconds += self.takes_seconds
        self.read.set()
        return self.reads


@contextmanager
def _reading(home: AggregatorHome, counted: _Counted) -> Iterator[tuple[FleetReader, PageWanted]]:
    reader = FleetReader(home.folder, lambda: counted.now_seconds)
    try:
        yield reader, PageWanted(ConsolePage("counted", "Counted", counted), PageQuery())
    finally:
        reader.close()


def test_many_who_watch_one_page_cost_one_reading(console_home: AggregatorHome) -> None:
    counted = _Counted(0.0)
    with _reading(console_home, counted) as (reader, wanted):
        found = [reader.ask(wanted).result(PATIENCE_SECONDS).view for _ in range(50)]
        assert set(found) == {1}, "within a second it is not read again"
        counted.now_seconds += 1.0
        assert reader.ask(wanted).result(PATIENCE_SECONDS).view == 2


def test_what_is_watched_is_read_for_a_share_of_the_time(console_home: AggregatorHome) -> None:
    counted, nudge = _Counted(0.5), ConsolePage("nudge", "Nudge", lambda fleet, query: None)
    with _reading(console_home, counted) as (reader, wanted):
        told = threading.Event()
        with reader.watching(wanted, told.set):
            assert told.wait(PATIENCE_SECONDS) and counted.reads == 1
            # It began at 0 and took half a second: the next is due at 0.5 / SHARE.
            for after_seconds, reads in ((0.5 / SHARE - 0.6, 1), (0.2, 2)):
                counted.now_seconds += after_seconds
                told.clear()
                for place in range(3):
                    other = PageWanted(nudge, PageQuery((("n", f"{reads}{place}"),)))
                    reader.ask(other).result(PATIENCE_SECONDS)
                assert counted.reads == reads
        counted.now_seconds += 1000.0
        reader.ask(PageWanted(nudge, PageQuery())).result(PATIENCE_SECONDS)
        assert counted.reads == 2, "nobody looks"


def test_a_reader_holds_no_store_open(
    console_home: AggregatorHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it can be moved while pages are open."""
    closed: list[object] = []
    close = SQLiteDatabase.close
    monkeypatch.setattr(
        SQLiteDatabase, "close", lambda self: (closed.append(self), close(self))[-1]
    )
    with _reading(console_home, _Counted(0.0)) as (reader, wanted):
        reader.ask(wanted).result(PATIENCE_SECONDS)
        wait_until(lambda: len(closed) == 1)


@pytest.mark.parametrize("why", [b"\xff", b""], ids=["no text", "empty"])
def test_whatever_keeps_the_store_from_being_opened_is_told(
    console_home: AggregatorHome, why: bytes
) -> None:
    console_home.store_identity.write_bytes(why)
    with _reading(console_home, _Counted(0.0)) as (reader, wanted):
        found = reader.ask(wanted).result(PATIENCE_SECONDS)
        assert found.view is None and "has its store in PostgreSQL" in found.problem
        console_home.store_identity.unlink()
        assert reader.ask(_other(1)).result(PATIENCE_SECONDS).view == 1


def _other(number: int) -> PageWanted:
    page = ConsolePage("other", "Other", lambda fleet, query: int(query.get("n") or 0))
    return PageWanted(page, PageQuery((("n", str(number)),)))


@pytest.mark.parametrize("error", [OSError("a disk"), RuntimeError("a mistake")])
@pytest.mark.parametrize("of", ["open_store", "close"])
def test_a_reader_goes_on_whatever_fails(
    console_home: AggregatorHome, monkeypatch: pytest.MonkeyPatch, of: str, error: Exception
) -> None:
    def fails(self: object) -> None:
        raise error

    counted, told = _Counted(0.0), threading.Event()
    with _reading(console_home, counted) as (reader, wanted), reader.watching(wanted, told.set):
        assert told.wait(PATIENCE_SECONDS)
        told.clear()
        with monkeypatch.context() as patched:
            patched.setattr(AggregatorHome if of == "open_store" else SQLiteDatabase, of, fails)
            counted.now_seconds += 1.0
            found = reader.ask(wanted).result(PATIENCE_SECONDS)
            assert (str(error) in found.problem) == (of == "open_store")
            assert told.wait(PATIENCE_SECONDS), "whoever watches is told as well"
        assert reader.ask(_other(2)).result(PATIENCE_SECONDS).view == 2


def test_who_asks_and_goes_away_takes_it_from_nobody_else(console_home: AggregatorHome) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def slow(fleet: Fleet, query: PageQuery) -> None:
        began.set()
        assert goes_on.wait(PATIENCE_SECONDS)

    with _reading(console_home, _Counted(0.0)) as (reader, wanted):
        reader.ask(PageWanted(ConsolePage("slow", "Slow", slow), PageQuery()))
        assert began.wait(PATIENCE_SECONDS)
        first, second = reader.ask(wanted), reader.ask(wanted)
        first.cancel()  # as asyncio does with a request whose client is gone
        goes_on.set()
        assert second.result(PATIENCE_SECONDS).view == 1
        assert reader.ask(_other(3)).result(PATIENCE_SECONDS).view == 3


# Streams, as browsers have them.


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ConsoleProcess, Path]]:
    from tests.fakes.consoles import add_users
    from tests.fakes.homes import make_home

    home = make_home(tmp_path_factory.mktemp("console"), "mqtt://127.0.0.1:1", "quorum = 1")
    with serving(home):
        pass
    add_users(home)
    with running_console(home) as console:
        yield console, home.folder


@contextmanager
def _logged_in(console: ConsoleProcess, name: str) -> Iterator[httpx.Client]:
    base = f"http://127.0.0.1:{console.port}"
    with httpx.Client(base_url=base, timeout=PATIENCE_SECONDS) as client:
        given = {"name": name, "password": PASSWORD, "to": "/now"}
        answer = client.post("/login", data=given, headers={"Origin": base})
        assert answer.status_code == 303, answer.text
        yield client


def _fragments(answer: httpx.Response) -> Iterator[str]:
    """What a stream brings, one fragment after another."""
    lines: list[str] = []
    for line in answer.iter_lines():
        if line.startswith("data: "):
            lines.append(line.removeprefix("data: "))
        elif not line and lines:
            yield "\n".join(lines)
            lines = []


def test_a_stream_brings_what_has_changed_until_the_session_ends(
    running: tuple[ConsoleProcess, Path],
) -> None:
    console, folder = running
    home = AggregatorHome(folder)
    with (
        _logged_in(console, "vic") as client,
        client.stream("GET", "/events", params={"page": "now"}) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        fragments = _fragments(answer)
        assert "paused" not in next(fragments)
        with Fleet.open(folder) as fleet:
            fleet.pause("default")
        assert "paused" in next(fragments)
        with Fleet.open(folder) as fleet:
            fleet.resume("default")
        assert "paused" not in next(fragments)
        assert command(home, "console", "user", "remove", "vic") == 0
        assert list(fragments) == [], "it ends"
    assert "/now" in _events_of(console, "anna")


def _events_of(console: ConsoleProcess, name: str) -> str:
    with _logged_in(console, name) as client:
        return re.sub(r"\s+", " ", client.get("/now").text)


def test_streams_are_bounded_and_those_that_are_gone_do_not_count(
    running: tuple[ConsoleProcess, Path],
) -> None:
    console, _ = running
    limits = httpx.Limits(max_connections=None)
    with _logged_in(console, "anna") as client:
        head = {"Cookie": f"tessera={client.cookies['tessera']}"}
        base = f"http://127.0.0.1:{console.port}"
        with httpx.Client(
            base_url=base, timeout=PATIENCE_SECONDS, limits=limits, headers=head
        ) as many:
            open_ones = [
                many.send(many.build_request("GET", "/events?page=now"), stream=True)
                for _ in range(MOST_STREAMS)
            ]
            assert {each.status_code for each in open_ones} == {200}
            assert client.get("/events?page=now").status_code == 503
            assert client.get("/now").status_code == 200, "pages are shown without"
            for each in open_ones:
                each.close()

        def is_free() -> bool:
            with client.stream("GET", "/events?page=now") as answer:
                return answer.status_code == 200

        wait_until(is_free)
