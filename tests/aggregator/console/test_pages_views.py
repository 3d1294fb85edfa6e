"""What pages say of a fleet: made of a store that has much in it, and once as a browser has it."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from aggregator.console.pages import PAGES
from aggregator.console.pages.audit import AUDIT
from aggregator.console.pages.devices import DEVICE, DEVICES, PAGE_DEVICES, DevicesView
from aggregator.console.pages.learning import LEARNING, LearningView
from aggregator.console.pages.models import MODELS, ModelsView
from aggregator.console.pages.now import NOW, NowView
from aggregator.console.pages.page import ConsolePage, PageQuery
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.methods.said import ROUND_METRICS
from aggregator.operate.fleet import Fleet
from aggregator.store.rows import DeviceRow, VersionRow
from tests.fakes.consoles import InProcess, add_users
from tests.fakes.full_fleets import device_id, full_home, took_in
from tests.fakes.homes import make_home

START = time.time()
ROUND, VERSIONS, DEVICES_THERE = 31, 30, 40
_FIFTH = device_id(5).hex()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> AggregatorHome:
    """Nobody changes it."""
    return full_home(tmp_path_factory.mktemp("full"), START)


@pytest.fixture
def own_home(tmp_path: Path) -> AggregatorHome:
    """To be changed."""
    return full_home(tmp_path, START)


@pytest.fixture
def fleet(home: AggregatorHome) -> Iterator[Fleet]:
    with Fleet.open(home.folder, clock=lambda: START) as found:
        yield found


def _view(page: ConsolePage[Any], fleet: Fleet, /, **asked: str) -> Any:
    assert set(asked) <= page.takes
    return page.read(fleet, PageQuery(tuple(sorted(asked.items()))))


def _now(home: AggregatorHome, later: float = 0.0) -> NowView:
    with Fleet.open(home.folder, clock=lambda: START + later) as fleet:
        found: NowView = _view(NOW, fleet)
        return found


# Now.


def test_now_says_whom_the_round_waits_for_and_when_it_closes(fleet: Fleet) -> None:
    view: NowView = _view(NOW, fleet)
    (task,) = view.tasks
    assert (task.name, task.standing, task.version) == ("default", "learning", VERSIONS)
    found = task.round
    assert found is not None and (found.number, found.counted) == (ROUND, 4)
    assert found.deadline.endswith("in 60 min")
    told = dict(found.told)
    assert told["waits"].startswith("for 34 of 39 devices: ") and "round.quorum" in told["because"]
    assert len(found.awaited) + found.more_awaited == 34
    assert {each.device_id for each in found.awaited} < {device_id(p).hex() for p in range(40)}
    assert dict(found.verdicts) == {"counted": 4, "refused, stale-version": 1}
    assert [each.code for each in view.problems] == ["serve-stopped", "two-machines"]
    assert all(each.to_do for each in view.problems)
    assert view.brokers == ("mqtt://127.0.0.1:1",) and view.coordinator == ""
    assert {each.reason: (each.total, each.lately) for each in view.refusals} == {
        "late": (3, None),
        "bad-signature": (1, None),
    }
    assert view.measured == task.speed == "", "one look tells no speed"


def test_a_second_look_tells_how_fast_updates_and_refusals_come(own_home: AggregatorHome) -> None:
    follow = NOW.follow
    assert follow is not None
    first = _now(own_home)
    store = own_home.open_store()
    took_in(store, ROUND, range(10, 16))
    store.refusals.add({"late": 2, "replay": 1})
    second = follow(first, _now(own_home, 3.0))
    assert second.measured == "3 s" and second.tasks[0].speed == "2.0 updates a second"
    assert {each.reason: each.lately for each in second.refusals} == {
        "bad-signature": 0,
        "late": 2,
        "replay": 1,
    }
    # The round closes with one more, and the next has two: nine since the first look.
    (row,) = store.first.rounds.latest()
    store.first.rounds.close(
        replace(row, closed_unix_seconds=START, participants=11, next_version=VERSIONS + 1)
    )
    store.first.rounds.add(replace(row, round=ROUND + 1, participants=None))
    took_in(store, ROUND + 1, range(2))
    third = follow(second, _now(own_home, 9.0))
    assert (third.measured, third.tasks[0].speed) == ("9 s", "1.0 updates a second")
    # Nobody looked for an hour: it is measured anew.
    later = follow(third, _now(own_home, 3600.0))
    assert later.measured == "" and len(later.tallies) == 1
    # The clock was set back.
    assert follow(third, _now(own_home, -50.0)).measured == ""
    store.database.close()


def test_updates_of_rounds_that_are_gone_from_the_page_count_in_its_speed(
    own_home: AggregatorHome,
) -> None:
    """A page that is open for a minute sees more rounds than it shows."""
    follow = NOW.follow
    assert follow is not None
    view = _now(own_home)
    store = own_home.open_store()
    (row,) = store.first.rounds.latest()
    for later in range(1, 41):
        participants = 10 if later == 1 else 6
        store.first.rounds.close(
            replace(row, closed_unix_seconds=START, participants=participants, next_version=99)
        )
        row = replace(row, round=row.round + 1)
        store.first.rounds.add(row)
        view = follow(view, _now(own_home, later * 2.0))
    store.database.close()
    assert (view.measured, view.tasks[0].speed) == ("60 s", "3.0 updates a second")
    (counted,) = view.tallies[-1].counted.values()
    assert len(counted) < 40


def test_now_tells_of_a_clusters_workers(own_home: AggregatorHome) -> None:
    store = own_home.open_store()
    assert store.lease.take("here", "program", 60) is not None
    store.workers.start(0, "north", "0 to 7", "program")
    store.workers.beat(0, connected=True)
    store.database.close()
    view = _now(own_home)
    assert view.coordinator == "here, term 1"
    (worker,) = view.workers
    assert (worker.cell, worker.shards, worker.state) == ("north", "0 to 7", "connected")


def test_now_goes_on_where_a_task_file_cannot_be_read(own_home: AggregatorHome) -> None:
    own_home.task_file.write_text("[broker")
    assert _now(own_home).brokers == ()


# Learning.


def test_learning_draws_quality_by_version_part_and_what_federation_brings(fleet: Fleet) -> None:
    view: LearningView = _view(LEARNING, fleet)
    assert (view.task, view.metric, view.metrics) == ("default", "hr10", ("hr10", "ndcg10"))
    drawn = {each.name: each.picture for each in view.quality}
    assert list(drawn) == ["quality", "parts", "brings"]
    assert f"best: {view.best}" in drawn["quality"].html and view.best_by == "hr10"
    names = [name for name, _ in drawn["quality"].legend]
    assert names[0] == "the model that devices receive" and "worst tenth of the devices" in names
    assert [name for name, _ in drawn["parts"].legend] == ["whole fleet", "k=2", "k=4", "k=8"]
    assert 'class="band tablet"' in drawn["brings"].html
    assert view.brings.startswith("federation brings ")
    assert [each.picture.title for each in view.rounds_drawn] == [
        "loss by round",
        "columns by round",
    ]
    newest = view.history[0]
    assert newest.version == VERSIONS and newest.devices == DEVICES_THERE
    assert f"version {VERSIONS}: {newest.received}" in drawn["quality"].html
    assert {each.part for each in view.figures} == {"fleet", "k=2", "k=4", "k=8"}
    assert sum(each.best for each in view.history) == 1
    assert [each.made for each in view.rounds[:2]] == ["open", f"version {VERSIONS}"]
    assert "k=4" in view.parts.html and len(view.costs) == 3
    assert view.costs[0].received == "40.0 kB"


def test_what_rounds_say_is_drawn_six_at_a_time_and_the_others_are_named(
    own_home: AggregatorHome,
) -> None:
    store = own_home.open_store()
    (row,) = store.first.rounds.latest()
    said = {f"m{place}": float(place) for place in range(6)} | {"a&b": 1.0, "none": float("nan")}
    store.first.rounds.close(replace(row, participants=3, metrics=said))
    store.database.close()
    with Fleet.open(own_home.folder) as fleet:
        view: LearningView = _view(LEARNING, fleet)
        assert [each.name for each in view.rounds_drawn] == [
            "loss",
            "a&b",
            "columns",
            "m0",
            "m1",
            "m2",
        ]
        assert view.rounds_more == ("m3", "m4", "m5")
        view = _view(LEARNING, fleet, said="m4")
        assert [each.name for each in view.rounds_drawn][:3] == ["m4", "loss", "a&b"]
        m4, loss, *_ = view.rounds_drawn
        assert m4.means == "" and loss.means == ROUND_METRICS["loss"].means
        assert "round 31: 4</title>" in view.rounds_drawn[0].picture.html
        assert view.rounds_more == ("m2", "m3", "m5")
    add_users(own_home)
    with closing(InProcess(own_home)) as console:
        vic = console.logged_in("vic")
        text = vic.get("/learning").text
        assert "6 of 9 pictures" in text and '<p class="soft">The devices\' mean loss' in unescape(
            text
        )
        links = re.findall(r'href="(/learning\?[^"]+)#rounds"', text)
        assert len(links) == 3
        for name, link in zip(("m3", "m4", "m5"), links, strict=True):
            there = vic.get(link.replace("&amp;", "&")).text
            assert f">{name} by round</h3>" in there and f">{name}</a>" not in there
            assert f"/learning/picture.svg?task=default&amp;said={name}" in there
        assert f">{name} by round</title>" in vic.get(f"/learning/picture.svg?said={name}").text
        assert "a&amp;b by round" in vic.get("/learning/picture.svg?said=a%26b").text
        assert vic.get("/learning/picture.svg?said=none").status_code == 400


def test_another_metric_is_drawn_when_it_is_asked_for(fleet: Fleet) -> None:
    assert _view(LEARNING, fleet, metric="ndcg10").quality[0].picture.title == "ndcg10 by version"
    assert _view(LEARNING, fleet, metric="<nothing>").metric == "hr10"


def test_two_versions_stand_beside_each_other_with_what_differs(own_home: AggregatorHome) -> None:
    store = own_home.open_store()
    served = store.tasks.find(1).served
    assert served is not None
    store.first.facts.keep_file(20, served.replace("quorum = 2", "quorum = 7"))
    store.database.close()
    with Fleet.open(own_home.folder) as fleet:
        found = _view(LEARNING, fleet, compare="12, 30").compared
        assert found.settings == (("round.quorum", "7", "2"),)
        assert ("round", "12", "30") in found.facts
        figures = {name: (one, other, ahead) for name, one, other, ahead in found.figures}
        assert figures["hr10"][2].startswith("+") and "personal.hr10, k=4" in figures
        assert _view(LEARNING, fleet, compare="12,13").compared.settings == ()
        for asked in ("12", "12,", "a,b", "12,-3", "1" * 30 + ",2", "12,13,14"):
            assert "no two versions, such as 12,30" in _view(LEARNING, fleet, compare=asked).fault
        assert _view(LEARNING, fleet, compare="12,99").fault == (
            "there is no version 99, nor was there one"
        )


def test_what_learning_offers_to_take_away(fleet: Fleet) -> None:
    made = {each.name: each.make for each in LEARNING.files}
    figures = list(csv.DictReader(io.StringIO(made["figures.csv"](fleet, PageQuery()))))
    assert len({each["version"] for each in figures}) == VERSIONS
    one = next(each for each in figures if each["part"] == "k=4" and each["stage"] == "global")
    assert float(one["value"]) > 0 and one["over_alone"] == "", "NaN is no figure"
    rounds = list(csv.DictReader(io.StringIO(made["rounds.csv"](fleet, PageQuery()))))
    assert len(rounds) >= VERSIONS and float(rounds[1]["loss"]) > 0
    for asked in (
        *(("picture", each) for each in ("quality", "parts", "brings")),
        ("said", "loss"),
    ):
        svg = made["picture.svg"](fleet, PageQuery((asked,)))
        ElementTree.fromstring(svg)
    with pytest.raises(AggregatorError, match="there is no picture"):
        made["picture.svg"](fleet, PageQuery((("picture", "../x"),)))


def test_no_cell_of_a_file_is_a_formula(own_home: AggregatorHome) -> None:
    store = own_home.open_store()
    (figure, *_) = store.first.evaluations.latest()[0].figures
    store.first.evaluations.put(99, 99, [replace(figure, part="=HYPERLINK(1)")])
    store.database.close()
    (make,) = (each.make for each in LEARNING.files if each.name == "figures.csv")
    with Fleet.open(own_home.folder) as fleet:
        cells = [each for row in csv.reader(io.StringIO(make(fleet, PageQuery()))) for each in row]
    assert "'=HYPERLINK(1)" in cells and not any(each.startswith("=") for each in cells)


def test_a_fleet_that_has_learnt_nothing_yet_says_so(tmp_path: Path) -> None:
    home = make_home(tmp_path, "mqtt://127.0.0.1:1")
    with Fleet.open(home.folder) as fleet:
        for page in (LEARNING, MODELS):
            with pytest.raises(AggregatorError, match="no task was served yet"):
                _view(page, fleet)
        assert _view(DEVICES, fleet).total == 0 and _view(NOW, fleet).tasks[0].round is None


# Devices.


def test_devices_are_listed_with_what_they_told_last(fleet: Fleet) -> None:
    view: DevicesView = _view(DEVICES, fleet)
    assert (view.first, view.last, view.total) == (1, 40, DEVICES_THERE)
    assert {each.state: each.count for each in view.states} == {
        "all": 40,
        "active": 34,
        "silent": 4,
        "on two machines": 1,
        "revoked": 1,
    }
    fifth = view.devices[5]
    assert (fifth.name, fifth.state, fifth.sdk) == ("Hall-5", "on two machines", "0.2.0")
    assert fifth.labels == "line=l0 own=o5 site=north"
    (told,) = fifth.told
    assert (told.said, told.option) == ("trained, 1 of 20 items unknown", "k=8")
    assert view.devices[4].told[0].said == "failed: not-finite"
    (found,) = view.capability
    assert [each.option for each in found.options] == ["k=2", "k=4", "k=8"]
    assert sum(each.devices for each in found.options) == 35
    assert f"{device_id(0).hex()[:12]}, k=2: " in found.picture.html


def test_devices_are_looked_for_and_links_keep_what_was_asked(fleet: Fleet) -> None:
    view: DevicesView = _view(DEVICES, fleet, q="hall-1", label="site=north", state="active")
    assert [each.name for each in view.devices] == [
        *("Hall-1", "Hall-11", "Hall-15", "Hall-17", "Hall-19")
    ]
    links = {each.state: each.address for each in view.states}
    assert links["silent"] == "/devices?q=hall-1&label=site%3Dnorth&state=silent"
    assert [each.state for each in view.states if each.is_chosen] == ["active"]
    assert _view(DEVICES, fleet, task="default").total == DEVICES_THERE
    for asked, fault in (
        ({"label": "north"}, "'north' is no label such as site=north"),
        ({"state": "odd"}, "devices are never 'odd', but active"),
        ({"task": "air"}, "this home has no task 'air'"),
    ):
        found = _view(DEVICES, fleet, **asked)
        assert fault in found.fault and not found.devices and found.total == 0


def test_many_devices_are_on_several_pages(own_home: AggregatorHome) -> None:
    store = own_home.open_store()
    with store.database.transaction():
        for place in range(100, 200):
            name = device_id(place)
            store.devices.add(
                DeviceRow(name, name * 2, name, bytes(32), 0, name[:8], int(START), 1)
            )
    store.database.close()
    with Fleet.open(own_home.folder) as fleet:
        first: DevicesView = _view(DEVICES, fleet, q="")
        assert len(first.devices) == PAGE_DEVICES and first.before == ""
        assert first.after == "/devices?page=2"
        second: DevicesView = _view(DEVICES, fleet, page="2")
        assert (second.first, second.last, second.after) == (101, 140, "")
        assert second.before == "/devices"
        for page in ("0", "-1", "x", "9" * 50):
            assert _view(DEVICES, fleet, page=page).first == 1
        assert not _view(DEVICES, fleet, page="999999999").devices


def test_one_devices_page_has_all_that_it_told(fleet: Fleet) -> None:
    view = _view(DEVICE, fleet, device=_FIFTH)
    facts = dict(view.facts)
    assert facts["id"] == _FIFTH and facts["platform"] == "Linux aarch64"
    assert facts["onnxruntime"] == "1.20.1" and "on two machines" in facts
    (task,) = view.history
    assert [each.round for each in task.rounds] == [ROUND - 1, ROUND - 2, ROUND - 3]
    assert task.rounds[0].items == "1 of 20 unknown"
    assert task.habit.startswith("Its updates came within 10 s of a round's opening of late; ")
    assert not view.revoked and _view(DEVICE, fleet, device=device_id(7).hex()).revoked
    with pytest.raises(AggregatorError, match="no device named"):
        _view(DEVICE, fleet, device="nobody")
    with pytest.raises(AggregatorError, match="no device named"):
        _view(DEVICE, fleet)


def test_options_with_names_stand_beside_each_other(own_home: AggregatorHome) -> None:
    store = own_home.open_store()
    reports = store.first.reports.trained(99)
    store.first.reports.keep_last(ROUND + 99)
    store.first.reports.add(
        [
            each._replace(option=option, seconds=seconds, device_id=device_id(place))
            for place, (each, option, seconds) in enumerate(
                zip(reports, ("full", "1of4", "1of4"), (3.0, 1.0, 2.0), strict=False)
            )
        ]
    )
    store.database.close()
    with Fleet.open(own_home.folder) as fleet:
        (found,) = _view(DEVICES, fleet).capability
    assert [(each.option, each.median) for each in found.options] == [
        ("1of4", "1.5 s"),
        ("full", "3 s"),
    ]
    assert ">1of4</text>" in found.picture.html


# Models.


def test_models_are_those_that_are_kept_with_their_marks(fleet: Fleet) -> None:
    view: ModelsView = _view(MODELS, fleet)
    assert [each.version for each in view.versions] == [30, 29, 28, 27, 26, 25, 3, 0]
    marked = {each.version: (each.best, each.pinned, each.awaited) for each in view.versions}
    assert marked[3] == (False, True, False)
    assert sum(best for best, _, _ in marked.values()) == 1
    assert all(set(each.files) == {"safetensors", "onnx"} for each in view.versions)
    everything: ModelsView = _view(MODELS, fleet, all="1")
    assert len(everything.versions) == VERSIONS + 1
    assert everything.versions[10].files == ()


def test_a_version_that_is_asked_for_is_marked(own_home: AggregatorHome) -> None:
    store = own_home.open_store()
    with store.database.transaction():
        store.first.versions.add(
            VersionRow(31, 0, START, 0, "", "rollback to 3", 0, {}, False, True, 0), {}
        )
        store.first.versions.ask_for(28)
    store.database.close()
    with Fleet.open(own_home.folder) as fleet:
        view: ModelsView = _view(MODELS, fleet)
    assert view.awaits and [each.version for each in view.versions if each.awaited] == [28]
    assert view.versions[0].origin == "rollback to 3" and view.rollback


# Audit.


def test_what_was_done_is_written_as_commands_take_it(own_home: AggregatorHome) -> None:
    with Fleet.open(own_home.folder) as fleet:
        fleet.invite(1, name="Hall-new", labels={"site": "north", "line": "b"})
        (line,) = _view(AUDIT, fleet).lines
    assert line.action == "invite" and line.is_done
    assert line.arguments.endswith("name: Hall-new, labels: site=north line=b")


# As browsers have them.


@pytest.fixture
def console(own_home: AggregatorHome) -> Iterator[InProcess]:
    add_users(own_home)
    made = InProcess(own_home)
    yield made
    made.close()


_ADDRESSES = (
    *("/now", "/learning", "/learning?compare=12,30", "/devices", f"/devices/{_FIFTH}"),
    *("/models", "/models?all=1"),
)


@pytest.mark.parametrize("name", ["vic", "anna"])
def test_pages_of_a_full_fleet_are_drawn_for_those_who_may_do_things_and_others(
    console: InProcess, name: str
) -> None:
    browser, offered = console.logged_in(name), set()
    for address in _ADDRESSES:
        answer = browser.get(address)
        assert answer.status_code == 200 and "This cannot be" not in answer.text, answer.text
        offered |= set(re.findall(r'href="/do/(\w+)\?', answer.text))
        heads = [int(each) for each in re.findall(r"<h([1-6])", answer.text)]
        assert heads[0] == 1 and all(b - a <= 1 for a, b in pairwise(heads))
        assert "<style" not in answer.text and not re.search(r' (style|on\w+)="', answer.text)
    assert offered == (
        {"pause", "revoke", "invite", "pin", "unpin", "rollback"} if name == "anna" else set()
    )


def test_what_pages_link_to_is_there(console: InProcess) -> None:
    """And each deed's question is asked with what the page knows."""
    anna, asked = console.logged_in("anna"), set()
    for address in _ADDRESSES:
        for href in set(re.findall(r'href="(/[^"#]*)', anna.get(address).text)):
            asked.add(href.replace("&amp;", "&"))
    assert len(asked) > 60
    for href in sorted(asked):
        if href.endswith(".onnx?task=default") or href.startswith("/static"):
            continue  # which takes long, and is tested where it is made
        answer = anna.get(href)
        assert answer.status_code in (200, 303), (href, answer.text)
        if href.startswith("/do/") and "invite" not in href and "?" in href:
            assert "This will happen" in answer.text, href


