"""A device's life against the other end, through a real broker."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from device_sdk.cli import main
from device_sdk.cli.run import status_line
from device_sdk.device import Device
from device_sdk.errors import NothingLearnt, UnknownUser
from device_sdk.evaluation.report import EvaluationTerms
from device_sdk.wire.publish.report import ItemCount
from tests.fakes.small_aggregator import ITEMS, WIDTH, SmallAggregator, small_catalogue


def await_receipt(aggregator: SmallAggregator, device: Device, round_id: int) -> None:
    aggregator.await_(lambda: device.status().receipted_round == round_id)


def test_rounds_are_trained_counted_and_recommended_from(
    device: Device, aggregator: SmallAggregator
) -> None:
    device.record("film-30", user="ben")
    with pytest.raises(NothingLearnt, match="no round"):
        device.recommend(3, user="anna")
    device.start()
    for number in (1, 2):
        aggregator.open_round()
        await_receipt(aggregator, device, number)
        assert device.status().verdict == "counted"
        assert aggregator.close_round() == number
    status = device.status()
    assert (status.round, status.outcome, status.k, status.version) == (2, "trained", 4, 1)
    assert status.outbox == 0 and status.session
    assert aggregator.rounds_seen() == [1, 2]
    assert not aggregator.seen.refused

    best = device.recommend(40, user="anna")
    seen = {f"film-{n}" for n in range(1, 7)}
    assert len(best) == 34 and not seen & {item for item, _ in best}
    assert [score for _, score in best] == sorted((s for _, s in best), reverse=True)
    assert device.title(best[0][0]) == best[0][0].replace("film-", "Film ")
    assert len(device.recommend(5, user="ben")) == 5
    with pytest.raises(UnknownUser, match="'carl'"):
        device.recommend(3, user="carl")

    assert device.stop()
    device.close()
    with Device.open(device.home) as again:
        assert again.recommend(40, user="anna") == best


def test_a_device_stops_and_starts_as_often_as_one_likes(
    device: Device, aggregator: SmallAggregator
) -> None:
    for number in (1, 2, 3):
        device.start()
        device.start()  # it runs already: nothing happens
        aggregator.open_round()
        await_receipt(aggregator, device, number)
        assert device.status().running
        assert device.stop() and device.stop()
        assert not device.status().running and not device.status().connected
    assert aggregator.rounds_seen() == [1, 2, 3]


def test_a_full_disk_is_said_and_survived(device: Device, aggregator: SmallAggregator) -> None:
    device.start()
    aggregator.catalogue = small_catalogue(2000)
    aggregator.method.grow(np.full((2000 - ITEMS, WIDTH), 0.1, np.float32))
    aggregator.await_(lambda: device.status().session)
    limit = device._home.database.row("PRAGMA page_count")
    device._home.database.row(f"PRAGMA max_page_count = {limit[0]}")  # as if nothing were left
    aggregator.open_round()
    aggregator.await_(lambda: "full" in device.status().problem)
    assert not aggregator.seen.bodies and device.status().running
    device._home.database.row("PRAGMA max_page_count = 100000")
    await_receipt(aggregator, device, 1)
    assert device.status().verdict == "counted" and device.status().problem == ""


def test_the_commands_tell_and_recommend_beside_a_running_device(
    device: Device, aggregator: SmallAggregator, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(device.home)]
    assert main(["recommend", *home, "--user", "anna"]) == 1
    assert "no round has been trained here yet" in capsys.readouterr().err
    device.start()
    aggregator.open_round()
    await_receipt(aggregator, device, 1)

    assert main(["status", *home]) == 0
    told = capsys.readouterr().out
    assert device.device_id in told and "round 1: counted" in told and "k = 4" in told
    assert main(["status", *home, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "counted"
    assert main(["recommend", *home, "--user", "anna", "-n", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "Film " in lines[2]
    assert main(["recommend", *home, "--user", "anna", "-n", "3", "--json"]) == 0
    best = device.recommend(3, user="anna")
    found = json.loads(capsys.readouterr().out)
    assert [(each["item"], each["score"]) for each in found] == best
    assert main(["recommend", *home, "-n", "3", "--json"]) == 0  # the only local user
    assert [each["item"] for each in json.loads(capsys.readouterr().out)] == [i for i, _ in best]
    device.record("film-30", user="ben")
    assert main(["recommend", *home]) == 1
    assert "'default'; recorded here: anna, ben (--user NAME)" in capsys.readouterr().err
    assert main(["run", *home]) == 1
    assert "in use by process" in capsys.readouterr().err


def test_a_file_is_recorded_in_its_order(device: Device, tmp_path: Path) -> None:
    device.close()
    views = tmp_path / "views.csv"
    views.write_text("bea,film-3\nbea,film-1\ncleo,film-2\ncleo,film-1\ncleo,film-3\n")
    home = ["--home", str(device.home)]
    assert main(["run", *home, "--interactions", str(views), "--for", "0.1"]) == 0
    with Device.open(device.home, read_only=True) as reader:
        rows = {f"film-{row}": row for row in range(ITEMS)}
        latest, _ = reader._home.interactions.latest(rows)
        assert [latest[reader._home.interactions.place(user)] for user in ("bea", "cleo")] == [1, 3]


def test_a_file_is_recorded_by_its_times(
    device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However its rows are sorted."""
    device.close()
    rows = [(user, f"film-{n}", n) for n in range(1, 5) for user in ("bea", "cleo")]
    rows = [(user, item, -n if user == "cleo" else n) for user, item, n in rows]
    views = tmp_path / "views.csv"
    views.write_text("user,item,timestamp\n" + "".join(f"{u},{i},{t}\n" for u, i, t in rows))
    home = ["--home", str(device.home)]
    assert main(["run", *home, "--interactions", str(views), "--for", "0.1"]) == 0
    with Device.open(device.home, read_only=True) as reader:
        store = reader._home.interactions
        latest, _ = store.latest({f"film-{row}": row for row in range(ITEMS)})
        assert [latest[store.place(user)] for user in ("bea", "cleo")] == [4, 1]
    said = capsys.readouterr().out
    assert "recorded 8 new of 8 interactions, as newer than the 6 that were here" in said
    views.write_text(f"user,item\nbea,{'f' * 257}\n")
    assert main(["run", *home, "--interactions", str(views), "--for", "0.1"]) == 1
    assert "--interactions: the item 'fff" in capsys.readouterr().err
    assert main(["run", *home, "--columns", "user=1,item=2"]) == 1
    assert "are for the file of --interactions" in capsys.readouterr().err