def test_a_viewer_takes_files_away(console: InProcess) -> None:
    vic = console.logged_in("vic")
    answer = vic.get("/learning/figures.csv?task=default")
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["content-disposition"] == 'attachment; filename="figures.csv"'
    assert answer.text.startswith("version,round,stage,")
    answer = vic.get("/learning/picture.svg?picture=brings")
    assert answer.headers["content-type"].startswith("image/svg+xml")
    assert vic.get("/learning/picture.svg?picture=none").status_code == 400
    assert vic.get("/learning/figures.csv?task=none").status_code == 400
    assert vic.get("/learning/other.csv").status_code == 404


def test_a_device_that_is_not_there_is_told(console: InProcess) -> None:
    answer = console.logged_in("vic").get("/devices/ffff")
    assert answer.status_code == 400 and "no device named" in answer.text
    assert 'href="/devices" aria-current="page"' in answer.text


def test_a_page_that_is_not_there_has_the_way_to_those_that_are(console: InProcess) -> None:
    for browser in (console.logged_in("vic"), console.browser()):
        answer = browser.get("/devises/list")
        assert answer.status_code == 404 and "There is no such page" in answer.text
        assert ('href="/devices"' in answer.text) == ("vic, viewer" in answer.text)
        assert 'href="/"' in answer.text


def test_names_are_drawn_as_text_wherever_they_stand(console: InProcess) -> None:
    nasty = "<img src=x onerror=alert(1)>"
    store = console.home.open_store()
    store.devices.set_name(device_id(20), nasty)
    store.devices.set_labels(device_id(20), {"site": nasty[:20]})
    report = store.first.reports.of(device_id(20))[0]
    store.first.reports.add([report._replace(round=ROUND, option=nasty[:16], reason=nasty[:20])])
    (figure, *_) = store.first.evaluations.latest()[0].figures
    store.first.evaluations.put(VERSIONS, ROUND, [figure, replace(figure, part=nasty)])
    (row,) = store.first.rounds.latest()
    store.first.rounds.close(replace(row, participants=3, metrics={nasty: 1.0}))
    store.database.close()
    anna = console.logged_in("anna")
    for address in (*_ADDRESSES, f"/devices/{device_id(20).hex()}", f"/devices?q={nasty}"):
        text = anna.get(address).text
        assert "<img" not in text, address
    assert "&lt;img" in anna.get("/learning").text and "&lt;img" in anna.get("/devices").text


def test_each_page_that_changes_has_a_stream_of_its_own(console: InProcess) -> None:
    """By the address of the page, with what was asked for."""
    vic = console.logged_in("vic")
    for address, events in (
        (f"/devices/{_FIFTH}", f"/events?page=device&amp;device={_FIFTH}"),
        ("/devices?q=a&state=active", "/events?page=devices&amp;q=a&amp;state=active"),
    ):
        assert f'data-events="{events}"' in vic.get(address).text
    assert len({each.name for each in PAGES}) == len(PAGES)


def test_several_tasks_can_be_chosen_from(console: InProcess) -> None:
    store = console.home.open_store()
    store.tasks.add("air", "tasks/air.toml", "x")
    store.database.close()
    text = console.logged_in("vic").get("/learning").text
    assert '<a href="/learning?task=default" aria-current="true">default</a>' in text
    assert '<a href="/learning?task=air">air</a>' in text
    assert "evaluation" in console.logged_in("vic").get("/learning?task=air").text