def test_items_that_the_catalogue_does_not_know_are_counted_on_both_ends(
    device: Device, aggregator: SmallAggregator, capsys: pytest.CaptureFixture[str]
) -> None:
    device.record_all([(f"FILM-{n}", "anna") for n in range(4)])
    device.start()
    aggregator.open_round()
    await_receipt(aggregator, device, 1)
    status = device.status()
    assert (status.verdict, status.items, status.unknown_items) == ("counted", 10, 4)
    (_, report), *_ = aggregator.seen.reports
    assert report.details is not None and str(report.details.items) == "4 of 10 items unknown"
    assert main(["status", "--home", str(device.home)]) == 0
    assert "10 interactions; 4 of 10 items unknown to the catalogue" in capsys.readouterr().out
    assert "4 of 10 items unknown" in status_line(status)


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([("FILM-1 ", "ben"), ("x", "ben")], "'FILM-1 ' and 'film-1' differ in spelling alone"),
        ([("ben", "film-1"), ("ben", "film-2")], "users and items may be swapped"),
        ([("x", "ben")], "recorded are such as 'x', the catalogue has such as 'film-0'"),
    ],
)
def test_a_device_that_knows_no_item_declines(
    device: Device, aggregator: SmallAggregator, pairs: list[tuple[str, str]], why: str
) -> None:
    device.forget(user="anna")
    device.record_all(pairs)
    device.start()
    aggregator.open_round()
    aggregator.await_(lambda: device.status().outcome == "declined")
    status, count = device.status(), len({item for item, _ in pairs})
    assert status.detail.startswith(f"{count} of {count} items unknown: ") and why in status.detail
    assert (status.items, status.unknown_items) == (count, count)
    aggregator.await_(lambda: bool(aggregator.seen.reports))
    ((_, report),) = aggregator.seen.reports
    assert (report.outcome.value, report.reason) == ("declined", "unknown-items")
    assert report.details is not None and report.details.items == ItemCount(count, count)
    assert not aggregator.seen.bodies
    with pytest.raises(NothingLearnt):
        device.recommend(3, user=pairs[0][1])


def test_an_evaluation_is_shown_to_the_devices_owner(
    device: Device, aggregator: SmallAggregator, capsys: pytest.CaptureFixture[str]
) -> None:
    device.start()
    asked = EvaluationTerms(("hr10", "ndcg10_all", "accuracy"))
    for number in (1, 2):
        aggregator.open_round(evaluation=asked)
        await_receipt(aggregator, device, number)
        assert aggregator.close_round() == number
    status = device.status()
    assert (status.verdict, status.evaluated_round, status.evaluated_version) == ("counted", 2, 1)
    assert set(status.evaluation) == {"global"}, "least squares trains one model"
    assert set(status.evaluation["global"]) == {"hr10", "ndcg10_all", "users"}
    assert status.evaluation["global"]["users"] == 1
    device.close()
    capsys.readouterr()
    assert main(["status", "--home", str(device.home)]) == 0
    shown = capsys.readouterr().out
    assert "quality, global" in shown and "version 1: hr10" in shown and "of 1 users" in shown
    assert "not evaluated" in shown and "'accuracy'" in shown
    assert main(["status", "--home", str(device.home), "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["evaluation"]["global"]["users"] == 1
